//! A store that runs only read: what they lack is in their final report, `executor fill` fetches it, and code of a run can do nothing to
//! what is there.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Mutex;
use std::time::{Duration, SystemTime};

use integration_tests::machine::{RunningExecutor, files_below};
use integration_tests::{Machine, Outcome, Repository, job};
use job_contract::{JobData, Tool, env};
use provider_store::{Item, ProviderStore, Pruned};
use test_peers::providers::{NAMESPACE, PROVIDERS, Registry, present};
use test_peers::skips::needed;

use super::{PATIENT, requirements};
use crate::machine;

with_both_tools! {
    code_of_a_run_cannot_change_a_store_that_jobs_fill,
    a_run_uses_unpacked_packages_where_they_are_and_holds_them,
}

const LOCK_FILE: &str = ".terraform.lock.hcl";
const MODULE: &str = "resource \"random_pet\" \"name\" {}\n";
/// What was used in the last hour is not removed.
const OLD: Duration = Duration::from_hours(2);

/// What hostile code tries. It names what it could do.
const ATTACK: &str = "
for file in $(find \"$STORE\" -type f); do
  if echo x > \"$file\"; then echo CHANGED; fi
  if chmod 777 \"$file\"; then echo CHANGED; fi
  if mv \"$file\" \"$file.old\"; then echo MOVED; fi
  if rm -f \"$file\"; then echo REMOVED; fi
  if ln -sf /etc/passwd \"$file\"; then echo REPLACED; fi
done
if touch \"$STORE/new\"; then echo FILLED; fi
echo attacked
";

struct Filled {
    registry: Registry,
    machine: Machine,
    tool: Tool,
    store: PathBuf,
    /// Of all runs.
    repositories: Mutex<Vec<Repository>>,
}

impl Filled {
    #[track_caller]
    fn new(tool: Tool) -> Option<Self> {
        if !nix::unistd::geteuid().is_root() {
            return needed(Err("a read-only mount needs root"));
        }
        needed(present())?;
        let (registry, machine) = (Registry::start().unwrap(), machine());
        fs::write(machine.scratch("ca.pem"), registry.certificate()).unwrap();
        let store = machine.scratch("filled");
        fs::create_dir_all(&store).unwrap();
        Some(Self {
            registry,
            machine,
            tool,
            store,
            repositories: Mutex::default(),
        })
    }

    /// A plan whose script gets the store's path.
    fn step(&self, job_id: &str, lock: Option<&str>, script: &str) -> JobData {
        let versions = requirements(&self.registry.host());
        let mut files = vec![("main.tf", MODULE), ("versions.tf", &versions)];
        files.extend(lock.map(|lock| (LOCK_FILE, lock)));
        let repository = Repository::with(&files);
        let mut plan = JobData {
            command_list: vec![job::before(job::bash(1, script))],
            workspace_id: format!("w-{job_id}"),
            ..job::in_job(&job::plan_by(self.tool, &repository), job_id)
        };
        let (name, value) = PATIENT;
        plan.environment_variables
            .insert(name.to_owned(), value.to_owned());
        self.repositories.lock().unwrap().push(repository);
        plan
    }

    /// Starts a step with the store mounted read-only.
    fn start(&self, step: &JobData) -> RunningExecutor {
        let run = self.machine.executor(step);
        run.env("SSL_CERT_FILE", self.machine.scratch("ca.pem"))
            .env(env::PROVIDER_CACHE_DIR, &self.store)
            .env(env::PROVIDER_CACHE_MODE, "fill")
            .with_read_only(&self.store)
            .start()
    }

    fn plan(&self, job_id: &str, lock: Option<&str>, script: &str) -> Outcome {
        let plan = self.step(job_id, lock, script);
        self.machine.queue(&[&plan]);
        self.start(&plan).wait()
    }

    /// Removes all that no run holds.
    fn evict(&self) -> Pruned {
        for file in files_below(&self.store) {
            let old = SystemTime::now() - OLD;
            File::open(file).unwrap().set_modified(old).unwrap();
        }
        ProviderStore::new(&self.store).prune(0, None).unwrap()
    }

    fn fill(&self, packages: &[String], registries: &str) -> Output {
        Command::new(crate::EXECUTOR)
            .arg("fill")
            .args(packages)
            .env_clear()
            .env("HOME", self.machine.scratch("home"))
            .env("SSL_CERT_FILE", self.machine.scratch("ca.pem"))
            .env(env::PROVIDER_CACHE_DIR, &self.store)
            .env(env::PROVIDER_CACHE_REGISTRIES, registries)
            .env(env::WORK_DIR, self.machine.scratch("fill"))
            .output()
            .unwrap()
    }

    fn archives(&self) -> Vec<PathBuf> {
        let files = files_below(&self.store).into_iter();
        files
            .filter(|path| path.extension().is_some_and(|end| end == "zip"))
            .collect()
    }
}

fn contents(files: &[PathBuf]) -> Vec<Vec<u8>> {
    files.iter().map(|path| fs::read(path).unwrap()).collect()
}

fn code_of_a_run_cannot_change_a_store_that_jobs_fill(tool: Tool) {
    let Some(it) = Filled::new(tool) else { return };
    let kept = it.machine.scratch("kept.lock.hcl");
    let keep = format!("cp {LOCK_FILE} '{}'", kept.display());
    // Without a lock file, the tool chooses. What it downloads is wanted.
    let first = it.plan("1", None, &keep).expect_code(0);
    let wanted = first.report().wanted.clone();
    assert_eq!(wanted.len(), PROVIDERS.len(), "{first}");
    let (name, version) = PROVIDERS[0];
    let start = format!("{}/{NAMESPACE}/{name}/{version}/linux_", it.registry.host());
    assert!(
        wanted.iter().any(|text| text.starts_with(&start)),
        "{wanted:?}"
    );
    assert_eq!(it.archives(), Vec::<PathBuf>::new());

    // A registry that the operator does not name is not asked.
    let asked = it.registry.asked();
    let refused = it.fill(&wanted, "registry.terraform.io");
    assert_eq!(refused.status.code(), Some(75), "{refused:?}");
    assert_eq!(it.registry.asked(), asked);

    let filled = it.fill(&wanted, &it.registry.host());
    assert_eq!(filled.status.code(), Some(0), "{filled:?}");
    let archives = it.archives();
    assert_eq!(archives.len(), PROVIDERS.len());
    // What is there already is not downloaded again, and what was damaged is.
    let downloads = it.registry.downloads();
    make_writable(&archives[0]);
    fs::write(&archives[0], "damaged").unwrap();
    assert_eq!(it.fill(&wanted, &it.registry.host()).status.code(), Some(0));
    assert_eq!(it.registry.downloads(), downloads + 1);
    let before = contents(&archives);

    let lock = fs::read_to_string(&kept).unwrap();
    let attack = format!("STORE='{}'\n{ATTACK}", it.store.display());
    let second = it.plan("2", Some(&lock), &attack).expect_code(0);
    let log = second.log();
    assert!(log.contains("attacked"), "{log}");
    for done in ["CHANGED", "MOVED", "REMOVED", "REPLACED", "FILLED"] {
        assert!(!log.contains(&format!("\n{done}")), "{log}");
    }
    let line = format!(
        "Providers: {} from the store, 0 downloaded.",
        PROVIDERS.len()
    );
    assert!(log.contains(&line), "{log}");
    assert_eq!(second.report().wanted, Vec::<String>::new());
    assert_eq!(it.archives(), archives);
    assert_eq!(contents(&archives), before);

    // What the disk has damaged where runs use it is downloaded once, and put right by the next Job.
    let (name, version) = PROVIDERS[0];
    let files = files_below(&it.store).into_iter();
    let program = format!("terraform-provider-{name}_v{version}");
    let program = files.into_iter().find(|path| path.ends_with(&program));
    let program = program.expect("packages are unpacked on a disk of this machine");
    make_writable(&program);
    let genuine = fs::read(&program).unwrap();
    fs::write(&program, &genuine[..100]).unwrap();
    let third = it.plan("3", Some(&lock), "true").expect_code(0);
    let log = third.log();
    assert!(log.contains("Init runs again without it."), "{log}");
    let wanted = third.report().wanted.clone();
    assert_eq!(wanted.len(), 1, "{wanted:?}");
    assert!(wanted[0].starts_with(&start), "{wanted:?}");
    let downloads = it.registry.downloads();
    assert_eq!(it.fill(&wanted, &it.registry.host()).status.code(), Some(0));
    assert_eq!(it.registry.downloads(), downloads);
    assert_eq!(fs::read(&program).unwrap(), genuine);
    let fourth = it.plan("4", Some(&lock), "true").expect_code(0);
    assert_eq!(fourth.report().wanted, Vec::<String>::new());
    let log = fourth.log();
    assert!(!log.contains("Init runs again"), "{log}");
}

/// A plan and its apply. While the plan waits, everything is evicted that no run holds: the archives.
fn a_run_uses_unpacked_packages_where_they_are_and_holds_them(tool: Tool) {
    let Some(it) = Filled::new(tool) else { return };
    let kept = it.machine.scratch("kept.lock.hcl");
    let keep = format!("cp {LOCK_FILE} '{}'", kept.display());
    let first = it.plan("1", None, &keep).expect_code(0);
    let filled = it.fill(&first.report().wanted, &it.registry.host());
    assert_eq!(filled.status.code(), Some(0), "{filled:?}");
    let lock = fs::read_to_string(kept).unwrap();
    let asked = it.registry.asked();

    let (gate, links) = (it.machine.gate(), it.machine.scratch("links"));
    let script = format!(
        "find .terraform/providers -type l -exec readlink -f {{}} \\; > '{}'\nSTORE='{}'\n{ATTACK}\n{}",
        links.display(),
        it.store.display(),
        gate.words(),
    );
    let plan = it.step("2", Some(&lock), &script);
    let apply = JobData {
        command_list: Vec::new(),
        ..job::apply_after(&plan)
    };
    it.machine.queue(&[&plan, &apply]);
    let before = contents(&files_below(&it.store));
    let running = it.start(&plan);
    let at_gate = gate.reached();
    let links = fs::read_to_string(links).unwrap();
    assert_eq!(links.lines().count(), PROVIDERS.len(), "{links}");
    let store = fs::canonicalize(&it.store).unwrap();
    for link in links.lines() {
        assert!(Path::new(link).starts_with(&store), "a copy: {link}");
        assert!(link.ends_with("/files"), "{link}");
    }
    assert_eq!(contents(&files_below(&it.store)), before);
    let evicted = it.evict().removed;
    let is_archive = |item: &Item| matches!(item, Item::Archive { .. });
    assert_eq!(evicted.len(), PROVIDERS.len(), "{evicted:?}");
    assert!(
        evicted.iter().all(|entry| is_archive(&entry.item)),
        "{evicted:?}"
    );
    assert_eq!(it.archives(), Vec::<PathBuf>::new());
    drop(at_gate);

    let planned = running.wait().expect_code(0);
    let log = planned.log();
    for done in ["CHANGED", "MOVED", "REMOVED", "REPLACED", "FILLED"] {
        assert!(!log.contains(&format!("\n{done}")), "{log}");
    }
    let applied = it.start(&apply).wait().expect_code(0);
    let line = format!(
        "Providers: {} from the store, 0 downloaded.",
        PROVIDERS.len()
    );
    assert!(applied.log().contains(&line), "{applied}");
    assert_eq!(it.machine.resources(&apply), ["random_pet.name"]);
    assert_eq!(it.registry.asked(), asked, "the registry was asked");

    // Nobody holds them any more.
    let evicted = it.evict().removed;
    assert_eq!(evicted.len(), PROVIDERS.len(), "{evicted:?}");
    assert!(
        !evicted.iter().any(|entry| is_archive(&entry.item)),
        "{evicted:?}"
    );
}

fn make_writable(path: &Path) {
    use std::os::unix::fs::PermissionsExt as _;
    fs::set_permissions(path, fs::Permissions::from_mode(0o644)).unwrap();
}
