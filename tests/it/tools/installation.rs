//! Where providers come from: a registry, a filesystem mirror, the plugin cache. The lock file decides what is accepted.

use std::fs;
use std::path::Path;

use integration_tests::machine::{ExecutorRun, files_below};
use integration_tests::{Machine, Repository, job};
use job_contract::{JobData, Tool};
use test_peers::providers::{PROVIDERS, Registry, present};
use test_peers::skips::needed;

use super::{Mirrored, destroy_by, requirements};
use crate::machine;

with_both_tools! {
    a_module_of_five_providers_from_a_registry_lives_from_plan_to_destroy,
    a_module_of_five_providers_from_a_mirror_lives_from_plan_to_destroy,
    a_lock_file_in_the_repository_lets_the_plugin_cache_be_used,
    a_provider_that_is_not_the_locked_one_is_refused,
    a_registry_with_an_unknown_certificate_is_refused,
}

/// A resource of each provider.
fn five_resources(note: &Path) -> String {
    format!(
        "resource \"random_pet\" \"name\" {{}}
resource \"null_resource\" \"one\" {{
  triggers = {{ name = random_pet.name.id }}
}}
resource \"local_file\" \"note\" {{
  filename = \"{}\"
  content  = random_pet.name.id
}}
resource \"tls_private_key\" \"key\" {{
  algorithm = \"ED25519\"
}}
resource \"time_static\" \"made\" {{}}
output \"name\" {{
  value = random_pet.name.id
}}
output \"key\" {{
  value     = tls_private_key.key.private_key_pem
  sensitive = true
}}
",
        note.display()
    )
}

const SECRET: &str = "PRIVATE KEY";

/// Plan, apply, a second plan and destroy.
fn live<'s>(
    tool: Tool,
    machine: &Machine,
    host: &str,
    prepare: impl Fn(&JobData) -> ExecutorRun<'s>,
) {
    let note = machine.scratch("note");
    let repository = Repository::with(&[
        ("main.tf", &five_resources(&note)),
        ("versions.tf", &requirements(host)),
    ]);
    let plan = job::plan_by(tool, &repository);
    let apply = job::apply_after(&plan);
    machine.queue(&[&plan, &apply]);
    let outcome = prepare(&plan).run().expect_code(0);
    assert_eq!(outcome.report().changes.unwrap().add, 5, "{outcome}");

    let outcome = prepare(&apply).run().expect_code(0);
    let mut resources = machine.resources(&apply);
    resources.sort();
    let all = [
        "local_file.note",
        "null_resource.one",
        "random_pet.name",
        "time_static.made",
        "tls_private_key.key",
    ];
    assert_eq!(resources, all, "{outcome}");
    let name = machine.output(&apply, "name");
    assert_eq!(fs::read_to_string(&note).unwrap(), name.as_str().unwrap());
    let context = serde_json::to_string(&machine.context(&apply)).unwrap();
    assert!(!context.contains(SECRET), "{context}");
    assert!(!outcome.to_string().contains(SECRET), "{outcome}");
    assert!(machine.step_output(&apply).contains("key = <sensitive>"));

    let again = job::in_job(&plan, "413");
    machine.queue(&[&again]);
    let outcome = prepare(&again).run().expect_code(0);
    assert!(!machine.record(&again).plan_changes, "{outcome}");
    assert!(outcome.report().changes.unwrap().is_empty(), "{outcome}");

    let destroy = destroy_by(tool, &repository, "414");
    machine.queue(&[&destroy]);
    let outcome = prepare(&destroy).run().expect_code(0);
    assert_eq!(machine.resources(&destroy), <[String; 0]>::default());
    assert_eq!(outcome.report().changes.unwrap().remove, 5, "{outcome}");
    assert!(!note.exists(), "{outcome}");
}

/// A registry, and what a tool needs to use it.
struct Registered {
    registry: Registry,
    machine: Machine,
}

impl Registered {
    #[track_caller]
    fn new() -> Option<Self> {
        needed(present())?;
        let (registry, machine) = (Registry::start().unwrap(), machine());
        fs::write(machine.scratch("ca.pem"), registry.certificate()).unwrap();
        Some(Self { registry, machine })
    }

    fn executor(&self, step: &JobData) -> ExecutorRun<'_> {
        let certificate = self.machine.scratch("ca.pem");
        self.machine
            .executor(step)
            .env("SSL_CERT_FILE", certificate)
    }

    /// A module that needs one provider alone.
    fn pet(&self) -> Repository {
        let (_, version) = PROVIDERS[2];
        let source = format!("{}/acme/random", self.registry.host());
        Repository::module(&format!(
            "terraform {{\n  required_providers {{\n    random = {{\n      source  = \"{source}\"\n      version = \
             \"{version}\"\n    }}\n  }}\n}}\nresource \"random_pet\" \"name\" {{}}\n"
        ))
    }

    /// Plans in a job of its own, with a plugin cache; keeps the lock file that `init` wrote.
    fn plan_with_cache(
        &self,
        tool: Tool,
        repository: &Repository,
        job_id: &str,
    ) -> ExecutorRun<'_> {
        let cache = self.machine.scratch("plugins");
        fs::create_dir_all(&cache).unwrap();
        let kept = self.machine.scratch("lock.hcl");
        let keep = format!("cp .terraform.lock.hcl '{}'", kept.display());
        let plan = JobData {
            command_list: vec![job::before(job::bash(1, &keep))],
            ..job::in_job(&job::plan_by(tool, repository), job_id)
        };
        self.machine.queue(&[&plan]);
        self.executor(&plan).env("TF_PLUGIN_CACHE_DIR", cache)
    }

    fn lock_file(&self) -> String {
        fs::read_to_string(self.machine.scratch("lock.hcl")).unwrap()
    }
}

fn a_module_of_five_providers_from_a_registry_lives_from_plan_to_destroy(tool: Tool) {
    let Some(it) = Registered::new() else { return };
    let host = it.registry.host();
    live(tool, &it.machine, &host, |step| it.executor(step));
    // Each of four steps has a work tree of its own. They share a store.
    assert_eq!(it.registry.downloads(), PROVIDERS.len());
}

fn a_module_of_five_providers_from_a_mirror_lives_from_plan_to_destroy(tool: Tool) {
    let Some(it) = Mirrored::new(tool) else {
        return;
    };
    live(tool, &it.machine, super::HOST, |step| it.executor(step));
}

fn a_lock_file_in_the_repository_lets_the_plugin_cache_be_used(tool: Tool) {
    let Some(it) = Registered::new() else { return };
    let repository = it.pet();
    it.plan_with_cache(tool, &repository, "21")
        .run()
        .expect_code(0);
    assert_eq!(it.registry.downloads(), 1);
    let cached = files_below(&it.machine.scratch("plugins"));
    assert!(!cached.is_empty());
    let locked = it.lock_file();
    assert!(locked.contains("\"h1:"), "{locked}");

    repository.commit(&[(".terraform.lock.hcl", &locked)]);
    let outcome = it
        .plan_with_cache(tool, &repository, "22")
        .run()
        .expect_code(0);
    assert_eq!(it.registry.downloads(), 1, "{outcome}");
    assert_eq!(it.lock_file(), locked);
    assert_eq!(files_below(&it.machine.scratch("plugins")), cached);
}

fn a_provider_that_is_not_the_locked_one_is_refused(tool: Tool) {
    let Some(it) = Registered::new() else { return };
    let repository = it.pet();
    it.plan_with_cache(tool, &repository, "21")
        .run()
        .expect_code(0);
    let locked = it.lock_file();
    let other: String = locked
        .lines()
        .map(|line| match line.split_once("\"h1:") {
            Some((before, _)) => format!("{before}\"h1:{}=\",\n", "A".repeat(43)),
            None if line.contains("\"zh:") => format!("    \"zh:{}\",\n", "0".repeat(64)),
            None => format!("{line}\n"),
        })
        .collect();
    repository.commit(&[(".terraform.lock.hcl", &other)]);
    let outcome = it
        .plan_with_cache(tool, &repository, "22")
        .run()
        .expect_code(1);
    assert!(outcome.log().contains("checksum"), "{outcome}");
    assert!(outcome.log().contains("random"), "{outcome}");
}

fn a_registry_with_an_unknown_certificate_is_refused(tool: Tool) {
    let Some(it) = Registered::new() else { return };
    let repository = it.pet();
    let plan = job::plan_by(tool, &repository);
    it.machine.queue(&[&plan]);
    let outcome = it.machine.run(&plan).expect_code(1);
    assert!(outcome.log().contains("certificate"), "{outcome}");
    assert_eq!(it.registry.downloads(), 0);
}
