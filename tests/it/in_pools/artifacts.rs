//! Executors behind the relay read and write artifacts through the hub. Their network holds no key of its store.

mod conditions;
mod front;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::process::Command;

use integration_tests::machine::files_below;
use integration_tests::{ExecutorRun, Machine, Repository, Running, job};
use job_contract::keys::{Artifact, ObjectKey, StepIds, errored_state_name};
use job_contract::{JobData, StepType, env};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pool_protocol::path::{self, LeaseCall};
use pool_protocol::task::LeasedTask;
use reqwest::{Method, RequestBuilder, StatusCode};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use test_peers::port::Port;
use test_peers::proxy::{Fate, Moment, Proxy};
use test_peers::s3::{self, S3};
use test_peers::wait;
use test_platform::{Flow, Job, NewJob, Outputs, Status, Workspace};

use super::client::{Client, executor_of};
use super::fixture::{Fixture, Hub};
use crate::machine;

/// The settings of a store.
fn settings(store: &S3) -> [(&'static str, String); 7] {
    [
        (env::STATE_TYPE, "AwsTerraformStateImpl".to_owned()),
        (env::AWS_BUCKET, s3::BUCKET.to_owned()),
        (env::AWS_REGION, s3::REGION.to_owned()),
        (env::AWS_ENDPOINT, store.url()),
        (env::AWS_ACCESS_KEY, store.access_key().to_owned()),
        (env::AWS_SECRET_KEY, store.secret_key().to_owned()),
        (env::AWS_USE_LOCKFILE, "true".to_owned()),
    ]
}

/// An executor in the cluster of the platform, with the keys of the store.
fn direct<'m>(machine: &'m Machine, store: &S3, job: &JobData) -> ExecutorRun<'m> {
    let executor = machine.executor(job);
    let settings = settings(store).into_iter();
    settings.fold(executor, |executor, (name, value)| {
        executor.env(name, value)
    })
}

impl Fixture {
    /// Its hubs use this store.
    pub(super) async fn with_store(store: &S3) -> Self {
        let mut fixture = Self::new().await;
        for (name, value) in settings(store) {
            fixture = fixture.with(name, &value);
        }
        let address = store.address();
        let outputs = Outputs::from_fn(move |organization, job, step| {
            let key = ObjectKey::step_output(organization, job, step);
            let found = s3::object_at(address, &key.in_bucket()).ok()??;
            Some(found.into_bytes())
        });
        fixture.platform.read_outputs(outputs);
        fixture
    }

    /// A step of the workspace of a job, without the platform.
    fn step(&self, of: &Job, step: StepType, repository: &Repository) -> JobData {
        JobData {
            organization_id: self.platform.organization(),
            workspace_id: of.workspace.clone(),
            job_id: "9000".to_owned(),
            ..job::step(step, repository)
        }
    }

    async fn completed(&self, repository: &Repository, flow: Vec<Flow>) -> Job {
        let workspace = Workspace::new(&repository.url());
        let workspace = self.platform.workspace(workspace);
        let job = self.platform.start_job(NewJob::new(&workspace, flow));
        self.platform.until_job(job, Status::Completed).await
    }
}

/// A process and all below it.
fn tree(root: Pid) -> BTreeSet<i32> {
    let mut found = BTreeSet::from([root.as_raw()]);
    loop {
        let before = found.len();
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let Some(pid) = entry
                .file_name()
                .to_str()
                .and_then(|name| name.parse().ok())
            else {
                continue;
            };
            let stat = fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
            let parent = stat
                .rsplit(") ")
                .next()
                .and_then(|rest| rest.split(' ').nth(1));
            if parent
                .and_then(|parent| parent.parse().ok())
                .is_some_and(|parent| found.contains(&parent))
            {
                found.insert(pid);
            }
        }
        if found.len() == before {
            return found;
        }
    }
}

/// Whether the memory of a process, or its environment, has this text.
fn holds(pid: i32, text: &str) -> bool {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let mut memory = File::open(format!("/proc/{pid}/mem")).unwrap();
    let ranges = maps.lines().filter_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let number = |text| u64::from_str_radix(text, 16).ok();
        rest.starts_with("rw")
            .then_some((number(start)?, number(end)?))
    });
    for (start, end) in ranges {
        let mut bytes = vec![0; usize::try_from(end - start).unwrap()];
        let read = memory
            .seek(SeekFrom::Start(start))
            .and_then(|_| memory.read_exact(&mut bytes));
        if read.is_ok() && has(&bytes, text) {
            return true;
        }
    }
    has(
        &fs::read(format!("/proc/{pid}/environ")).unwrap_or_default(),
        text,
    )
}

fn has(bytes: &[u8], text: &str) -> bool {
    let mut windows = bytes.windows(text.len());
    windows.any(|window| window == text.as_bytes())
}

/// All files of an archive, one after the other.
fn unzipped(archive: &[u8]) -> Vec<u8> {
    let mut archive = zip::ZipArchive::new(std::io::Cursor::new(archive)).unwrap();
    let mut all = Vec::new();
    for index in 0..archive.len() {
        archive
            .by_index(index)
            .unwrap()
            .read_to_end(&mut all)
            .unwrap();
    }
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn plan_and_apply_use_the_store_of_the_hub_and_hold_no_key_of_it_or_of_the_platform() {
    let store = S3::start_open().unwrap();
    let fixture = Fixture::with_store(&store).await;
    let hub = fixture.serve();
    hub.until_store_asked().await;
    let agent = fixture.start_agent(&hub);
    let gate = fixture.gate();
    let repository = gate.repository();
    let workspace = fixture
        .platform
        .workspace(Workspace::new(&repository.url()));
    let number = fixture
        .platform
        .start_job(NewJob::new(&workspace, Flow::plan_apply()));
    let at_the_gate = tokio::task::block_in_place(|| gate.reached());

    let secrets = [store.secret_key().to_owned(), fixture.platform.secret()];
    let processes = tree(fixture.executor());
    assert!(processes.len() > 1, "{processes:?}");
    for secret in &secrets {
        // The search finds what is there.
        assert!(holds(hub.0.running.pid().as_raw(), secret));
        for pid in processes.iter().copied() {
            assert!(!holds(pid, secret), "process {pid} holds a key");
        }
        // It looks for what runs have left in the environments of all processes, and here the hub is one of them.
        let own = fs::read(format!("/proc/{}/environ", agent.pid())).unwrap();
        assert!(!has(&own, secret), "the agent has a key");
        for file in files_below(&fixture.path("data")) {
            let content = fs::read(&file).unwrap_or_default();
            assert!(!has(&content, secret), "a key is in {}", file.display());
        }
    }
    drop(at_the_gate);
    let job = fixture.platform.until_job(number, Status::Completed).await;
    assert_eq!(job.step_statuses(), [Status::Completed; 2]);

    let (organization, plan) = (
        fixture.platform.organization(),
        job.step_of("terraformPlan"),
    );
    let ids = StepIds {
        organization: &organization,
        workspace: &job.workspace,
        job: &number.to_string(),
        step: &plan.id,
    };
    let objects = store.objects().unwrap();
    let names: Vec<&str> = objects.iter().map(|(name, _)| name.as_str()).collect();
    let of = |key: ObjectKey| objects.iter().find(|(name, _)| *name == key.in_bucket());
    for artifact in [Artifact::Plan, Artifact::PlanRecord, Artifact::Output] {
        assert!(
            of(artifact.key(ids, "")).is_some(),
            "{artifact:?}: {names:#?}"
        );
    }
    let published = names.iter().filter(|name| name.contains("/state/"));
    assert_eq!(published.count(), 2, "{names:#?}");
    assert!(
        !names.iter().any(|name| name.ends_with(".tflock")),
        "{names:#?}"
    );
    let (_, plan) = of(Artifact::Plan.key(ids, "")).unwrap();
    let plan = unzipped(plan);
    assert!(has(&plan, "http"), "the plan has no backend");
    for part in ["127.0.0.1", "/state"] {
        assert!(!has(&plan, part), "the plan has `{part}`");
    }
    let key = ObjectKey::backend_state(&organization, &job.workspace);
    let state: Value = serde_json::from_slice(&of(key).unwrap().1).unwrap();
    assert_eq!(state["resources"].as_array().map(Vec::len), Some(3));
    assert!(
        !fixture.path("data/local").exists(),
        "the agent has a store"
    );
    drop(agent.kill());
    fixture.platform.assert_kept().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn runs_of_pools_and_runs_in_the_cluster_follow_each_other_and_do_not_mix_their_plans() {
    let store = S3::start().unwrap();
    let fixture = Fixture::with_store(&store).await;
    let hub = fixture.serve();
    let agent = fixture.start_agent(&hub);
    let repository = Repository::fixture();
    let job = fixture.completed(&repository, Flow::plan_apply()).await;

    // What the pool has made, the cluster knows, and the other way round.
    let machine = machine();
    let plan = fixture.step(&job, StepType::Plan, &repository);
    let run = |step: &JobData| {
        machine.queue(&[step]);
        tokio::task::block_in_place(|| direct(&machine, &store, step).run())
    };
    let outcome = run(&plan).expect_code(0);
    assert!(outcome.log().contains("No changes."), "{outcome}");
    let destroy = JobData {
        step_type: Some(StepType::Destroy.name().to_owned()),
        job_id: "9001".to_owned(),
        ..plan.clone()
    };
    run(&destroy).expect_code(0);
    let workspace = job.workspace.clone();
    let again = NewJob::new(&workspace, Flow::plan_apply());
    let again = fixture.platform.start_job(again);
    let again = fixture.platform.until_job(again, Status::Completed).await;
    assert_eq!(again.step_statuses(), [Status::Completed; 2]);
    assert!(again.plan_changes);

    // A plan that was made through the hub names its backend, and is not applied with another one.
    let reference = again.terraform_plan.clone().unwrap();
    let apply = JobData {
        job_id: again.id.to_string(),
        ..fixture.step(&job, StepType::Apply, &repository)
    };
    machine.queue(&[&apply]);
    machine.set_plan(&apply, Some(reference.as_ref()));
    let refused = tokio::task::block_in_place(|| direct(&machine, &store, &apply).run());
    let refused = refused.expect_code(1);
    assert!(refused.error().contains("is kept by a hub"), "{refused}");
    drop(agent.kill());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_apply_finds_the_files_of_its_plan() {
    let store = S3::start_open().unwrap();
    let fixture = Fixture::with_store(&store).await;
    let hub = fixture.serve();
    let agent = fixture.start_agent(&hub);
    let module = r#"resource "terraform_data" "built" {
  triggers_replace = filesha256("built.txt")
  provisioner "local-exec" {
    command = "cat built.txt"
  }
}
"#;
    let mut flow = Flow::plan_apply();
    flow[0].commands = json!([{
        "runtime": "BASH", "priority": 1, "before": true, "after": false,
        "script": "echo made-by-the-plan > built.txt",
    }]);
    let job = fixture.completed(&Repository::module(module), flow).await;
    let applied = job.step_of("terraformApply");
    let output = fixture.platform.step_output(job.id, &applied.id).unwrap();
    assert!(output.contains("made-by-the-plan"), "{output}");
    assert!(output.contains("Taken over from the plan:"), "{output}");
    drop(agent.kill());
    fixture.platform.assert_kept().await;
}

/// Somebody stores another state while a run applies. The hub refuses that of the run.
#[tokio::test(flavor = "multi_thread")]
async fn a_refused_state_is_kept_and_named_and_nothing_is_planned_until_it_is_dropped() {
    let store = S3::start_open().unwrap();
    let fixture = Fixture::with_store(&store).await;
    let hub = fixture.serve();
    let agent = fixture.start_agent(&hub);
    let gate = fixture.gate();
    let repository = gate.repository();
    let workspace = Workspace::new(&repository.url());
    let workspace = fixture.platform.workspace(workspace);
    let start = |flow| fixture.platform.start_job(NewJob::new(&workspace, flow));
    let number = start(Flow::only("terraformApply"));
    let at_the_gate = tokio::task::block_in_place(|| gate.reached());
    let client = fixture.client(&hub);
    let shown = async |path: &str| {
        let request = client.plain(Method::GET, path);
        let request = request.bearer_auth(fixture.token.reveal());
        let text = request.send().await.unwrap().text().await.unwrap();
        serde_json::from_str::<Value>(&text).expect(&text)
    };
    let open = shown("/pools/eu/runs").await;
    let run = open["runs"][0]["run"].as_str().unwrap();
    let job = fixture.platform.job(number);
    let organization = fixture.platform.organization();
    let key = ObjectKey::backend_state(&organization, &job.workspace);
    // It has something: an empty state may be replaced.
    let instance = json!({"schema_version": 0, "attributes": {"id": "x"}});
    let resource = json!({"mode": "managed", "type": "terraform_data", "name": "other",
        "provider": "provider[\"terraform.io/builtin/terraform\"]", "instances": [instance]});
    let of_somebody = json!({"version": 4, "terraform_version": "1.0.0", "serial": 7, "lineage": "of-somebody", "outputs": {},
        "resources": [resource]});
    let of_somebody = of_somebody.to_string();
    let content = of_somebody.as_bytes();
    store.put(&key.in_bucket(), content).unwrap();
    drop(at_the_gate);

    let failed = fixture.platform.until_job(number, Status::Failed).await;
    let step = failed.step_of("terraformApply");
    let name = errored_state_name(&number.to_string(), &step.id);
    let kept = ObjectKey::state_raw(&organization, &job.workspace, &name).in_bucket();
    let made: Value = serde_json::from_str(&store.object(&kept).unwrap().unwrap()).unwrap();
    assert_eq!(made["resources"].as_array().map(Vec::len), Some(3));
    let stored = store.object(&key.in_bucket()).unwrap();
    assert_eq!(stored, Some(of_somebody));
    let ids = format!("{organization}/{}", job.workspace);
    let command = |verb: &str| format!("`api-launcher state {verb} {ids}`");
    let log = fixture.platform.step_output(number, &step.id).unwrap();
    let changed = "somebody has changed it meanwhile";
    for words in [changed, &kept, &command("store"), &command("drop")] {
        assert!(log.contains(words), "{words}: {log}");
    }
    let shown = shown(&format!("/pools/eu/runs/{run}")).await;
    let place = shown["keptState"].as_str().unwrap();
    assert!(place.contains(&kept), "{shown}");

    let refused = start(Flow::plan_apply());
    let refused = fixture.platform.until_job(refused, Status::Failed).await;
    let step = refused.step_of("terraformPlan");
    let log = fixture.platform.step_output(refused.id, &step.id).unwrap();
    for words in [&*name, &command("drop"), "the store of the hub"] {
        assert!(log.contains(words), "{words}: {log}");
    }

    let mut command = Command::new(crate::LAUNCHER);
    command
        .args(["state", "drop", &ids])
        .env_clear()
        .env(env::DATA_DIR, fixture.path("operator"))
        .envs(settings(&store));
    let dropped = tokio::task::block_in_place(|| Running::start(&mut command).wait());
    assert_eq!(dropped.code(), 0, "{dropped}");
    let planned = start(Flow::plan_apply());
    gate.open().await;
    fixture.platform.until_job(planned, Status::Completed).await;
    drop(agent.kill());
}

/// A script of the plan step pushes to the branch, as somebody may during the review.
#[tokio::test(flavor = "multi_thread")]
async fn an_apply_takes_the_commit_of_its_plan() {
    let store = S3::start_open().unwrap();
    let fixture = Fixture::with_store(&store).await;
    let hub = fixture.serve();
    let agent = fixture.start_agent(&hub);
    let module = r#"resource "terraform_data" "deployed" {
  provisioner "local-exec" {
    command = "cat deployed.txt"
  }
}
"#;
    let repository = Repository::with(&[("main.tf", module), ("deployed.txt", "reviewed-text\n")]);
    let reviewed = repository.head();
    let push = format!(
        "cd {} && echo newest-text > deployed.txt && git -c user.name=n -c user.email=n@example.test commit -qam newest",
        repository.path().display()
    );
    let mut flow = Flow::plan_apply();
    flow[0].commands = json!([{
        "runtime": "BASH", "priority": 1, "before": false, "after": true, "script": push,
    }]);
    let job = fixture.completed(&repository, flow).await;
    assert_ne!(repository.head(), reviewed);
    let applied = job.step_of("terraformApply");
    let output = fixture.platform.step_output(job.id, &applied.id).unwrap();
    assert!(output.contains("reviewed-text"), "{output}");
    assert!(!output.contains("newest-text"), "{output}");
    let text = format!(
        "Taking commit {reviewed}, of which the plan was made. The branch `main` has moved"
    );
    assert!(output.contains(&text), "{output}");
    drop(agent.kill());
    fixture.platform.assert_kept().await;
}

/// A lease of an executor, which a client plays.
pub(super) struct Holder<S = S3> {
    pub(super) fixture: Fixture,
    pub(super) hub: Hub,
    agent: Client,
    executor: Client,
    pub(super) lease: LeasedTask,
    pub(super) store: S,
}

impl Holder {
    /// An accepted lease.
    pub(super) async fn accepted() -> Self {
        Self::accepted_of("terraformApply").await
    }

    /// An accepted lease of a step of this type.
    pub(super) async fn accepted_of(step: &str) -> Self {
        let lease = Self::offered(step).await;
        lease.executor.accept(&lease.lease, "pod").await.ok();
        lease
    }

    async fn offered(step: &str) -> Self {
        let store = S3::start_open().unwrap();
        let fixture = Fixture::with_store(&store).await;
        Self::once_asked(store, fixture, step).await
    }

    /// The serial in the store.
    pub(super) fn serial(&self) -> Option<u64> {
        let state = self.store.object(&self.key().in_bucket()).unwrap()?;
        serde_json::from_str::<Value>(&state).unwrap()["serial"].as_u64()
    }

    pub(super) fn lock(&self) -> Option<Value> {
        let name = format!("{}.tflock", self.key().in_bucket());
        let lock = self.store.object(&name).unwrap()?;
        Some(serde_json::from_str(&lock).unwrap())
    }
}

impl<S> Holder<S> {
    async fn on(store: S, fixture: Fixture, step: &str) -> Self {
        let hub = fixture.serve();
        Self::at(hub, store, fixture, step).await
    }

    /// The same, but the hub has asked its store before: a lease that nobody accepts ends after half a minute.
    async fn once_asked(store: S, fixture: Fixture, step: &str) -> Self {
        let hub = fixture.serve();
        hub.until_store_asked().await;
        Self::at(hub, store, fixture, step).await
    }

    async fn at(hub: Hub, store: S, fixture: Fixture, step: &str) -> Self {
        let workspace = Workspace::new("https://git.example.test/a.git");
        let workspace = fixture.platform.workspace(workspace);
        let job = NewJob::new(&workspace, Flow::only(step));
        let job = fixture.platform.start_job(job);
        fixture.platform.until_job(job, Status::Queue).await;
        let agent = fixture.client(&hub);
        let lease = agent.request(agent.register().await).await;
        Self {
            executor: executor_of(&agent, &lease),
            agent,
            fixture,
            hub,
            lease,
            store,
        }
    }

    pub(super) fn base(&self) -> String {
        let relay = path::relay(self.lease.task_id, self.lease.lease_id);
        relay.trim_end_matches("/platform").to_owned()
    }

    pub(super) async fn send(
        &self,
        method: &str,
        below: &str,
        body: &[u8],
    ) -> (StatusCode, String) {
        let request = self.request(&self.executor, method, below, body);
        let answer = request.send().await.unwrap();
        (answer.status(), answer.text().await.unwrap())
    }

    fn request(&self, client: &Client, method: &str, below: &str, body: &[u8]) -> RequestBuilder {
        let method = Method::from_bytes(method.as_bytes()).unwrap();
        client
            .plain(method, &format!("{}/{below}", self.base()))
            .bearer_auth(&self.lease.job_token)
            .header("content-digest", digest(body))
            .body(body.to_vec())
    }

    /// The state of this serial.
    pub(super) async fn write(&self, serial: u64, lineage: &str) -> (StatusCode, String) {
        self.send("POST", "state", &state(serial, lineage)).await
    }

    pub(super) fn key(&self) -> ObjectKey {
        let task = &self.lease.task;
        ObjectKey::backend_state(&task.organization_id, &task.workspace_id)
    }

    pub(super) async fn end(&self) {
        let end = json!({"exitCode": 1, "reported": true});
        let ended = self.executor.lease(&self.lease, LeaseCall::Fail, end);
        ended.await.ok();
    }
}

pub(super) fn state(serial: u64, lineage: &str) -> Vec<u8> {
    let state = json!({"version": 4, "serial": serial, "lineage": lineage, "resources": []});
    state.to_string().into_bytes()
}

pub(super) fn digest(body: &[u8]) -> String {
    use base64::Engine as _;
    let digest = base64::engine::general_purpose::STANDARD.encode(Sha256::digest(body));
    format!("sha-256=:{digest}:")
}

pub(super) const OK: StatusCode = StatusCode::NO_CONTENT;

#[tokio::test(flavor = "multi_thread")]
async fn a_state_is_never_replaced_by_an_older_or_a_foreign_one() {
    let lease = Holder::accepted().await;
    assert_eq!(lease.send("GET", "state", b"").await.0, OK, "there is none");
    assert_eq!(lease.write(3, "l").await.0, OK);
    for (serial, lineage, reason) in [
        (2, "l", "same serial or a later one"),
        (4, "other", "another lineage"),
    ] {
        let (status, text) = lease.write(serial, lineage).await;
        assert_eq!(status, StatusCode::CONFLICT, "{text}");
        assert!(text.contains(reason), "{text}");
    }
    // The answer to a write was lost.
    assert_eq!(lease.write(3, "l").await.0, OK);
    let same_serial = json!({"serial": 3, "lineage": "l", "resources": [1]}).to_string();
    let (status, text) = lease.send("POST", "state", same_serial.as_bytes()).await;
    assert_eq!(status, StatusCode::CONFLICT, "{text}");
    for garbage in [
        &b""[..],
        b" ",
        b"{}",
        b"null",
        b"{\"serial\":9,\"lineage\":\"l\"",
    ] {
        let (status, text) = lease.send("POST", "state", garbage).await;
        assert_eq!(status, StatusCode::CONFLICT, "{text}");
    }
    assert_eq!(lease.serial(), Some(3));
    assert_eq!(lease.write(4, "l").await.0, OK);
    let (status, text) = lease.send("GET", "state", b"").await;
    assert_eq!((status, text.into_bytes()), (StatusCode::OK, state(4, "l")));
    assert_eq!(lease.send("DELETE", "state", b"").await.0, OK);
    assert_eq!(lease.serial(), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_is_not_what_it_says_stores_nothing() {
    let lease = Holder::accepted().await;
    // Whole parts, and a part of one.
    let large = [5 << 20, 6 << 20, 10 << 20].map(|length| vec![b'x'; length]);
    let bodies = large.iter().map(Vec::as_slice);
    for body in [&b"{}"[..]].into_iter().chain(bodies) {
        let url = format!("{}/artifacts/output", lease.base());
        let request = |digest: &str| {
            let request = lease.executor.plain(Method::PUT, &url);
            let request = request.bearer_auth(&lease.lease.job_token);
            request.header("content-digest", digest).body(body.to_vec())
        };
        for wrong in ["", &digest(b"other")] {
            let answer = request(wrong).send().await.unwrap();
            assert_eq!(answer.status(), StatusCode::BAD_REQUEST);
        }
        assert_eq!(lease.store.objects().unwrap(), []);
        let answer = request(&digest(body)).send().await.unwrap();
        assert_eq!(answer.status(), OK);
        let objects = lease.store.objects().unwrap();
        assert_eq!(objects.len(), 1);
        assert!(objects[0].1 == body);
        let read = lease.send("GET", "artifacts/output", b"").await;
        assert!(read.1.as_bytes() == body);
        let mut keys = lease.store.objects().unwrap().into_iter();
        let name = keys.next().unwrap().0;
        lease.store.remove(&name).unwrap();
    }
}

/// Nothing of it is read.
#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_is_too_large_or_has_no_length_is_refused_before_it_is_sent() {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let lease = Holder::accepted().await;
    for (length, status) in [
        ("Content-Length: 2147483648", "413"),
        ("Transfer-Encoding: chunked", "411"),
    ] {
        let mut stream = tokio::net::TcpStream::connect(lease.hub.address())
            .await
            .unwrap();
        let head = format!(
            "POST {}/state HTTP/1.1\r\nHost: hub\r\nAuthorization: Bearer {}\r\nContent-Digest: {}\r\n{length}\r\n\r\n",
            lease.base(),
            lease.lease.job_token,
            digest(b""),
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut answer = [0; 12];
        stream.read_exact(&mut answer).await.unwrap();
        assert_eq!(
            String::from_utf8_lossy(&answer),
            format!("HTTP/1.1 {status}")
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_opens_the_artifacts_of_its_own_step_alone() {
    let lease = Holder::accepted().await;
    let (status, names) = lease.send("GET", "artifacts", b"").await;
    assert_eq!(status, StatusCode::OK, "{names}");
    let names: Value = serde_json::from_str(&names).unwrap();
    let own = names["references"]["plan"].as_str().unwrap().to_owned();
    let files = names["references"]["plan-files"].as_str().unwrap();
    let files = files.to_owned();
    for artifact in [
        "plan",
        "plan-files",
        "plan-record",
        "state",
        "raw-state",
        "errored-state",
        "output",
    ] {
        let below = format!("artifacts/{artifact}");
        assert_eq!(lease.send("PUT", &below, b"mine").await.0, OK, "{artifact}");
    }
    let task = &lease.lease.task;
    let objects = lease.store.objects().unwrap();
    // With the list of what is kept.
    assert_eq!(objects.len(), 8, "{objects:?}");
    for (name, _) in &objects {
        assert!(name.contains(&task.organization_id), "{name}");
    }
    // Executors do not read what they publish.
    let (status, _) = lease.send("GET", "artifacts/state", b"").await;
    assert_eq!(status, StatusCode::CONFLICT);

    let query_of = |artifact: &str, reference: &str| {
        let mut query = url::form_urlencoded::Serializer::new(String::new());
        query.append_pair("reference", reference);
        format!("artifacts/{artifact}?{}", query.finish())
    };
    let query = |reference: &str| query_of("plan", reference);
    let of_files = |reference: &str| query_of("plan-files", reference);
    assert_eq!(lease.send("GET", &of_files(&files), b"").await.1, "mine");
    for foreign in [
        &own,
        &files.replace(&format!("/{}/", lease.lease.task.job_id), "/9999/"),
    ] {
        let (status, text) = lease.send("GET", &of_files(foreign), b"").await;
        assert_eq!(status, StatusCode::FORBIDDEN, "{foreign}: {text}");
    }
    assert_eq!(lease.send("GET", &query(&own), b"").await.1, "mine");
    let step = &task.step_id;
    let other_step = own.replace(step, "another-step");
    let (status, _) = lease.send("GET", &query(&other_step), b"").await;
    assert_eq!(status, StatusCode::NOT_FOUND, "the job has no such plan");
    let workspace = &task.workspace_id;
    let state = own.split(workspace).next().unwrap().to_owned() + workspace + "/terraform.tfstate";
    for foreign in [
        own.replace(workspace, "another-workspace"),
        own.replace(&task.organization_id, "another-organization"),
        own.replace(&format!("/{}/", task.job_id), "/9999/"),
        own.replace(step, ".."),
        own.replace(step, "%2e%2e"),
        own.replace(step, &format!("{step}/..")),
        own.replace("terraformLibrary.tfPlan", "mayflyPlan.json"),
        state,
        "/etc/passwd".to_owned(),
        String::new(),
    ] {
        let (status, text) = lease.send("GET", &query(&foreign), b"").await;
        assert_eq!(status, StatusCode::FORBIDDEN, "{foreign}: {text}");
    }
    for below in [
        "artifacts/plan?step=1",
        "artifacts/nothing",
        "artifacts/plan-record?reference=x",
    ] {
        let (status, text) = lease.send("GET", below, b"").await;
        assert!(status.is_client_error(), "{below}: {text}");
    }
    for below in [
        "artifacts/..%2f..%2fstate",
        "artifacts/%2e%2e",
        "state/../../state",
        "artifacts/state/x",
    ] {
        let (status, text) = lease.send("PUT", below, b"x").await;
        assert!(status.is_client_error(), "{below}: {text}");
    }
    assert_eq!(lease.store.objects().unwrap().len(), 8);
    // Another lease, another token.
    let other = lease
        .agent
        .plain(Method::GET, &format!("{}/state", lease.base()));
    let answer = other
        .bearer_auth(lease.fixture.token.reveal())
        .send()
        .await
        .unwrap();
    assert!(answer.status().is_client_error());
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_holder_of_the_accepted_lease_writes_and_after_its_end_only_to_rescue() {
    let lease = Holder::offered("terraformApply").await;
    for (method, below) in [
        ("POST", "state"),
        ("GET", "state"),
        ("POST", "state/lock"),
        ("PUT", "artifacts/plan"),
        ("PUT", "artifacts/output"),
    ] {
        let (status, text) = lease.send(method, below, b"{}").await;
        assert_eq!(status, StatusCode::CONFLICT, "{below}: {text}");
        assert!(text.contains("LEASE_NOT_ACCEPTED"), "{below}: {text}");
    }
    lease.executor.accept(&lease.lease, "pod").await.ok();
    assert_eq!(lease.write(1, "l").await.0, OK);
    lease.end().await;
    for (method, below) in [
        ("DELETE", "state"),
        ("PUT", "artifacts/plan"),
        ("PUT", "artifacts/plan-files"),
        ("PUT", "artifacts/plan-record"),
        ("GET", "artifacts/plan"),
    ] {
        let (status, text) = lease.send(method, below, b"{}").await;
        assert_eq!(status, StatusCode::CONFLICT, "{below}: {text}");
    }
    // Its lock may have been released as one that was left.
    let (status, text) = lease.write(2, "l").await;
    assert_eq!(status, StatusCode::CONFLICT, "{text}");
    assert!(text.contains("take it again"), "{text}");
    let locked = lease.send("POST", "state/lock", &lock_info(ONE)).await;
    assert_eq!(locked.0, OK);
    let (next, of_one) = (state(2, "l"), format!("state?lock={ONE}"));
    let rescued = lease.send("POST", &of_one, &next).await;
    assert_eq!(rescued.0, OK, "it is rescued");
    assert_eq!(lease.send("PUT", "artifacts/output", b"log").await.0, OK);
    assert_eq!(lease.serial(), Some(2));
}

/// Ids of locks.
pub(super) const ONE: &str = "6c2a9f0e-3f0b-4b52-9d0c-6f6c8b8d7a11";
const TWO: &str = "0b9e1c55-8f5e-4d0f-8a56-1f5d3c3a9b22";

pub(super) fn lock_info(id: &str) -> Vec<u8> {
    let info = json!({"ID": id, "Who": "me@pod", "Operation": "OperationTypeApply", "Info": "", "Version": "1.14.0",
        "Created": "2026-11-26T00:00:00Z", "Path": ""});
    info.to_string().into_bytes()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_keeps_others_out_and_is_released_when_its_run_is_over() {
    let lease = Holder::accepted().await;
    let (one, two) = (lock_info(ONE), lock_info(TWO));
    assert_eq!(lease.send("POST", "state/lock", &one).await.0, OK);
    // The answer was lost.
    assert_eq!(lease.send("POST", "state/lock", &one).await.0, OK);
    let (status, holder) = lease.send("POST", "state/lock", &two).await;
    assert_eq!(status, StatusCode::LOCKED);
    assert!(holder.contains("me@pod"), "{holder}");
    for below in ["state", &format!("state?lock={TWO}")] {
        let (status, text) = lease.send("POST", below, &state(1, "l")).await;
        assert_eq!(status, StatusCode::CONFLICT, "{text}");
    }
    let (first, of_one) = (state(1, "l"), format!("state?lock={ONE}"));
    let write = lease.send("POST", &of_one, &first);
    assert_eq!(write.await.0, OK);
    assert_eq!(
        lease.send("POST", "state/unlock", &two).await.0,
        StatusCode::LOCKED
    );
    assert_eq!(lease.send("POST", "state/unlock", &one).await.0, OK);
    assert_eq!(lease.lock(), None);
    // A run in the cluster has the lock. Nothing here releases it.
    let key = format!("{}.tflock", lease.key().in_bucket());
    lease.store.put(&key, &lock_info("of-the-cluster")).unwrap();
    assert_eq!(
        lease.send("POST", "state/lock", &one).await.0,
        StatusCode::LOCKED
    );
    assert_eq!(
        lease.send("POST", "state/unlock", b"").await.0,
        StatusCode::LOCKED
    );
    lease.store.remove(&key).unwrap();

    assert_eq!(lease.send("POST", "state/lock", &two).await.0, OK);
    let of_two = lease.store.object(&key).unwrap().unwrap();
    lease.end().await;
    let released = async || lease.lock().is_none().then_some(());
    wait::until("the release of the lock", released).await;
    // The store takes a repeated request for the lock when it was released already.
    lease.store.put(&key, of_two.as_bytes()).unwrap();
    wait::until("the release of the late lock", released).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_lock_of_a_killed_executor_is_released_also_by_a_hub_that_was_killed() {
    let (store, port) = (S3::start_open().unwrap(), Port::take().unwrap());
    let fixture = Fixture::with_store(&store).await;
    // The next hub is where this one was.
    let fixture = fixture.with(env::LISTEN, &port.address().to_string());
    let hub = fixture.serve();
    let gate = fixture.gate();
    let agent = fixture.start_agent(&hub);
    let repository = gate.repository();
    let workspace = Workspace::new(&repository.url());
    let workspace = fixture.platform.workspace(workspace);
    let number = fixture
        .platform
        .start_job(NewJob::new(&workspace, Flow::only("terraformApply")));
    let _at_the_gate = tokio::task::block_in_place(|| gate.reached());
    let job = fixture.platform.job(number);
    let key = ObjectKey::backend_state(&fixture.platform.organization(), &job.workspace);
    let lock = || {
        store
            .object(&format!("{}.tflock", key.in_bucket()))
            .unwrap()
    };
    assert!(lock().is_some_and(|lock| lock.contains("mayfly task")));
    // No process of the run can tell anybody.
    let processes = tree(fixture.executor());
    hub.crash();
    for process in processes {
        let _ = kill(Pid::from_raw(process), Signal::SIGKILL);
    }
    let hub = fixture.serve();
    fixture.platform.until_job(number, Status::Failed).await;
    let released = async || lock().is_none().then_some(());
    wait::until("the release of the lock", released).await;
    drop(agent.kill());
    drop(hub);
}

/// The tool cannot store the state, and its lock stays at the hub. The executor stores it when the hub is back.
#[tokio::test(flavor = "multi_thread")]
async fn a_state_that_a_hub_was_not_there_to_take_is_rescued_past_the_lock_of_its_tool() {
    is_stored_once_a_hub_is_back(true).await;
}

/// The tool cannot write it either, and prints it.
#[tokio::test(flavor = "multi_thread")]
async fn a_state_that_neither_a_hub_nor_a_disk_takes_is_held_until_a_hub_does() {
    is_stored_once_a_hub_is_back(false).await;
}

async fn is_stored_once_a_hub_is_back(has_disk: bool) {
    let (store, port) = (S3::start_open().unwrap(), Port::take().unwrap());
    let fixture = Fixture::with_store(&store).await;
    // The next hub is where this one was.
    let fixture = fixture.with(env::LISTEN, &port.address().to_string());
    let hub = fixture.serve();
    let gate = fixture.gate();
    let agent = fixture.start_agent(&hub);
    let repository = gate.repository();
    let workspace = Workspace::new(&repository.url());
    let workspace = fixture.platform.workspace(workspace);
    let number = NewJob::new(&workspace, Flow::only("terraformApply"));
    let number = fixture.platform.start_job(number);
    let at_the_gate = tokio::task::block_in_place(|| gate.reached());
    if !has_disk {
        for process in tree(fixture.executor()) {
            // Processes of the tool have one folder.
            let _ = fs::create_dir(format!("/proc/{process}/cwd/errored.tfstate"));
        }
        fs::write(fixture.path("data/errored"), "in the way").unwrap();
    }
    hub.crash();
    kill(fixture.executor(), Signal::SIGTERM).unwrap();
    drop(at_the_gate);
    let log = fixture.runs().remove(0).join("log");
    let words = if has_disk {
        "left it in errored.tfstate"
    } else {
        "could neither store the state nor write it to disk"
    };
    let is_left = async || {
        let log = fs::read_to_string(&log).unwrap_or_default();
        if log.contains(words) {
            Ok(())
        } else {
            Err(log)
        }
    };
    wait::until("a state that is left", is_left).await;
    let said = fs::read_to_string(&log).unwrap();
    assert!(!said.contains("\"lineage\""), "{said}");
    let key = ObjectKey::backend_state(
        &fixture.platform.organization(),
        &fixture.platform.job(number).workspace,
    );
    let lock = || {
        store
            .object(&format!("{}.tflock", key.in_bucket()))
            .unwrap()
    };
    assert!(lock().is_some(), "the tool has left no lock");
    // The platform has given the job up meanwhile.
    let hub = fixture.serve();
    let is_stored = async || {
        let state = store.object(&key.in_bucket()).unwrap().unwrap_or_default();
        let is_stored = state.contains("\"first\"") && lock().is_none();
        if is_stored { Ok(()) } else { Err(state) }
    };
    wait::until("the state and no lock", is_stored).await;
    drop((agent.kill(), hub));
}

/// Each call of a state's write is lost once, before it arrives and after it: nothing is lost, and nothing older stays.
#[tokio::test(flavor = "multi_thread")]
async fn lost_calls_of_a_states_write_lose_no_state_and_leave_no_lock() {
    let store = S3::start_open().unwrap();
    let fixture = Fixture::with_store(&store).await;
    let hub = fixture.serve();
    let classes = [
        "/state",
        "/state/lock",
        "/state/unlock",
        "/artifacts",
        "/artifacts/plan",
        "/artifacts/raw-state",
    ];
    let proxy = Proxy::of_calls(&[hub.address()]).unwrap();
    let repository = Repository::fixture();
    let agent = Running::start(&mut fixture.agent(&proxy.url()));
    for class in classes {
        for moment in [Moment::Sent, Moment::Answered] {
            proxy.rule(1, move |call| {
                let is_it = call.class.ends_with(class) && call.moment() == moment;
                is_it.then_some(Fate::Drop)
            });
            let job = fixture.completed(&repository, Flow::plan_apply()).await;
            assert_eq!(
                job.step_statuses(),
                [Status::Completed; 2],
                "{class} {moment:?}"
            );
            let key = ObjectKey::backend_state(&fixture.platform.organization(), &job.workspace);
            let state = store.object(&key.in_bucket()).unwrap().unwrap();
            let state: Value = serde_json::from_str(&state).unwrap();
            assert_eq!(
                state["resources"].as_array().map(Vec::len),
                Some(1),
                "{class} {moment:?}"
            );
            assert_eq!(proxy.rules_left(), 0, "no call {class}");
            let lock = store.object(&format!("{}.tflock", key.in_bucket()));
            assert_eq!(lock.unwrap(), None, "{class} {moment:?}");
        }
    }
    drop(agent.kill());
}
