//! References to secrets in runs of a person's machine, with settings in files.

use std::fs;

use integration_tests::Running;
use job_contract::env;
use serde_json::json;

use super::failures::{TOKEN, secret, vault};
use crate::laptop;

const SECRET: &str = "laptop-canary";
/// SHA-256 of it.
const DIGEST: &str = "936d25bcbd7686dd6c29dfc6d25b9e6e32687434018705bf326306fded773577";

#[test]
fn a_folder_is_applied_with_secrets_and_settings_from_files() {
    let server = vault(|_| secret(&json!({ "k": SECRET })));
    let laptop = laptop("");
    let script = laptop.write(
        "script",
        "echo \"A=$A\"; printf '%s %s' \"$A\" \"$DIGEST\" > \"$HOME/seen\"; env > \"$HOME/environment\"\n",
    );
    let module = format!(
        "variable \"password\" {{}}\nresource \"terraform_data\" \"a\" {{\n  provisioner \"local-exec\" {{\n    command = \"sh {}\"\n    \
         environment = {{ DIGEST = sha256(var.password) }}\n  }}\n}}\n",
        script.display()
    );
    laptop.write("stack/main.tf", &module);
    let token = laptop.write("vault-token", &format!("{TOKEN}\n"));
    let address = laptop.write("vault-address", &server.url());
    let in_file = |name| format!("{name}{}", env::FILE_SUFFIX);
    let reference = "${vault:kv/app.k}";
    let mut command = laptop.command(&["run", "stack", "--auto-approve"]);
    command
        .args(["--env", &format!("A={reference}")])
        .args(["--var", &format!("password={reference}")])
        .env(in_file(env::CUSTOMER_VAULT_ADDRESS), address)
        .env(in_file(env::CUSTOMER_VAULT_TOKEN), token);
    let finished = Running::start(&mut command).wait();
    assert_eq!(finished.code(), 0, "{finished}");
    let read = |name| fs::read_to_string(laptop.home().join(name)).unwrap();
    assert_eq!(read("seen"), format!("{SECRET} {DIGEST}"), "{finished}");
    assert!(!read("environment").contains("CUSTOMER_VAULT"));
    let shown = finished.to_string();
    assert!(shown.contains("A=***"), "{shown}");
    for hidden in [SECRET, TOKEN] {
        assert!(!shown.contains(hidden), "{hidden}\n{shown}");
    }
}
