//! Packages of locked providers come from the store that runs share, or from their registry by several downloads at a time.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::thread;

use integration_tests::machine::{ExecutorRun, files_below};
use integration_tests::{Machine, Outcome, Repository, job};
use job_contract::{JobData, Tool, env};
use test_peers::providers::{PROVIDERS, Registry, present};
use test_peers::skips::needed;

use super::requirements;
use crate::machine;

with_both_tools! {
    the_second_run_of_locked_providers_asks_no_registry,
    each_kind_of_lock_file_gets_the_right_package,
    runs_that_begin_at_a_time_lock_the_right_packages,
}

/// A digest of another platform, in a lock file.
const OTHER: &str = "    \"h1:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=\",";
const LOCK_FILE: &str = ".terraform.lock.hcl";

/// A registry with five providers, and a machine whose runs share a store.
struct Locked {
    registry: Registry,
    machine: Machine,
    tool: Tool,
    /// What the tool writes without any help.
    lock: String,
    /// Of all runs.
    repositories: Mutex<Vec<Repository>>,
}

impl Locked {
    /// `None` if the test is skipped.
    #[track_caller]
    fn new(tool: Tool) -> Option<Self> {
        needed(present())?;
        let (registry, machine) = (Registry::start().unwrap(), machine());
        fs::write(machine.scratch("ca.pem"), registry.certificate()).unwrap();
        let mut it = Self {
            registry,
            machine,
            tool,
            lock: String::new(),
            repositories: Mutex::default(),
        };
        let kept = it.machine.scratch("first.lock.hcl");
        it.plan("1", None, &kept, &[]).run().expect_code(0);
        it.lock = fs::read_to_string(kept).unwrap();
        assert_eq!(it.registry.downloads(), PROVIDERS.len());
        assert_eq!(it.packages(), Vec::<PathBuf>::new(), "nothing verified it");
        Some(it)
    }

    /// A plan of all providers, with a lock file in the repository. `kept` gets the one after `init`.
    fn plan(
        &self,
        job_id: &str,
        lock: Option<&str>,
        kept: &Path,
        variables: &[(&str, &str)],
    ) -> ExecutorRun<'_> {
        let versions = requirements(&self.registry.host());
        let mut files = vec![("main.tf", MODULE), ("versions.tf", &versions)];
        files.extend(lock.map(|lock| (LOCK_FILE, lock)));
        let keep = format!("cp {LOCK_FILE} '{}'", kept.display());
        let repository = Repository::with(&files);
        let mut plan = JobData {
            command_list: vec![job::before(job::bash(1, &keep))],
            workspace_id: format!("w-{job_id}"),
            ..job::in_job(&job::plan_by(self.tool, &repository), job_id)
        };
        for (name, value) in variables {
            plan.environment_variables
                .insert((*name).to_owned(), (*value).to_owned());
        }
        self.repositories.lock().unwrap().push(repository);
        self.machine.queue(&[&plan]);
        let certificate = self.machine.scratch("ca.pem");
        self.machine
            .executor(&plan)
            .env("SSL_CERT_FILE", certificate)
    }

    fn run(&self, job_id: &str, lock: &str) -> Outcome {
        let kept = self.machine.scratch(&format!("{job_id}.lock.hcl"));
        self.plan(job_id, Some(lock), &kept, &[]).run()
    }

    fn run_with(&self, job_id: &str, variables: &[(&str, &str)]) -> Outcome {
        let kept = self.machine.scratch(&format!("{job_id}.lock.hcl"));
        self.plan(job_id, Some(&self.lock), &kept, variables).run()
    }

    /// The lock file after the `init` of a run.
    fn lock_after(&self, job_id: &str) -> String {
        let kept = self.machine.scratch(&format!("{job_id}.lock.hcl"));
        fs::read_to_string(kept).unwrap()
    }

    fn packages(&self) -> Vec<PathBuf> {
        let folder = self.machine.data_dir().join("providers");
        if folder.is_dir() {
            files_below(&folder)
        } else {
            Vec::new()
        }
    }
}

const MODULE: &str = "resource \"random_pet\" \"name\" {}\nresource \"null_resource\" \"one\" {}\n";

fn says(outcome: &Outcome, stored: usize, fetched: usize) {
    let line = format!("Providers: {stored} from the store, {fetched} downloaded.");
    assert!(outcome.log().contains(&line), "{line}: {outcome}");
}

/// The digests of a lock file, in any order.
fn digests(lock: &str) -> Vec<&str> {
    let words = lock.split('"');
    let mut found: Vec<_> = words
        .filter(|word| word.starts_with("h1:") || word.starts_with("zh:"))
        .collect();
    found.sort_unstable();
    found
}

fn the_second_run_of_locked_providers_asks_no_registry(tool: Tool) {
    let Some(it) = Locked::new(tool) else { return };
    let first = it.run("2", &it.lock).expect_code(0);
    says(&first, 0, PROVIDERS.len());
    assert_eq!(it.packages().len(), PROVIDERS.len());
    assert_eq!(it.registry.downloads(), 2 * PROVIDERS.len());

    let asked = it.registry.asked();
    let second = it.run("3", &it.lock).expect_code(0);
    says(&second, PROVIDERS.len(), 0);
    assert_eq!(it.registry.asked(), asked, "{second}");
    assert_eq!(it.lock_after("3"), it.lock);

    // What a run has done to the store is noticed, and mended.
    let changed = it.packages();
    for path in &changed {
        fs::remove_file(path).unwrap();
        fs::write(path, "forged").unwrap();
    }
    let third = it.run("4", &it.lock).expect_code(0);
    says(&third, 0, PROVIDERS.len());
    assert_eq!(it.packages(), changed);
    let fourth = it.run("5", &it.lock).expect_code(0);
    says(&fourth, PROVIDERS.len(), 0);

    // Who chooses another place for providers gets it, and the log says so.
    for (job_id, name, value) in [
        ("6", "TF_CLI_CONFIG_FILE", "/dev/null"),
        ("7", "TF_CLI_ARGS_init", "-upgrade"),
    ] {
        let own = it.run_with(job_id, &[(name, value)]).expect_code(0);
        let line = format!("Providers are not fetched before init: `{name}` is set.");
        assert!(own.log().contains(&line), "{own}");
    }

    // In a pod, the volume of the plugin cache is a store, and the tool itself never writes into it.
    let volume = it.machine.scratch("volume");
    let in_pod = |job_id: &str| {
        let kept = it.machine.scratch(&format!("{job_id}.lock.hcl"));
        let run = it.plan(job_id, Some(&it.lock), &kept, &[]);
        let run = run.env(env::POD_NAME, "pod").env(env::RECORDS, "shared");
        run.env("TF_PLUGIN_CACHE_DIR", &volume).run().expect_code(0)
    };
    says(&in_pod("8"), 0, PROVIDERS.len());
    says(&in_pod("9"), PROVIDERS.len(), 0);
    let names: Vec<_> = fs::read_dir(&volume).unwrap().flatten().collect();
    assert_eq!((names.len(), names[0].file_name()), (1, "providers".into()));
}

fn each_kind_of_lock_file_gets_the_right_package(tool: Tool) {
    let Some(it) = Locked::new(tool) else { return };
    let without = |kind: &str| {
        let lines = it.lock.lines().filter(|line| !line.contains(kind));
        lines.collect::<Vec<_>>().join("\n") + "\n"
    };
    let of_other = |line| {
        if str::contains(line, "\"h1:") {
            OTHER
        } else {
            line
        }
    };
    let other_platform = it.lock.lines().map(of_other);
    let other_platform = other_platform.collect::<Vec<_>>().join("\n") + "\n";
    let kinds = [
        ("2", it.lock.clone()),
        ("3", without("\"zh:")),
        ("4", without("\"h1:")),
        ("5", other_platform),
    ];
    for (number, (job_id, lock)) in kinds.iter().enumerate() {
        let outcome = it.run(job_id, lock).expect_code(0);
        let stored = if number == 0 { 0 } else { PROVIDERS.len() };
        says(&outcome, stored, PROVIDERS.len() - stored);
        let after = it.lock_after(job_id);
        for digest in digests(&it.lock)
            .iter()
            .filter(|digest| digest.starts_with("h1:"))
        {
            assert!(after.contains(digest), "{job_id}: no {digest} in {after}");
        }
    }
    // A wrong digest is the tool's business, which refuses the package.
    let wrong = without("\"h1:").replace("zh:", "zh:0000");
    let outcome = it.run("6", &wrong).expect_code(1);
    assert!(!outcome.log().contains("Providers: "), "{outcome}");
}

/// Terraform's own shared cache lets 13 of 60 such runs write wrong digests.
fn runs_that_begin_at_a_time_lock_the_right_packages(tool: Tool) {
    let Some(it) = Locked::new(tool) else { return };
    for round in 0..2 {
        let folder = it.machine.data_dir().join("providers");
        if folder.is_dir() {
            fs::remove_dir_all(&folder).unwrap();
        }
        thread::scope(|scope| {
            let runs: Vec<_> = (0..6)
                .map(|number| format!("{}", 100 + round * 10 + number))
                .map(|job_id| {
                    let it = &it;
                    scope.spawn(move || {
                        it.run(&job_id, &it.lock).expect_code(0);
                        it.lock_after(&job_id)
                    })
                })
                .collect();
            for run in runs {
                assert_eq!(digests(&run.join().unwrap()), digests(&it.lock));
            }
        });
        assert_eq!(it.packages().len(), PROVIDERS.len());
    }
}
