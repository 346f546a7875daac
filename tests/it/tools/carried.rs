//! What `api-launcher cache export` writes is a filesystem mirror of the tool, and what `import` reads fills another store.

use std::fs;
use std::path::Path;
use std::process::Command;

use job_contract::{Tool, env};
use test_peers::providers::PROVIDERS;

use super::provider_store::{Locked, says};
use crate::LAUNCHER;

with_both_tools! {
    an_exported_folder_is_a_mirror_of_the_tool_and_fills_another_store,
}

fn cache(command: &str, folder: &Path, store: &Path) -> String {
    let done = Command::new(LAUNCHER)
        .args(["cache", command])
        .arg(folder)
        .arg("--dir")
        .arg(store)
        .output()
        .unwrap();
    assert!(done.status.success(), "{done:?}");
    String::from_utf8(done.stdout).unwrap()
}

fn an_exported_folder_is_a_mirror_of_the_tool_and_fills_another_store(tool: Tool) {
    let it = or_skip!(Locked::new(tool));
    let all = PROVIDERS.len();
    let kept = it.machine.scratch("kept.lock.hcl");
    let filled = it.plan("2", Some(&it.lock), &kept, &[]).run();
    says(&filled.expect_code(0), 0, all);
    let folder = it.machine.scratch("exported");
    let said = cache("export", &folder, &it.machine.data_dir());
    assert_eq!(said, format!("Exported: {all} of {all} packages.\n"));

    // The tool has nothing else.
    let config = it.machine.scratch("exported.tfrc");
    let text = format!(
        "provider_installation {{\n  filesystem_mirror {{\n    path = \"{}\"\n  }}\n}}\n",
        folder.display()
    );
    fs::write(&config, text).unwrap();
    let own = [("TF_CLI_CONFIG_FILE", config.to_str().unwrap())];
    it.plan("3", Some(&it.lock), &kept, &own)
        .run()
        .expect_code(0);

    let other = it.machine.scratch("imported");
    let said = cache("import", &folder, &other);
    assert_eq!(said, format!("Imported: {all} of {all} packages.\n"));
    let from_there = it
        .plan("4", Some(&it.lock), &kept, &[])
        .env(env::PROVIDER_CACHE_DIR, &other)
        .run();
    says(&from_there.expect_code(0), all, 0);
}
