//! What the hub refuses of states and artifacts: what follows nothing that its run has seen, and what comes too late.

use job_contract::keys::{ObjectKey, errored_state_name};
use pool_protocol::artifact::Artifacts;
use pool_protocol::token::PoolToken;
use reqwest::StatusCode;
use serde_json::{Value, json};
use test_peers::wait;
use test_platform::Status;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::artifacts::{Holder, OK, ONE, digest, lock_info, state};

impl Holder {
    /// The state that the hub keeps of the step, because it was refused.
    fn kept(&self) -> Option<Value> {
        let task = &self.lease.task;
        let key = ObjectKey::errored_state(
            &task.organization_id,
            &task.workspace_id,
            &task.job_id,
            &task.step_id,
        );
        let kept = self.store.object(&key.in_bucket()).unwrap()?;
        Some(serde_json::from_str(&kept).unwrap())
    }

    /// The states that hold the runs of the workspace back, as each executor learns of them.
    async fn listed(&self) -> Vec<String> {
        let (status, names) = self.send("GET", "artifacts", b"").await;
        assert_eq!(status, StatusCode::OK, "{names}");
        let names: Artifacts = serde_json::from_str(&names).unwrap();
        names.kept
    }

    /// A request whose body the hub waits for: it has let the request pass.
    async fn begun(&self, (method, below): (&str, &str), body: &[u8]) -> TcpStream {
        let head = format!(
            "{method} {}/{below} HTTP/1.1\r\nHost: hub\r\nAuthorization: Bearer {}\r\nContent-Digest: {}\r\n\
             Content-Length: {}\r\nExpect: 100-continue\r\n\r\n",
            self.base(),
            self.lease.job_token,
            digest(body),
            body.len(),
        );
        let mut stream = TcpStream::connect(self.hub.address()).await.unwrap();
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut answer = [0; CONTINUE.len()];
        stream.read_exact(&mut answer).await.unwrap();
        assert_eq!(&answer, CONTINUE);
        stream
    }
}

const CONTINUE: &[u8; 25] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// Sends the rest of a body, and returns the status of the answer.
async fn finished(stream: &mut TcpStream, rest: &[u8]) -> String {
    stream.write_all(rest).await.unwrap();
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).await.unwrap();
    String::from_utf8_lossy(&answer).into_owned()
}

/// Somebody else has stored a state since: a run after it, or a run in the cluster. The serial of the refused state says nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_was_given_up_never_replaces_the_state_of_the_next_one() {
    let lease = Holder::accepted().await;
    let (one, of_one) = (lock_info(ONE), format!("state?lock={ONE}"));
    assert_eq!(lease.send("POST", "state/lock", &one).await.0, OK);
    let write = async |serial| lease.send("POST", &of_one, &state(serial, "l")).await;
    assert_eq!(write(5).await.0, OK);
    lease.end().await;
    let released = async || lease.lock().is_none().then_some(());
    wait::until("the release of the lock", released).await;
    assert_eq!(write(5).await.0, OK, "the answer was lost");

    let key = lease.key().in_bucket();
    lease.store.put(&key, &state(6, "l")).unwrap();
    for is_locked in [false, true] {
        if is_locked {
            assert_eq!(lease.send("POST", "state/lock", &one).await.0, OK);
        }
        // It is served, as `state push` of a rescue asks for it. That makes nothing of it known to the run.
        let read = lease.send("GET", "state", b"").await;
        assert_eq!(read.1.into_bytes(), state(6, "l"));
        let (status, text) = write(7).await;
        assert_eq!(status, StatusCode::CONFLICT, "{text}");
        for words in ["somebody has changed the state", "is kept in", "errored-"] {
            assert!(text.contains(words), "{words}: {text}");
        }
        assert_eq!(lease.serial(), Some(6));
        assert_eq!(lease.kept().unwrap()["serial"], 7);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_state_follows_what_its_run_was_given_last_and_not_what_a_rescue_reads() {
    let lease = Holder::accepted().await;
    let key = lease.key().in_bucket();
    lease.store.put(&key, &state(3, "l")).unwrap();
    let (status, text) = lease.write(4, "l").await;
    assert_eq!(status, StatusCode::CONFLICT, "it has seen none: {text}");
    let task = &lease.lease.task;
    let name = errored_state_name(&task.job_id, &task.step_id);
    assert_eq!(lease.listed().await, [&*name]);
    let read = lease.send("GET", "state?rescue=true", b"").await;
    assert_eq!(read.0, StatusCode::OK);
    let (status, text) = lease.write(4, "l").await;
    assert_eq!(status, StatusCode::CONFLICT, "{text}");
    let removed = lease.send("DELETE", "state", b"").await;
    assert_eq!(removed.0, StatusCode::CONFLICT, "{}", removed.1);
    assert_eq!(lease.serial(), Some(3));

    assert_eq!(lease.send("GET", "state", b"").await.0, StatusCode::OK);
    assert_eq!(lease.write(4, "l").await.0, OK);
    assert_eq!(lease.write(5, "l").await.0, OK);
    assert_eq!(lease.listed().await, [""; 0]);
    // A hub of an earlier version knows nothing of the list.
    let list = ObjectKey::kept_states(&task.organization_id, &task.workspace_id);
    let listed = json!({"states": {name.as_str(): {}}}).to_string();
    let listed = listed.as_bytes();
    lease.store.put(&list.in_bucket(), listed).unwrap();
    assert_eq!(lease.write(6, "l").await.0, OK);
    assert_eq!(lease.listed().await, [""; 0]);
    lease.store.put(&key, &state(7, "l")).unwrap();
    let (status, text) = lease.write(8, "l").await;
    assert_eq!(status, StatusCode::CONFLICT, "{text}");
    assert_eq!(lease.serial(), Some(7));
}

/// The hub or its executor is killed while the state is kept.
#[tokio::test(flavor = "multi_thread")]
async fn a_state_is_listed_before_it_is_kept() {
    let lease = Holder::accepted().await;
    let task = &lease.lease.task;
    let name = errored_state_name(&task.job_id, &task.step_id);
    let content = state(1, "l");
    let put = ("PUT", "artifacts/errored-state");
    let mut stream = lease.begun(put, &content).await;
    assert_eq!(lease.kept(), None);
    assert_eq!(lease.listed().await, [name]);
    assert_eq!(finished(&mut stream, &content).await, "HTTP/1.1 204");
    assert_eq!(lease.kept().unwrap()["serial"], 1);

    // A list that cannot be read keeps no state away, and lets nothing begin.
    let list = ObjectKey::kept_states(&task.organization_id, &task.workspace_id);
    lease.store.put(&list.in_bucket(), b"{").unwrap();
    let (status, text) = lease.send(put.0, put.1, &state(2, "l")).await;
    assert_eq!(status, StatusCode::CONFLICT, "{text}");
    assert!(text.contains("and not listed"), "{text}");
    assert_eq!(lease.listed().await, ["unreadable-list"]);
    assert_eq!(lease.kept().unwrap()["serial"], 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_that_changes_no_state_only_reads_it_unless_the_operator_lets_its_scripts_write() {
    let lease = Holder::accepted_of("terraformPlan").await;
    let one = lock_info(ONE);
    assert_eq!(lease.send("POST", "state/lock", &one).await.0, OK);
    assert_eq!(lease.send("GET", "state", b"").await.0, OK);
    let (first, of_one) = (state(1, "l"), format!("state?lock={ONE}"));
    for (method, body) in [("POST", &first[..]), ("DELETE", &b""[..])] {
        let (status, text) = lease.send(method, &of_one, body).await;
        assert_eq!(status, StatusCode::FORBIDDEN, "{text}");
        assert!(text.contains("scriptState: write"), "{text}");
    }
    assert_eq!(lease.serial(), None);
    assert_eq!(lease.kept().unwrap()["serial"], 1);
    assert_eq!(lease.listed().await, [""; 0], "it has made nothing");

    let fixture = &lease.fixture;
    let token = format!("{{id: t0, sha256: {}}}", fixture.token.digest());
    fixture.replace_pools(&format!(
        "pools:\n  eu:\n    organizations: [{}]\n    scriptState: write\n    tokens: [{token}]\n",
        fixture.platform.organization()
    ));
    assert_eq!(lease.send("POST", &of_one, &first).await.0, OK);
    assert_eq!(lease.serial(), Some(1));
    // What such a script has made is in its state alone.
    let key = lease.key().in_bucket();
    lease.store.put(&key, &state(2, "l")).unwrap();
    let refused = lease.send("POST", &of_one, &state(3, "l")).await;
    assert_eq!(refused.0, StatusCode::CONFLICT, "{}", refused.1);
    assert_eq!(lease.kept().unwrap()["serial"], 3);
    assert_eq!(lease.listed().await.len(), 1, "{}", refused.1);

    let scripts = Holder::accepted_of("customScripts").await;
    assert_eq!(scripts.send("GET", "state", b"").await.0, OK);
    assert_eq!(scripts.write(1, "l").await.0, StatusCode::FORBIDDEN);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_arrives_after_the_end_of_its_task_replaces_nothing() {
    let lease = Holder::accepted().await;
    let mut late = Vec::new();
    for artifact in ["plan", "plan-files", "plan-record"] {
        let below = format!("artifacts/{artifact}");
        assert_eq!(lease.send("PUT", &below, b"reviewed").await.0, OK);
        late.push(lease.begun(("PUT", &below), b"late").await);
    }
    lease.end().await;
    let before = lease.store.objects().unwrap();
    for mut stream in late {
        assert_eq!(finished(&mut stream, b"late").await, "HTTP/1.1 409");
    }
    assert!(lease.store.objects().unwrap() == before);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_arrives_after_the_token_of_its_agent_was_removed_is_refused() {
    // Serial and lineage of the state are among these bytes.
    const BEGUN: usize = 1024;
    let lease = Holder::accepted().await;
    let more = "x".repeat(64 * 1024);
    let state = json!({"serial": 1, "lineage": "l", "resources": [], "more": more});
    let bodies = [more.into_bytes(), state.to_string().into_bytes()];
    let mut late = Vec::new();
    for (target, body) in [
        (("PUT", "artifacts/output"), &bodies[0]),
        (("POST", "state"), &bodies[1]),
        (("PUT", "artifacts/plan"), &bodies[0]),
    ] {
        let mut stream = lease.begun(target, body).await;
        stream.write_all(&body[..BEGUN]).await.unwrap();
        late.push((stream, &body[BEGUN..]));
    }
    let other = PoolToken::new("eu".parse().unwrap());
    lease.fixture.write_pools(&[&other]);
    let job = lease.lease.task.job_id.parse().unwrap();
    let has_failed = async || {
        // A sender that sends nothing is given up.
        for (stream, rest) in &mut late {
            stream.write_all(&rest[..1]).await.unwrap();
            *rest = &rest[1..];
        }
        lease.fixture.platform.job(job).status == Status::Failed
    };
    wait::until("the end of the lease", has_failed).await;
    // The sender of the plan sends nothing more. "Try again" would be no answer to it.
    let (mut silent, _) = late.pop().unwrap();
    for (mut stream, rest) in late {
        assert_eq!(finished(&mut stream, rest).await, "HTTP/1.1 409");
    }
    assert_eq!(finished(&mut silent, b"").await, "HTTP/1.1 409");
    let objects = lease.store.objects().unwrap();
    assert!(objects.iter().all(|(_, stored)| !bodies.contains(stored)));
}
