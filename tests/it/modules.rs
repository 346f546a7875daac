//! Modules from git that runs share on one machine.

use integration_tests::{Repository, job};
use job_contract::{Tool, env};
use test_peers::git_http::{self, GitHttpOptions};
use test_peers::repository::git;

use crate::machine;

with_both_tools! {
    a_module_outside_of_the_work_tree_is_not_planned,
    a_second_run_fetches_no_module_again,
}

/// The tool finds a folder there, without configuration, and would take it for a module without resources.
fn a_module_outside_of_the_work_tree_is_not_planned(tool: Tool) {
    let source = Repository::module("module \"m\" {\n  source = \"../\"\n}\n");
    let machine = machine();
    let plan = job::plan_by(tool, &source);
    machine.queue(&[&plan]);
    let outcome = machine.executor(&plan).run().expect_code(1);
    let text = "of `module.m` leads out of the work tree";
    assert!(outcome.error().contains(text), "{outcome}");
}

fn a_second_run_fetches_no_module_again(tool: Tool) {
    let folder = tempfile::tempdir().unwrap();
    let server = git_http::serve(folder.path(), GitHttpOptions::default()).unwrap();
    let url = server.url();
    let call = |name: &str, rest: &str| {
        format!("module \"{name}\" {{\n  source = \"git::{url}/{name}.git{rest}\"\n}}\n")
    };
    let inner = Repository::module("output \"answer\" { value = 42 }\n");
    let outer = Repository::module(&call("inner", "?ref=v1"));
    for (name, repository) in [("inner", &inner), ("outer", &outer)] {
        let from = repository.path().display().to_string();
        let to = format!("{name}.git");
        git(folder.path(), &["clone", "--quiet", "--bare", &from, &to]);
    }
    git(&folder.path().join("inner.git"), &["tag", "v1"]);
    let source = Repository::module(&call("outer", "//."));
    let machine = machine();
    let plan = job::plan_by(tool, &source);
    let fetches = || {
        let requests = server.requests();
        let is_fetch = |body: &[u8]| String::from_utf8_lossy(body).contains("command=fetch");
        requests.iter().filter(|it| is_fetch(&it.body)).count()
    };
    let run = |settings: &[(&str, &str)]| {
        machine.queue(&[&plan]);
        let executor = settings
            .iter()
            .fold(machine.executor(&plan), |executor, (name, value)| {
                executor.env(name, value)
            });
        let outcome = executor.run();
        assert_eq!(outcome.code(), 0, "{outcome}");
        assert!(outcome.left_behind.is_empty(), "{outcome}");
        outcome.log().to_owned()
    };
    let said = "Repositories of modules: ";
    assert!(run(&[]).contains(&format!("{said}0 in the store, 2 kept for later runs.")));
    assert_eq!(fetches(), 2);
    assert!(run(&[]).contains(&format!("{said}2 in the store, 0 kept for later runs.")));
    assert_eq!(fetches(), 2);
    assert!(!run(&[(env::MODULE_CACHE, "false")]).contains(said));
    assert_eq!(fetches(), 4);
    // Others may read the folder of pods. Only the operator knows.
    let shared = machine.scratch("shared").display().to_string();
    let mut of_pod = vec![
        (env::POD_NAME, "pod"),
        (env::RECORDS, "shared"),
        (env::PROVIDER_CACHE_DIR, &*shared),
    ];
    assert!(!run(&of_pod).contains(said));
    of_pod.push((env::MODULE_CACHE, "true"));
    assert!(run(&of_pod).contains(&format!("{said}0 in the store, 2 kept for later runs.")));
}
