//! Packages of locked providers come from the store that runs share, or from their registry by several downloads at a time.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::thread;

use integration_tests::machine::{ExecutorRun, files_below};
use integration_tests::{Machine, Outcome, Repository, job};
use job_contract::job::Command;
use job_contract::{JobData, Tool, env};
use test_peers::providers::{PROVIDERS, Registry, present};
use test_peers::skips::needed;

use super::{PATIENT, requirements};
use crate::limits::MemoryGroup;
use crate::machine;

with_both_tools! {
    the_second_run_of_locked_providers_asks_no_registry,
    each_kind_of_lock_file_gets_the_right_package,
    runs_that_begin_at_a_time_lock_the_right_packages,
    without_a_lock_file_the_registry_chooses_and_the_store_gives,
    a_package_of_another_platform_is_not_used,
}

/// A digest of another platform, in a lock file.
const OTHER: &str = "    \"h1:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=\",";
const LOCK_FILE: &str = ".terraform.lock.hcl";
/// First runs of the same providers.
const AT_A_TIME: usize = 8;

/// A registry with five providers, and a machine whose runs share a store.
pub(super) struct Locked {
    pub(super) registry: Registry,
    pub(super) machine: Machine,
    tool: Tool,
    /// What the tool writes without any help.
    pub(super) lock: String,
    /// What the module asks for instead of all providers in their newest versions.
    versions: Option<String>,
    module: &'static str,
    /// Of all runs.
    repositories: Mutex<Vec<Repository>>,
}

impl Locked {
    /// `None` if the test is skipped.
    #[track_caller]
    pub(super) fn new(tool: Tool) -> Option<Self> {
        needed(present())?;
        let mut it = Self::at(Registry::start().unwrap(), tool);
        let kept = it.machine.scratch("first.lock.hcl");
        let bare = it.plan("1", None, &kept, &[]);
        bare.env(env::PROVIDER_FETCHES, "0").run().expect_code(0);
        it.lock = fs::read_to_string(kept).unwrap();
        assert_eq!(it.registry.downloads(), PROVIDERS.len());
        assert_eq!(it.packages(), Vec::<PathBuf>::new());
        Some(it)
    }

    fn at(registry: Registry, tool: Tool) -> Self {
        let machine = machine();
        fs::write(machine.scratch("ca.pem"), registry.certificate()).unwrap();
        Self {
            registry,
            machine,
            tool,
            lock: String::new(),
            versions: None,
            module: MODULE,
            repositories: Mutex::default(),
        }
    }

    /// A plan of all providers, with a lock file in the repository. `kept` gets the one after `init`.
    pub(super) fn plan(
        &self,
        job_id: &str,
        lock: Option<&str>,
        kept: &Path,
        variables: &[(&str, &str)],
    ) -> ExecutorRun<'_> {
        self.plan_with(job_id, lock, kept, variables, Vec::new())
    }

    /// The same, with scripts before that.
    pub(super) fn plan_with(
        &self,
        job_id: &str,
        lock: Option<&str>,
        kept: &Path,
        variables: &[(&str, &str)],
        mut scripts: Vec<Command>,
    ) -> ExecutorRun<'_> {
        let versions = self.versions.clone();
        let versions = versions.unwrap_or_else(|| requirements(&self.registry.host()));
        let mut files = vec![("main.tf", self.module), ("versions.tf", &versions)];
        files.extend(lock.map(|lock| (LOCK_FILE, lock)));
        let kept = kept.display();
        let keep =
            format!("cp {LOCK_FILE} '{kept}'\nprintf %s \"$TF_PLUGIN_CACHE_DIR\" >'{kept}.cache'");
        let repository = Repository::with(&files);
        scripts.push(job::before(job::bash(2, &keep)));
        let mut plan = JobData {
            command_list: scripts,
            workspace_id: format!("w-{job_id}"),
            ..job::in_job(&job::plan_by(self.tool, &repository), job_id)
        };
        for (name, value) in [&PATIENT].into_iter().chain(variables) {
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
        let kept = self.kept(job_id);
        self.plan(job_id, Some(lock), &kept, &[]).run()
    }

    fn run_with(&self, job_id: &str, lock: Option<&str>, variables: &[(&str, &str)]) -> Outcome {
        let kept = self.kept(job_id);
        self.plan(job_id, lock, &kept, variables).run()
    }

    /// Starts plans at a time. Returns their codes, and the lock files of those that have one after `init`.
    fn many_at_a_time(
        &self,
        first: usize,
        lock: impl Fn(usize) -> Option<String> + Sync,
        variables: &[(&str, &str)],
    ) -> Vec<(i32, String)> {
        let run = |number: usize| {
            let job_id = (first + number).to_string();
            let outcome = self.run_with(&job_id, lock(number).as_deref(), variables);
            let kept = self.kept(&job_id);
            let lock = fs::read_to_string(kept).unwrap_or_default();
            (outcome.code(), lock)
        };
        thread::scope(|scope| {
            let run = &run;
            let runs: Vec<_> = (0..AT_A_TIME)
                .map(|number| scope.spawn(move || run(number)))
                .collect();
            let ended = runs.into_iter().map(|run| run.join().unwrap());
            ended.collect()
        })
    }

    /// Where the lock file is kept that a run has after `init`.
    pub(super) fn kept(&self, job_id: &str) -> PathBuf {
        self.machine.scratch(&format!("{job_id}.lock.hcl"))
    }

    pub(super) fn lock_after(&self, job_id: &str) -> String {
        fs::read_to_string(self.kept(job_id)).unwrap()
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

/// What the log says about locked providers.
pub(super) fn provided(stored: usize, fetched: usize) -> String {
    format!("Providers: {stored} from the store, {fetched} downloaded.")
}

#[track_caller]
pub(super) fn says(outcome: &Outcome, stored: usize, fetched: usize) {
    let line = provided(stored, fetched);
    assert!(outcome.log().contains(&line), "{line}: {outcome}");
}

fn says_unlocked(outcome: &Outcome, stored: usize, fetched: usize) {
    let line =
        format!("Providers without a lock entry: {stored} from the store, {fetched} downloaded.");
    assert!(outcome.log().contains(&line), "{line}: {outcome}");
}

/// A lock file without the entries of these providers.
fn without_entries(lock: &str, names: &[&str]) -> String {
    let entries = lock.split("\nprovider ");
    let is_left_out = |entry: &&str| {
        let first = entry.lines().next().unwrap_or_default();
        let mut names = names.iter();
        names.any(|name| first.contains(&format!("/{name}\"")))
    };
    let entries: Vec<_> = entries.filter(|entry| !is_left_out(entry)).collect();
    entries.join("\nprovider ")
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
    let own_cache = it.machine.scratch("own-cache");
    fs::create_dir(&own_cache).unwrap();
    for (job_id, name, value) in [
        ("10", "TF_PLUGIN_CACHE_DIR", own_cache.to_str().unwrap()),
        ("6", "TF_CLI_CONFIG_FILE", "/dev/null"),
        ("7", "TF_CLI_ARGS_init", "-upgrade"),
    ] {
        let own = it
            .run_with(job_id, Some(&it.lock), &[(name, value)])
            .expect_code(0);
        let line = format!("Providers are not fetched before init: `{name}` is set.");
        assert!(own.log().contains(&line), "{own}");
    }

    // In a pod, the volume of the plugin cache is a store, and the tool itself never writes into it.
    let volume = it.machine.scratch("volume");
    let in_pod = |job_id: &str| {
        let kept = it.kept(job_id);
        let run = it.plan(job_id, Some(&it.lock), &kept, &[]);
        let run = run.env(env::POD_NAME, "pod").env(env::RECORDS, "shared");
        run.env("TF_PLUGIN_CACHE_DIR", &volume).run().expect_code(0)
    };
    says(&in_pod("8"), 0, PROVIDERS.len());
    says(&in_pod("9"), PROVIDERS.len(), 0);
    let names: Vec<_> = fs::read_dir(&volume).unwrap().flatten().collect();
    assert_eq!((names.len(), names[0].file_name()), (1, "providers".into()));
    // Nor does a tool that a script starts.
    let of_scripts = fs::read_to_string(it.machine.scratch("9.lock.hcl.cache")).unwrap();
    assert!(of_scripts.ends_with("/plugin-cache"), "{of_scripts}");
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

/// Half of them have a lock file.
fn runs_that_begin_at_a_time_lock_the_right_packages(tool: Tool) {
    let Some(it) = Locked::new(tool) else { return };
    for round in 0..2 {
        let folder = it.machine.data_dir().join("providers");
        if folder.is_dir() {
            fs::remove_dir_all(&folder).unwrap();
        }
        let lock = |number: usize| number.is_multiple_of(2).then(|| it.lock.clone());
        for (code, lock) in it.many_at_a_time(100 + round * 10, lock, &[]) {
            assert_eq!((code, digests(&lock)), (0, digests(&it.lock)));
        }
        assert_eq!(it.packages().len(), PROVIDERS.len());
    }
}

/// Why Mayfly never lets runs share the tool's own cache: with it, the same check fails. Terraform unpacks an archive in place, and
/// another run takes what is there so far.
#[test]
fn runs_that_share_a_plugin_cache_of_terraform_go_wrong() {
    let Some(it) = Locked::new(Tool::Terraform) else {
        return;
    };
    let mut wrong = Vec::new();
    for round in 0..20 {
        let cache = it.machine.scratch(&format!("cache-{round}"));
        fs::create_dir(&cache).unwrap();
        let cache = cache.to_str().unwrap();
        let variables = [
            ("TF_PLUGIN_CACHE_DIR", cache),
            ("TF_PLUGIN_CACHE_MAY_BREAK_DEPENDENCY_LOCK_FILE", "1"),
        ];
        wrong = it.many_at_a_time(1000 + round * 10, |_| None, &variables);
        wrong.retain(|(code, lock)| *code == 0 && digests(lock) != digests(&it.lock));
        if !wrong.is_empty() {
            break;
        }
    }
    assert!(!wrong.is_empty(), "this Terraform locks its cache");
}

/// The tool asks for versions and packages, and gets the archives of the store.
fn without_a_lock_file_the_registry_chooses_and_the_store_gives(tool: Tool) {
    let Some(mut it) = Locked::new(tool) else {
        return;
    };
    let newest = PROVIDERS
        .iter()
        .find(|(name, _)| *name == "null")
        .map(|(_, version)| *version);
    let newest = newest.unwrap();
    let all = requirements(&it.registry.host());
    it.versions = Some(all.replace(&format!("version = \"{newest}\""), "version = \">= 2.0.0\""));
    it.registry.hide("null", newest);
    let first = it.run_with("2", None, &[]).expect_code(0);
    says_unlocked(&first, 0, PROVIDERS.len());
    assert_eq!(it.packages().len(), PROVIDERS.len());
    let downloads = it.registry.downloads();
    let second = it.run_with("3", None, &[]).expect_code(0);
    says_unlocked(&second, PROVIDERS.len(), 0);
    assert_eq!(it.registry.downloads(), downloads, "{second}");
    assert_eq!(digests(&it.lock_after("3")), digests(&it.lock_after("2")));
    assert!(it.lock_after("3").contains("2.1.0"));

    // The registry has a new version, which the store does not have.
    it.registry.hide("null", "none");
    let third = it.run_with("4", None, &[]).expect_code(0);
    says_unlocked(&third, PROVIDERS.len() - 1, 1);
    assert_eq!(digests(&it.lock_after("4")), digests(&it.lock));

    // What a run has done to the store is noticed, and mended.
    for path in it.packages() {
        let size = fs::metadata(&path).unwrap().len();
        fs::remove_file(&path).unwrap();
        fs::write(path, vec![0; usize::try_from(size).unwrap()]).unwrap();
    }
    let fourth = it.run_with("5", None, &[]).expect_code(0);
    says_unlocked(&fourth, 0, PROVIDERS.len());
    assert_eq!(digests(&it.lock_after("5")), digests(&it.lock));

    // In one `init`, some providers are locked and others are not.
    let part = without_entries(&it.lock, &["null", "time"]);
    let fifth = it.run_with("6", Some(&part), &[]).expect_code(0);
    says(&fifth, PROVIDERS.len() - 2, 0);
    says_unlocked(&fifth, 2, 0);
    assert_eq!(digests(&it.lock_after("6")), digests(&it.lock));

    // Tokens of the tool go to their host alone.
    let home = it.machine.scratch("home-with-token");
    fs::create_dir(&home).unwrap();
    let host = it.registry.host();
    let token = format!("credentials \"{host}\" {{\n  token = \"t\"\n}}\n");
    fs::write(home.join(".terraformrc"), token).unwrap();
    let downloads = it.registry.downloads();
    let kept = it.machine.scratch("7.lock.hcl");
    let private = it.plan("7", None, &kept, &[]).env("HOME", &home);
    let private = private.run().expect_code(0);
    assert!(!private.log().contains("Providers without"), "{private}");
    assert_eq!(it.registry.downloads(), downloads + PROVIDERS.len());

    // The tool itself says what is wrong with a registry, and the store is no way around it.
    fs::remove_dir_all(it.machine.data_dir().join("providers")).unwrap();
    it.registry.lose_archives();
    let failed = it.run_with("8", None, &[]).expect_code(1);
    let text = format!(
        "Not fetched by the executor: {}/acme/null",
        it.registry.host()
    );
    let address = format!("`https://{}/files/null/{newest}/", it.registry.host());
    let mut lines = failed.log().lines();
    let names_both = lines.any(|line| line.starts_with(&text) && line.contains(&address));
    assert!(names_both, "{failed}");
}

/// Lock files have the digests of all platforms.
fn a_package_of_another_platform_is_not_used(tool: Tool) {
    let Some(it) = Locked::new(tool) else { return };
    let first = it.run("2", &it.lock).expect_code(0);
    says(&first, 0, PROVIDERS.len());
    for path in it.packages() {
        let names: Vec<_> = path.iter().filter_map(|name| name.to_str()).collect();
        let [.., name, version, _, _] = names[..] else {
            panic!("{}", path.display())
        };
        let [_, other] = it.registry.archives(name, version).unwrap();
        let digest = provider_store::sha256_of(&other).unwrap();
        assert!(it.lock.contains(&digest), "{}", it.lock);
        fs::copy(other, path.with_file_name(format!("{digest}.zip"))).unwrap();
        fs::remove_file(path).unwrap();
    }
    let second = it.run("3", &it.lock).expect_code(0);
    says(&second, 0, PROVIDERS.len());
    assert_eq!(it.lock_after("3"), it.lock);
    // So is it without a lock file.
    let third = it.run_with("4", None, &[]).expect_code(0);
    says_unlocked(&third, PROVIDERS.len(), 0);
    assert_eq!(digests(&it.lock_after("4")), digests(&it.lock));
}

/// Page cache is no memory that a limit is for: neither what is downloaded nor what is copied.
#[test]
fn a_package_that_is_larger_than_the_memory_of_its_pod_is_provided() {
    let (Some(()), Some(group)) = (needed(present()), MemoryGroup::of(512)) else {
        return;
    };
    let registry = Registry::start_with(700 << 20, None).unwrap();
    registry.archives("null", "2.2.0").unwrap();
    let mut it = Locked::at(registry, Tool::Terraform);
    it.module = "resource \"null_resource\" \"one\" {}\n";
    it.versions = Some(format!(
        "terraform {{\n  required_providers {{\n    null = {{\n      source = \"{}/acme/null\"\n    }}\n  }}\n}}\n",
        it.registry.host()
    ));
    let run = |job_id: &str, lock: Option<&str>| {
        let kept = it.kept(job_id);
        let run = it.plan(job_id, lock, &kept, &[]);
        let run = run.wrapped_in(&["sh", "-c", &group.entrance(), "sh"]);
        run.run().expect_code(0)
    };
    says_unlocked(&run("1", None), 0, 1);
    says(&run("2", Some(&it.lock_after("1"))), 1, 0);
}
