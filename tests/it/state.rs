//! State is never lost: an apply or a destroy with the real tool and a real remote backend, stopped or broken in the
//! middle in every way there is. What is asserted is what is in the bucket afterwards, whether the state can be used by
//! the next run, and that the report tells what was done and what was not.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use artifact_store::{
    Handover, HttpUrl, S3Credentials, S3Settings, StaticKeys, Store, StoreSettings,
};
use integration_tests::process::{DEADLINE, Stream, comes_to_an_end};
use integration_tests::site::{ExecutorRun, RunningExecutor};
use integration_tests::{FakeTool, Outcome, Repository, Site, fifo, job};
use job_contract::keys::{Area, ObjectKey};
use job_contract::report::{LockStanding, StateLock, StateStanding, StopReason};
use job_contract::status::JobStatus;
use job_contract::{JobData, StepType, env};
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use secrecy::SecretString;
use serde_json::Value;
use test_peers::http_proxy::HttpProxy;
use test_peers::s3::{self, S3};
use url::Url;

use crate::site;

/// A bucket in which the tool locks its state, behind a door.
struct Bucket {
    _server: S3,
    door: HttpProxy,
    store: Store,
}

impl Bucket {
    fn new() -> Self {
        // A second installation leaves the first in force.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let server = S3::start_open().unwrap();
        let host = server.address().to_string();
        let store = Store::open(&StoreSettings::S3(S3Settings {
            bucket: s3::BUCKET.to_owned(),
            region: s3::REGION.to_owned(),
            endpoint: Some(HttpUrl {
                url: Url::parse(&server.url()).unwrap(),
                text: server.url(),
            }),
            credentials: S3Credentials::Keys(StaticKeys {
                access_key: SecretString::from("key"),
                secret_key: SecretString::from("secret-of-the-store"),
            }),
            handover: Handover::Outside,
            use_lockfile: true,
        }));
        Self {
            door: HttpProxy::to(server.address(), &host).unwrap(),
            store: store.unwrap(),
            _server: server,
        }
    }

    fn executor<'s>(&self, site: &'s Site, job: &JobData) -> ExecutorRun<'s> {
        site.executor(job)
            .env(env::STATE_TYPE, "AwsTerraformStateImpl")
            .env(env::AWS_BUCKET, s3::BUCKET)
            .env(env::AWS_REGION, s3::REGION)
            .env(env::AWS_ENDPOINT, self.door.url())
            .env(env::AWS_ACCESS_KEY, "key")
            .env(env::AWS_SECRET_KEY, "secret-of-the-store")
            .env(env::AWS_USE_LOCKFILE, "true")
            .env(env::GRACE_PERIOD_SECONDS, "60")
    }

    fn bytes(&self, key: &ObjectKey) -> Option<Vec<u8>> {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let bytes = runtime.block_on(self.store.read(key)).unwrap()?;
        Some(bytes.to_vec())
    }

    fn read(&self, key: &ObjectKey) -> Option<Value> {
        Some(serde_json::from_slice(&self.bytes(key)?).expect("half an object"))
    }

    fn write(&self, key: &ObjectKey, text: String) {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(self.store.put(key, text)).unwrap();
    }

    /// What the tool's backend holds.
    fn state(&self) -> Option<Value> {
        self.read(&state_key())
    }

    fn lock(&self) -> Option<Value> {
        self.read(&lock_key())
    }

    fn resources(&self) -> Vec<String> {
        let state = self.state().unwrap_or_default();
        let resources = state["resources"].as_array().cloned().unwrap_or_default();
        resources
            .iter()
            .map(|resource| resource["name"].as_str().unwrap().to_owned())
            .collect()
    }
}

fn state_key() -> ObjectKey {
    ObjectKey::backend_state(job::ORGANIZATION, job::WORKSPACE)
}

fn lock_key() -> ObjectKey {
    let state = state_key();
    ObjectKey {
        path: format!("{}.tflock", state.path),
        ..state
    }
}

fn is_state(path: &str) -> bool {
    path.ends_with("/terraform.tfstate")
}

/// Three resources in a row, the second of which waits at a gate that [`Gate::open`] opens.
struct Gate {
    fifo: PathBuf,
    repository: Repository,
}

/// The tool shows the command before it runs it, and there the two words are in quotes.
const AT_THE_GATE: &str = "at-the-gate tool-";

impl Gate {
    fn new(site: &Site) -> Self {
        Self::that(site, "")
    }

    /// The provisioner of the second resource is that of its end.
    fn at_the_end(site: &Site) -> Self {
        Self::that(site, "    when = destroy\n")
    }

    fn that(site: &Site, when: &str) -> Self {
        let fifo = fifo(site.scratch("gate"));
        let module = format!(
            "resource \"terraform_data\" \"first\" {{\n  input = \"made\"\n}}\nresource \"terraform_data\" \
             \"second\" {{\n  depends_on = [terraform_data.first]\n  provisioner \"local-exec\" {{\n{when}    \
             command = \"echo at-the-gate' 'tool-$PPID.; exec cat {}\"\n  }}\n}}\nresource \"terraform_data\" \
             \"third\" {{\n  depends_on = [terraform_data.second]\n}}\n",
            fifo.display()
        );
        Self {
            fifo,
            repository: Repository::module(&module),
        }
    }

    fn open(&self) {
        fs::write(&self.fifo, "open\n").unwrap();
    }
}

/// Waits until the tool is at the gate, and returns its process id.
fn tool_at_the_gate(run: &RunningExecutor) -> Pid {
    let line = run.running.line_with(Stream::Stdout, AT_THE_GATE);
    let (_, rest) = line.split_once(AT_THE_GATE).unwrap();
    Pid::from_raw(rest.split('.').next().unwrap().parse().unwrap())
}

/// An apply that comes to its gate.
struct Journey {
    bucket: Bucket,
    site: Site,
    gate: Gate,
    apply: JobData,
}

impl Journey {
    /// Of a plan that was reviewed.
    fn planned() -> Self {
        Self::that(true)
    }

    /// Of whatever the tool finds to be done.
    fn unplanned() -> Self {
        Self::that(false)
    }

    fn that(is_planned: bool) -> Self {
        let (bucket, site) = (Bucket::new(), site());
        let gate = Gate::new(&site);
        let plan = job::plan(&gate.repository);
        let apply = job::apply_after(&plan);
        if is_planned {
            site.queue(&[&plan, &apply]);
            bucket.executor(&site, &plan).run().expect_code(0);
            assert!(bucket.lock().is_none(), "a plan gives its lock back");
        } else {
            site.queue(&[&apply]);
        }
        Self {
            bucket,
            site,
            gate,
            apply,
        }
    }

    fn executor(&self) -> ExecutorRun<'_> {
        self.bucket.executor(&self.site, &self.apply)
    }

    /// What holds however the tool was interrupted in the middle and saved its state itself.
    #[track_caller]
    fn assert_saved(&self, outcome: &Outcome) {
        let resources = self.bucket.resources();
        assert!(resources.contains(&"first".to_owned()), "{outcome}");
        assert!(!resources.contains(&"third".to_owned()), "{outcome}");
        self.assert_published(outcome);
        let report = outcome.report();
        assert_eq!(report.state, Some(StateStanding::Stored), "{outcome}");
        let progress = report.progress.as_ref().expect("an account");
        assert_eq!((progress.applied, progress.not_begun), (1, Some(1)));
        let middle = [&*progress.failed, &*progress.unfinished].concat();
        assert_eq!(middle, ["terraform_data.second"], "{outcome}");
        for words in [
            "1 of 3 changes was made",
            "(terraform_data.second)",
            "1 was not begun; the state is stored",
        ] {
            assert!(outcome.error().contains(words), "{words}: {outcome}");
            assert!(outcome.log().contains(words), "{words}: {outcome}");
        }
    }

    /// The tool could not store the state of what it had made; it is stored, and published.
    #[track_caller]
    fn assert_rescued(&self, outcome: &Outcome) {
        let standing = outcome.report().state;
        assert_eq!(standing, Some(StateStanding::Rescued), "{outcome}");
        assert_eq!(self.bucket.resources().len(), 3, "{outcome}");
        self.assert_published(outcome);
    }

    /// The copies are those of the state, and nobody holds it any more.
    #[track_caller]
    fn assert_published(&self, outcome: &Outcome) {
        assert!(self.bucket.lock().is_none(), "still locked: {outcome}");
        let history = self.site.record(&self.apply).history;
        assert_eq!(history.len(), 1, "{outcome}");
        let state = self.bucket.state().unwrap();
        assert_eq!(history[0].serial, state["serial"].as_u64().unwrap());
        let (_, name) = history[0].output.rsplit_once('/').unwrap();
        let name = name.strip_suffix(".json").unwrap();
        let raw = ObjectKey::state_raw(job::ORGANIZATION, job::WORKSPACE, name);
        assert_eq!(self.bucket.read(&raw), Some(state), "{outcome}");
        assert!(outcome.left_behind.is_empty(), "{outcome}");
    }
}

#[track_caller]
fn assert_interrupted_once(outcome: &Outcome) {
    let count = |words: &str| outcome.log().matches(words).count();
    assert_eq!(count("Interrupt received"), 1, "{outcome}");
    assert_eq!(count("Two interrupts received"), 0, "{outcome}");
    assert_eq!(outcome.report().lock, None, "{outcome}");
}

#[test]
fn an_apply_that_is_told_to_end_saves_its_state_and_says_how_far_it_came() {
    let journey = Journey::planned();
    let run = journey.executor().start();
    tool_at_the_gate(&run);
    run.running.signal(Signal::SIGTERM);
    let outcome = run.wait().expect_code(143);
    assert_interrupted_once(&outcome);
    journey.assert_saved(&outcome);
    let beginning = "stopped by signal 15 before it was done: 1 of 3 changes was made";
    assert!(outcome.error().starts_with(beginning), "{outcome}");
}

/// As where the whole container is signalled, and where somebody is impatient.
#[test]
fn however_many_signals_come_the_tool_is_interrupted_once() {
    let journey = Journey::planned();
    // A group of its own, as a container has, which the test is no part of.
    let run = journey.executor().wrapped_in(&["setsid"]).start();
    tool_at_the_gate(&run);
    for _ in 0..3 {
        killpg(run.running.pid(), Signal::SIGTERM).unwrap();
    }
    let outcome = run.wait().expect_code(143);
    assert_interrupted_once(&outcome);
    journey.assert_saved(&outcome);
}

/// The deadline is to come while the tool is at the gate. How long it takes to be there is the machine's affair.
#[test]
fn an_apply_that_is_not_done_by_its_deadline_saves_its_state() {
    let in_time = [10, 20, 40].into_iter().any(|seconds| {
        let journey = Journey::planned();
        let deadline = seconds.to_string();
        let run = journey.executor().env(env::DEADLINE_SECONDS, deadline);
        let run = run.start();
        let came_to_its_gate = run.running.shows(Stream::Stdout, AT_THE_GATE);
        let outcome = run.wait().expect_code(1);
        assert_eq!(outcome.report().stopped, Some(StopReason::Deadline));
        if came_to_its_gate {
            assert_interrupted_once(&outcome);
            journey.assert_saved(&outcome);
        }
        came_to_its_gate
    });
    assert!(in_time, "it never came to its gate");
}

#[test]
fn an_apply_whose_job_is_cancelled_saves_its_state() {
    let journey = Journey::planned();
    let run = journey.executor().start();
    tool_at_the_gate(&run);
    journey
        .site
        .set_status(&journey.apply, JobStatus::Cancelled);
    let outcome = run.wait();
    assert_eq!(outcome.report().stopped, Some(StopReason::Cancelled));
    assert_interrupted_once(&outcome);
    journey.assert_saved(&outcome);
}

#[test]
fn an_interrupted_destroy_keeps_what_it_has_not_destroyed() {
    let (bucket, site) = (Bucket::new(), site());
    let gate = Gate::at_the_end(&site);
    let apply = job::step(StepType::Apply, &gate.repository);
    site.queue(&[&apply]);
    bucket.executor(&site, &apply).run().expect_code(0);
    let destroy = job::in_job(&job::step(StepType::Destroy, &gate.repository), "413");
    site.queue(&[&destroy]);

    let run = bucket.executor(&site, &destroy).start();
    tool_at_the_gate(&run);
    run.running.signal(Signal::SIGTERM);
    let outcome = run.wait().expect_code(143);

    assert_interrupted_once(&outcome);
    let mut resources = bucket.resources();
    resources.sort();
    assert_eq!(resources, ["first", "second"], "{outcome}");
    assert!(bucket.lock().is_none(), "{outcome}");
    let report = outcome.report();
    assert_eq!(report.state, Some(StateStanding::Stored), "{outcome}");
    let progress = report.progress.as_ref().unwrap();
    assert_eq!((progress.applied, progress.not_begun), (1, Some(1)));
    let words = "1 was not begun; the state is stored";
    assert!(outcome.error().contains(words), "{outcome}");
}

/// The tool keeps a remote state in memory for up to twenty seconds; what it made in that time dies with it.
#[test]
fn a_tool_that_dies_loses_its_lock_and_the_report_names_what_the_state_lacks() {
    for signal in [Signal::SIGKILL, Signal::SIGSEGV] {
        let journey = Journey::planned();
        let run = journey.executor().start();
        let tool = tool_at_the_gate(&run);
        let locked = journey.bucket.lock().expect("a lock")["ID"].clone();
        kill(tool, signal).unwrap();
        let outcome = run.wait().expect_code(1);

        assert!(journey.bucket.lock().is_none(), "still locked: {outcome}");
        let report = outcome.report();
        let lock = report.lock.as_ref().expect("the lock");
        assert_eq!(lock.standing, LockStanding::Released, "{outcome}");
        assert_eq!(locked, lock.id.as_str());
        assert!(outcome.log().contains("It is released."), "{outcome}");
        assert_eq!(report.state, Some(StateStanding::Unknown), "{outcome}");
        let progress = report.progress.as_ref().unwrap();
        assert_eq!(progress.applied, 1, "{outcome}");
        assert_eq!(progress.unfinished, ["terraform_data.second"], "{outcome}");
        let words = "the state does not contain the last changes: terraform_data.first";
        assert!(outcome.error().contains(words), "{outcome}");
        assert!(
            report.hint.as_ref().unwrap().contains("import"),
            "{outcome}"
        );
    }
}

#[test]
fn a_tool_that_dies_has_left_its_state_where_every_change_is_written_at_once() {
    let site = site();
    let gate = Gate::new(&site);
    // Without a plan, and so without events: its lines tell as much.
    let apply = job::step(StepType::Apply, &gate.repository);
    site.queue(&[&apply]);
    let run = site.executor(&apply).start();
    kill(tool_at_the_gate(&run), Signal::SIGKILL).unwrap();
    let outcome = run.wait().expect_code(1);
    assert_eq!(site.resources(&apply), ["terraform_data.first"]);
    assert_eq!(site.record(&apply).history.len(), 1, "{outcome}");
    let words = "the tool ended with signal SIGKILL: 1 of 3 changes was made, 1 was in progress \
                 (terraform_data.second), 1 was not begun; the state is stored";
    assert_eq!(outcome.error(), words, "{outcome}");
    assert_eq!(outcome.report().state, Some(StateStanding::Stored));
    assert_eq!(outcome.report().lock, None, "{outcome}");
}

#[test]
fn a_tool_that_is_deaf_is_killed_and_its_lock_released() {
    let journey = Journey::planned();
    let executor = journey.executor().env(env::GRACE_PERIOD_SECONDS, "30");
    let run = executor.start();
    let tool = tool_at_the_gate(&run);
    // It hears nothing any more, and can do nothing.
    kill(tool, Signal::SIGSTOP).unwrap();
    run.running.signal(Signal::SIGTERM);
    let outcome = run.wait().expect_code(143);
    assert!(outcome.log().contains("signal SIGKILL"), "{outcome}");
    assert!(journey.bucket.lock().is_none(), "still locked: {outcome}");
    let report = outcome.report();
    let standing = report.lock.as_ref().map(|lock| lock.standing);
    assert_eq!(standing, Some(LockStanding::Released), "{outcome}");
    assert_eq!(report.stopped, Some(StopReason::Signal));
    assert!(report.progress.is_some(), "{outcome}");
    assert!(comes_to_an_end(&tool.to_string()), "{outcome}");
}

#[test]
fn a_plan_that_dies_gives_its_lock_back() {
    let (bucket, site) = (Bucket::new(), site());
    let fifo = fifo(site.scratch("gate"));
    // Read while planning, under the lock.
    let repository = Repository::module(&format!(
        "data \"terraform_remote_state\" \"waits\" {{\n  backend = \"local\"\n  config = {{\n    path = \"{}\"\n  \
         }}\n}}\nresource \"terraform_data\" \"first\" {{}}\n",
        fifo.display()
    ));
    let plan = job::plan(&repository);
    site.queue(&[&plan]);
    let run = bucket.executor(&site, &plan).start();
    run.running.wait_for(Stream::Stdout, "Refreshing...");
    assert!(bucket.lock().is_some());
    let tool = child_of(run.running.pid());
    kill(tool, Signal::SIGKILL).unwrap();
    let outcome = run.wait().expect_code(1);
    assert!(bucket.lock().is_none(), "still locked: {outcome}");
    let standing = outcome.report().lock.as_ref().map(|lock| lock.standing);
    assert_eq!(standing, Some(LockStanding::Released), "{outcome}");
}

/// A crash ends with the code of a plan that has changes.
#[test]
fn a_plan_that_left_no_plan_is_followed_by_a_look_for_its_lock_and_one_that_fails_is_told() {
    for (made, looked) in [("", true), ("echo plan > \"$out\"; ", false)] {
        let (site, repository) = (site(), Repository::fixture());
        let tool = FakeTool::new()
            .on("plan", &format!("{made}exit 2"))
            .on("untaint", "echo 'no route to the backend'; exit 1");
        let plan = job::plan(&repository);
        site.queue(&[&plan]);
        let outcome = site.executor(&plan).env("PATH", tool.path()).run();
        assert_eq!(tool.was_called("untaint"), looked, "{outcome}");
        for words in [
            "no route to the backend",
            "Whether the tool left its lock on the state is not known.",
        ] {
            assert_eq!(outcome.log().contains(words), looked, "{outcome}");
        }
    }
}

/// The one child of a process. Threads come and go, and what they had started goes to another.
fn child_of(parent: Pid) -> Pid {
    let deadline = Instant::now() + DEADLINE;
    loop {
        let tasks = fs::read_dir(format!("/proc/{parent}/task")).unwrap();
        let children = tasks.flatten().filter_map(|task| {
            let children = fs::read_to_string(task.path().join("children"));
            children.ok()
        });
        if let Ok(child) = children.collect::<String>().trim().parse() {
            return Pid::from_raw(child);
        }
        assert!(Instant::now() < deadline, "there is never one child");
    }
}

#[test]
fn a_lock_of_another_run_is_named_with_its_holder_and_left_alone() {
    let holder = Journey::planned();
    let run = holder.executor().start();
    tool_at_the_gate(&run);
    let locked = holder.bucket.lock().expect("a lock");
    let id = locked["ID"].as_str().unwrap();

    let site = site();
    let repository = Repository::fixture();
    // Each in a job of its own: a job whose plan has failed is not applied.
    for (job_id, step) in [
        ("11", StepType::Plan),
        ("12", StepType::Apply),
        ("13", StepType::Destroy),
    ] {
        let second = job::in_job(&job::step(step, &repository), job_id);
        site.queue(&[&second]);
        let outcome = holder.bucket.executor(&site, &second).run().expect_code(1);

        let lock = outcome.report().lock.clone().expect("the lock");
        let StateLock { who, operation, .. } = &lock;
        assert_eq!(lock.standing, LockStanding::InTheWay, "{outcome}");
        assert_eq!(
            (lock.id.as_str(), &**who),
            (id, locked["Who"].as_str().unwrap())
        );
        assert_eq!(operation, "OperationTypeApply");
        for words in [id, who.as_str(), "since 20", "nothing was changed"] {
            assert!(outcome.error().contains(words), "{words}: {outcome}");
        }
        let unlock = format!("`terraform force-unlock {id}`");
        assert!(outcome.report().hint.as_ref().unwrap().contains(&unlock));
        assert!(outcome.log().contains(&unlock), "{outcome}");
        assert!(site.record(&second).history.is_empty(), "{outcome}");
        assert_eq!(holder.bucket.lock().as_ref(), Some(&locked), "{outcome}");
    }
    holder.gate.open();
    run.wait().expect_code(0);
    assert!(holder.bucket.lock().is_none());
}

/// The tool dies before it has a lock, and somebody else on the same machine takes one meanwhile: all that can be seen
/// of that lock would fit the tool as well.
#[test]
fn a_lock_that_may_be_another_ones_is_left_alone_and_named() {
    let (bucket, site, repository) = (Bucket::new(), site(), Repository::fixture());
    let apply = job::step(StepType::Apply, &repository);
    site.queue(&[&apply]);
    let bin = site.scratch("bin");
    fs::create_dir(&bin).unwrap();
    let wrapper = bin.join("terraform");
    // Everything but the apply is done by the real tool.
    let script = format!(
        "#!/bin/bash\necho \"$1\" >> '{0}/calls'\n[ \"$1\" = apply ] || exec '{1}' \"$@\"\nmkfifo '{0}/gate'; echo \
         before-the-lock; read -r line < '{0}/gate'; kill -KILL $$\n",
        bin.display(),
        which::which("terraform").unwrap().display(),
    );
    fs::write(&wrapper, script).unwrap();
    fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let run = bucket.executor(&site, &apply).env("PATH", path).start();
    run.running.wait_for(Stream::Stdout, "before-the-lock");
    let host = nix::unistd::gethostname().unwrap().into_string().unwrap();
    let now = String::from_utf8(
        Command::new("date")
            .args(["-u", "+%Y-%m-%dT%H:%M:%S.%NZ"])
            .output()
            .unwrap()
            .stdout,
    );
    let theirs = serde_json::json!({
        "ID": "7d0c51a6-0000-4000-8000-2f6f6a1f0001", "Operation": "OperationTypeApply", "Info": "",
        "Who": format!("root@{host}"), "Version": "1.9.8", "Created": now.unwrap().trim(), "Path": "p",
    });
    bucket.write(&lock_key(), theirs.to_string());
    fs::write(bin.join("gate"), "go\n").unwrap();
    let outcome = run.wait().expect_code(1);

    assert_eq!(bucket.lock(), Some(theirs), "{outcome}");
    let lock = outcome.report().lock.as_ref().expect("the lock");
    assert_eq!(lock.standing, LockStanding::LeftBehind, "{outcome}");
    let calls = fs::read_to_string(bin.join("calls")).unwrap();
    assert!(calls.contains("untaint"), "{calls}");
    assert!(!calls.contains("force-unlock"), "{calls}");
    assert!(outcome.log().contains(&lock.id), "{outcome}");
    let hint = outcome.report().hint.as_ref().unwrap();
    assert!(hint.contains("force-unlock"), "{hint}");
}

#[test]
fn a_state_the_backend_refused_is_pushed_again() {
    let journey = Journey::planned();
    let run = journey.executor().start();
    tool_at_the_gate(&run);
    journey.bucket.door.refuse("PUT", is_state, 1);
    journey.gate.open();
    let outcome = run.wait().expect_code(1);
    journey.assert_rescued(&outcome);
    let words = "3 of 3 changes were made; the state was rescued and is stored";
    assert!(outcome.error().contains(words), "{outcome}");
}

/// A backend that is away for a while, beside a store that is not.
#[test]
fn a_state_that_is_kept_is_still_pushed_once_the_backend_takes_it() {
    let journey = Journey::planned();
    let run = journey.executor().start();
    tool_at_the_gate(&run);
    // The tool's own attempt, and two of ours.
    journey.bucket.door.refuse("PUT", is_state, 3);
    journey.gate.open();
    let outcome = run.wait().expect_code(1);
    assert!(outcome.log().contains("The state is kept in"), "{outcome}");
    journey.assert_rescued(&outcome);
}

#[test]
fn a_store_that_fails_for_twenty_seconds_costs_time_and_nothing_else() {
    let (bucket, site, repository) = (Bucket::new(), site(), Repository::fixture());
    let plan = job::plan(&repository);
    let apply = job::apply_after(&plan);
    site.queue(&[&plan, &apply]);
    let door = &bucket.door;
    let away = Duration::from_secs(20);
    door.fail_for(
        "PUT",
        |path| path.ends_with(job_contract::keys::PLAN_FILE),
        away,
    );
    let started = Instant::now();
    let outcome = bucket.executor(&site, &plan).run().expect_code(0);
    assert!(started.elapsed() > away, "{outcome}");
    let log = outcome.log();
    let said = ["S3 answers 503", "The artifact store works again."];
    assert_eq!(
        said.map(|words| log.matches(words).count()),
        [1, 1],
        "{outcome}"
    );

    door.fail_for(
        "GET",
        |path| path.ends_with(job_contract::keys::PLAN_FILE),
        away / 4,
    );
    door.fail_for("PUT", |path| path.ends_with(".raw.json"), away);
    door.fail_for("PUT", |path| path.ends_with(".tfoutput"), away);
    let outcome = bucket.executor(&site, &apply).run().expect_code(0);
    let record = site.record(&apply);
    assert_eq!(record.history.len(), 1, "{outcome}");
    assert_eq!(
        site.statuses(&apply),
        ("completed".into(), "completed".into())
    );
    let copies = door
        .asked("PUT")
        .into_iter()
        .filter(|path| path.ends_with(".raw.json"));
    assert!(copies.count() > 1, "{outcome}");
    let output = ObjectKey::step_output(job::ORGANIZATION, &apply.job_id, &apply.step_id);
    let output = String::from_utf8(bucket.bytes(&output).unwrap()).unwrap();
    assert_eq!(output, outcome.log());
}

/// It takes the copy of the state and the log, and never answers.
#[test]
fn an_executor_that_is_told_to_end_reports_in_time_though_the_store_holds_everything() {
    let grace = Duration::from_secs(30);
    let journey = Journey::planned();
    let executor = journey.executor();
    let run = executor
        .env(env::GRACE_PERIOD_SECONDS, grace.as_secs().to_string())
        .start();
    tool_at_the_gate(&run);
    let door = &journey.bucket.door;
    let copy = door.hold("PUT", |path| path.ends_with(".raw.json"));
    let log = door.hold("PUT", |path| path.ends_with(".tfoutput"));
    let ordered = Instant::now();
    run.running.signal(Signal::SIGTERM);
    copy.wait();
    let outcome = run.wait().expect_code(143);
    let took = ordered.elapsed();
    log.wait();
    assert!(took < grace, "{took:?}: {outcome}");
    let report = outcome.report();
    assert_eq!(report.state, Some(StateStanding::Stored), "{outcome}");
    let words = "no copy of it is published: the object store did not take it in time";
    assert!(outcome.error().contains(words), "{outcome}");
    assert_eq!(
        journey.site.statuses(&journey.apply),
        ("failed".into(), "failed".into())
    );
}

#[test]
fn a_state_the_backend_goes_on_refusing_is_kept_and_named() {
    for stopped_before in [false, true] {
        let journey = Journey::planned();
        let executor = journey.executor().env(env::GRACE_PERIOD_SECONDS, "20");
        let run = executor.start();
        tool_at_the_gate(&run);
        let door = &journey.bucket.door;
        door.refuse("PUT", is_state, usize::MAX);
        if stopped_before {
            run.running.signal(Signal::SIGTERM);
        } else {
            journey.gate.open();
            run.running
                .wait_for(Stream::Stdout, "The executor tries again to store it.");
            run.running.signal(Signal::SIGTERM);
        }
        let outcome = run.wait().expect_code(143);
        let report = outcome.report();
        assert_eq!(report.state, Some(StateStanding::Kept), "{outcome}");
        let name = format!("errored-{}-{}", journey.apply.job_id, journey.apply.step_id);
        let kept = ObjectKey::state_raw(job::ORGANIZATION, job::WORKSPACE, &name);
        let state = journey.bucket.read(&kept).expect("the state");
        let first = &state["resources"][0]["instances"][0]["attributes"]["input"];
        assert_eq!(first["value"], "made", "{outcome}");
        assert!(outcome.error().contains(&kept.path), "{outcome}");
        assert!(outcome.log().contains(&kept.path), "{outcome}");
        assert!(report.hint.as_ref().unwrap().contains("state push"));
    }
}

#[test]
fn a_state_that_can_be_put_nowhere_is_tried_until_it_can() {
    let journey = Journey::planned();
    let run = journey.executor().start();
    tool_at_the_gate(&run);
    journey.bucket.door.refuse("PUT", |_| true, usize::MAX);
    journey.gate.open();
    run.running.wait_for(
        Stream::Stdout,
        "could neither be stored nor kept: trying again",
    );
    journey.bucket.door.open();
    let outcome = run.wait().expect_code(1);
    assert_eq!(
        outcome.report().state,
        Some(StateStanding::Rescued),
        "{outcome}"
    );
    assert_eq!(journey.bucket.resources().len(), 3, "{outcome}");
}

#[test]
fn a_state_that_can_be_put_nowhere_to_the_end_is_laid_aside_and_named() {
    let journey = Journey::planned();
    let executor = journey.executor().env(env::GRACE_PERIOD_SECONDS, "10");
    let run = executor.start();
    tool_at_the_gate(&run);
    journey.bucket.door.refuse("PUT", |_| true, usize::MAX);
    journey.gate.open();
    run.running.wait_for(
        Stream::Stdout,
        "could neither be stored nor kept: trying again",
    );
    run.running.signal(Signal::SIGTERM);
    let outcome = run.wait();
    assert_eq!(
        outcome.report().state,
        Some(StateStanding::Unknown),
        "{outcome}"
    );
    // Whoever started the executor removes what it leaves in its work folder.
    assert!(outcome.left_behind.is_empty(), "{outcome}");
    let Journey { site, apply, .. } = &journey;
    let name = format!("errored-{}-{}.tfstate", apply.job_id, apply.step_id);
    let aside = site.data_dir().join("errored").join(name);
    let state: Value = serde_json::from_slice(&fs::read(&aside).unwrap()).unwrap();
    assert_eq!(state["resources"].as_array().unwrap().len(), 3, "{outcome}");
    let aside = aside.to_str().unwrap();
    assert!(outcome.error().contains(aside), "{outcome}");
    assert!(outcome.report().hint.as_ref().unwrap().contains(aside));
}

/// It had written its last resort, and was about to give its lock back.
#[test]
fn a_tool_killed_while_it_could_not_store_its_state_has_it_rescued_past_its_own_lock() {
    let journey = Journey::planned();
    let run = journey.executor().start();
    let tool = tool_at_the_gate(&run);
    journey.bucket.door.refuse("PUT", is_state, 1);
    let held = journey
        .bucket
        .door
        .hold("DELETE", |path| path.ends_with(".tflock"));
    journey.gate.open();
    held.wait();
    kill(tool, Signal::SIGKILL).unwrap();
    let outcome = run.wait().expect_code(1);
    drop(held);
    let report = outcome.report();
    let standing = report.lock.as_ref().map(|lock| lock.standing);
    assert_eq!(standing, Some(LockStanding::Released), "{outcome}");
    journey.assert_rescued(&outcome);
}

/// It has no room for its last resort, and says it instead.
#[test]
fn a_state_the_tool_could_only_say_is_stored_and_kept_out_of_the_log() {
    for journey in [Journey::planned(), Journey::unplanned()] {
        let run = journey.executor().start();
        let tool = tool_at_the_gate(&run);
        fs::create_dir(format!("/proc/{tool}/cwd/errored.tfstate")).unwrap();
        // The tool's own attempt, and one of ours.
        journey.bucket.door.refuse("PUT", is_state, 2);
        journey.gate.open();
        let outcome = run.wait().expect_code(1);
        assert!(outcome.log().contains("Failed to create local state file"));
        journey.assert_rescued(&outcome);
        assert!(!outcome.log().contains("\"lineage\""), "{outcome}");
    }
}

/// What it has to say of itself comes beside its documents, and is no part of them.
#[test]
fn plans_and_states_are_whole_though_the_tool_talks_of_its_work() {
    let (bucket, site, repository) = (Bucket::new(), site(), Repository::fixture());
    let mut plan = job::plan(&repository);
    plan.environment_variables
        .extend([("TF_LOG".to_owned(), "DEBUG".to_owned())]);
    let apply = job::apply_after(&plan);
    site.queue(&[&plan, &apply]);
    let outcome = bucket.executor(&site, &plan).run().expect_code(0);
    assert!(outcome.log().contains("[DEBUG]"), "{outcome}");
    let change = &site.context(&plan)["planStructuredOutput"][&plan.step_id][0];
    assert!(change["after"].is_object(), "{change}");
    let outcome = bucket.executor(&site, &apply).run().expect_code(0);
    let history = site.record(&apply).history;
    let state = bucket.state().unwrap();
    assert_eq!(history[0].serial, state["serial"].as_u64().unwrap());
    assert_eq!(history[0].lineage, state["lineage"], "{outcome}");
    let (_, name) = history[0].output.rsplit_once('/').unwrap();
    let name = name.strip_suffix(".json").unwrap();
    let raw = ObjectKey::state_raw(job::ORGANIZATION, job::WORKSPACE, name);
    assert_eq!(bucket.read(&raw), Some(state), "{outcome}");
}

#[test]
fn an_errored_state_that_came_with_the_content_is_never_pushed() {
    let (site, tool) = (site(), FakeTool::new().on("apply", "exit 1"));
    let repository = Repository::with(&[
        ("main.tf", "resource \"terraform_data\" \"a\" {}\n"),
        (
            "errored.tfstate",
            "{\"version\":4,\"serial\":99,\"lineage\":\"x\"}",
        ),
    ]);
    let apply = job::step(StepType::Apply, &repository);
    site.queue(&[&apply]);
    let outcome = site.executor(&apply).env("PATH", tool.path()).run();
    let pushed = tool
        .calls()
        .iter()
        .any(|call| call.starts_with("state push"));
    assert!(!pushed, "{outcome}");
}

/// Every object of the tail is held in turn, so that the executor is killed before it.
#[test]
fn an_executor_killed_while_it_saves_leaves_whole_objects_and_its_step_is_not_repeated() {
    type Path = fn(&str) -> bool;
    let moments: [(&str, &str, Path); 4] = [
        ("reading the state", "GET", is_state),
        ("the copy", "PUT", |path| path.ends_with(".raw.json")),
        ("the rendering", "PUT", |path| {
            path.contains("/state/") && !path.contains(".raw.")
        }),
        ("the log", "PUT", |path| path.ends_with(".tfoutput")),
    ];
    for (held, method, path) in moments {
        let journey = Journey::planned();
        let run = journey.executor().start();
        tool_at_the_gate(&run);
        let request = journey.bucket.door.hold(method, path);
        journey.gate.open();
        request.wait();
        run.running.signal(Signal::SIGKILL);
        run.wait();
        drop(request);
        journey.bucket.door.open();

        assert_eq!(journey.bucket.resources().len(), 3, "{held}");
        assert!(journey.bucket.lock().is_none(), "{held}");
        let serial = journey.bucket.state().unwrap()["serial"].clone();
        // Under our launcher, and under one that starts whatever ended.
        let again = journey.executor().run().expect_code(76);
        let stock = journey.executor().without(env::OUTCOME_EXIT_CODE).run();
        for second in [again, stock] {
            assert!(second.error().contains("already taken"), "{second}");
            assert!(!second.log().contains("Running Terraform"), "{second}");
        }
        assert_eq!(journey.bucket.state().unwrap()["serial"], serial, "{held}");
        for path in journey.bucket.door.asked("PUT") {
            let Some((_, path)) = path.split_once("/tfstate/") else {
                continue;
            };
            if path.contains("/state/") {
                let path = path.to_owned();
                let area = Area::State;
                // What is there is a whole document.
                journey.bucket.read(&ObjectKey { area, path });
            }
        }
    }
}

#[test]
fn an_executor_killed_before_it_could_tell_anybody_has_stored_everything_and_is_not_repeated() {
    let journey = Journey::planned();
    let run = journey.executor().start();
    tool_at_the_gate(&run);
    // History and outcome are written under this lock, which is all that is left to do once the log is stored.
    let record = format!("platform/jobs/{}.lock", journey.apply.job_id);
    let record = fs::File::options()
        .write(true)
        .create(true)
        .truncate(false)
        .open(journey.site.data_dir().join(record));
    let record = Flock::lock(record.unwrap(), FlockArg::LockExclusive).unwrap();
    journey.gate.open();
    let output = ObjectKey::step_output(
        &journey.apply.organization_id,
        &journey.apply.job_id,
        &journey.apply.step_id,
    );
    let deadline = Instant::now() + DEADLINE;
    while journey.bucket.bytes(&output).is_none() {
        assert!(Instant::now() < deadline, "the log was never stored");
    }
    run.running.signal(Signal::SIGKILL);
    run.wait();
    drop(record);

    assert_eq!(journey.bucket.resources().len(), 3);
    let log = String::from_utf8(journey.bucket.bytes(&output).unwrap()).unwrap();
    assert!(log.contains("Apply complete! Resources: 3 added"), "{log}");
    assert!(journey.site.record(&journey.apply).history.is_empty());
    let again = journey.executor().run().expect_code(76);
    assert!(!again.log().contains("Running Terraform"), "{again}");
}

#[test]
fn an_address_that_holds_a_secret_is_told_without_it() {
    let site = site();
    let repository = Repository::module(
        "resource \"terraform_data\" \"x\" {\n  for_each = toset([\"hunter2000\"])\n  provisioner \"local-exec\" \
         {\n    command = \"exit 9\"\n  }\n}\n",
    );
    let mut apply = job::step(StepType::Apply, &repository);
    let password = ("DB_PASSWORD".to_owned(), "hunter2000".to_owned());
    apply.environment_variables.extend([password]);
    site.queue(&[&apply]);
    let outcome = site.run(&apply).expect_code(1);
    let failed = &outcome.report().progress.as_ref().unwrap().failed;
    assert_eq!(failed.len(), 1, "{outcome}");
    assert!(failed[0].starts_with("terraform_data.x["), "{outcome}");
    assert!(outcome.error().contains("1 failed"), "{outcome}");
    assert!(!outcome.to_string().contains("hunter2000"), "{outcome}");
}
