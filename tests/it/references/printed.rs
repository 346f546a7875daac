//! What tool and scripts print of a secret. What can be masked is masked, in the log and in the stored output.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use integration_tests::{Repository, job};
use job_contract::{StepType, Tool};
use serde_json::json;

use super::failures::{environment, secret, vault};
use super::{Journey, set};

/// Of characters that encodings treat differently.
const SECRET: &str = "pa55/w0rd+\"quo'te\"&<x>=canary";
const REVERSED: &str = "yranac=>x<&";

const MODULE: &str = r#"variable "secret" {}
output "whole" {
  value = "whole ${var.secret}"
}
output "document" {
  value = jsonencode({ p = var.secret })
}
output "address" {
  value = "https://u:${urlencode(var.secret)}@h.example.test/?q=${urlencode(var.secret)}"
}
output "encoded" {
  value = base64encode(var.secret)
}
output "login" {
  value = base64encode("user:${var.secret}")
}
output "reversed" {
  value = jsonencode({ p = strrev(var.secret) })
}
"#;

/// The first two writes are one line. The last one has the characters in another order.
const SCRIPT: &str = r#"printf 'two writes: '; printf %s "${SECRET:0:12}"; sleep 0.2; printf '%s\n' "${SECRET:12}"
printf 'encoded: '; printf %s "$SECRET" | base64 -w 20; echo
printf 'login: '; printf %s "user:$SECRET" | base64
printf 'document: '; jq -nc '{p: env.SECRET}'
printf 'address: https://u:%s@h.example.test/\n' "$(jq -rn 'env.SECRET | @uri')"
printf 'reversed: '; printf %s "$SECRET" | rev; echo"#;

with_both_tools! {
    what_is_printed_of_a_secret_is_masked_unless_its_characters_have_another_order,
}

fn what_is_printed_of_a_secret_is_masked_unless_its_characters_have_another_order(tool: Tool) {
    let server = vault(|_| secret(&json!({ "k": SECRET })));
    let mut journey = Journey::new(environment(&server));
    journey.repository = Repository::module(MODULE);
    let mut apply = job::step_by(tool, StepType::Apply, &journey.repository);
    let reference = "${vault:kv/app.k}";
    apply.variables.insert("secret".into(), reference.into());
    set(&mut apply, &[("SECRET", reference)]);
    apply.command_list = vec![job::after(job::bash(1, SCRIPT))];
    journey.machine.queue(&[&apply]);
    let outcome = journey.executor(&apply).run().expect_code(0);
    let stored = journey.machine.step_output(&apply);
    let context = serde_json::to_string(&journey.machine.context(&apply)).unwrap();
    let encoded = STANDARD.encode(SECRET);
    let of_login = STANDARD.encode(format!("user:{SECRET}"));
    for (place, text) in [
        ("the log", outcome.log()),
        ("the stored output", &stored),
        ("the job context", &context),
    ] {
        let joined: String = text.split_whitespace().collect();
        for hidden in ["canary", "pa55", &encoded[8..16], &of_login[16..24]] {
            assert!(!joined.contains(hidden), "{hidden} is in {place}\n{text}");
        }
    }
    for text in [outcome.log(), &stored] {
        for shown in [
            "whole ***",
            "two writes: ***",
            "encoded: ***",
            "document: {\"p\":\"***\"}",
            "address: https://u:***@h.example.test/",
            // Nobody can know what code of a run makes of a secret.
            &format!("reversed: {REVERSED}"),
        ] {
            assert!(text.contains(shown), "{shown}\n{text}");
        }
    }
}
