//! Code of a run has the user of the launcher and of all executors. It cannot look into them, also not in the moment in which
//! they start.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::sys::signal::Signal;
use nix::unistd::geteuid;
use test_peers::process::{Running, Stream, copy_program};
use test_platform::Secret;

use crate::harness::{Fixture, Launcher};

const NOBODY: u32 = 65534;
/// How often the launcher starts, and how many runs each of them starts.
const STARTS: usize = 4;
const RUNS: usize = 6;
/// An attack on a launcher that can be read succeeds about every second time.
const ATTEMPTS: usize = 20;
const EXPOSED: &str = "runs can read the secrets of this process";

/// A user other than root, programs that this user cannot change, and its files.
struct Machine {
    fixture: Fixture,
    programs: tempfile::TempDir,
}

impl Machine {
    fn new() -> Self {
        let fixture = Fixture::new();
        let programs = tempfile::tempdir().unwrap();
        fs::set_permissions(programs.path(), Permissions::from_mode(0o755)).unwrap();
        if geteuid().is_root() {
            let owner = format!("{NOBODY}:{NOBODY}");
            let folder = fixture.path(".");
            let given = Command::new("chown")
                .args(["-R", &owner])
                .arg(folder)
                .status();
            assert!(given.unwrap().success());
        }
        Self { fixture, programs }
    }

    /// A copy of the launcher with this mode. Its owner is not the user, as far as a test can arrange it.
    fn install(&self, mode: u32) -> PathBuf {
        let path = self.programs.path().join("launcher");
        copy_program(env!("CARGO_BIN_EXE_api-launcher").as_ref(), &path);
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        path
    }

    /// Code that tries to look into every launcher and executor.
    fn attack(&self, launcher: &Path) -> Running {
        let program = self.programs.path().join("attacker");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/attacker.c");
        let words = ["-O2", "-o"];
        let compiled = Command::new("cc")
            .args(words)
            .arg(&program)
            .arg(source)
            .status();
        assert!(compiled.unwrap().success());
        let mut attack = command(&program);
        attack.arg(launcher).args(["serve", "executor"]);
        let attacker = Running::start(&mut attack);
        attacker.wait_for(Stream::Stdout, "ready");
        attacker
    }

    fn serve(&self, program: &Path) -> Launcher {
        let mut serve = command(program);
        self.fixture.configure(&mut serve);
        serve.env("MAYFLY_REPORT_KEY", Secret::long().text());
        self.fixture.start(&mut serve)
    }

    /// Starts and kills a launcher after some runs, and returns its log.
    async fn serve_runs(&self, program: &Path, start: usize) -> String {
        let launcher = self.serve(program);
        let jobs = (1..=RUNS).map(|run| start * RUNS + run);
        for job in jobs.clone() {
            launcher.post(&self.fixture.script(job, "")).await;
        }
        for job in jobs {
            launcher.wait_for_end(job, "step");
            assert_eq!(self.fixture.times_run(job), 1, "{}", launcher.log());
        }
        let log = launcher.log();
        launcher.crash();
        log
    }
}

/// The program as a process of a user other than root.
fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    if geteuid().is_root() {
        // Unlike `setpriv`, this drops root's rights before the program is executed.
        command.uid(NOBODY).gid(NOBODY);
    }
    command
}

/// What the attack came to, without `ready`.
fn successes(attacker: &Running) -> Vec<String> {
    let text = attacker.text(Stream::Stdout);
    text.lines().skip(1).map(str::to_owned).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn no_code_looks_into_a_program_that_only_root_can_read() {
    let machine = Machine::new();
    let program = machine.install(if geteuid().is_root() { 0o711 } else { 0o111 });
    let attacker = machine.attack(&program);
    for start in 0..STARTS {
        let log = machine.serve_runs(&program, start).await;
        assert!(!log.contains(EXPOSED), "{log}");
    }
    assert_eq!(successes(&attacker), Vec::<String>::new());
    attacker.signal(Signal::SIGKILL);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_code_looks_into_an_executor_whose_program_everybody_can_read() {
    let machine = Machine::new();
    let program = machine.install(0o755);
    let attacker = machine.attack(&program);
    for start in 0..STARTS {
        let log = machine.serve_runs(&program, start).await;
        assert!(log.contains(EXPOSED), "{log}");
    }
    // The same attack succeeds with the launcher itself, as its warning says.
    for _ in 0..ATTEMPTS {
        if successes(&attacker)
            .iter()
            .any(|it| it.starts_with("serve "))
        {
            break;
        }
        machine.serve(&program).crash();
    }
    let successes = successes(&attacker);
    let (launchers, executors): (Vec<_>, Vec<_>) =
        successes.iter().partition(|it| it.starts_with("serve "));
    assert!(!launchers.is_empty(), "the attack does not work");
    assert_eq!(executors, Vec::<&String>::new());
    attacker.signal(Signal::SIGKILL);
}
