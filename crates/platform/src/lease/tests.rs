//! Tests of a lease with a server that gives prepared responses.

use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};

use job_contract::Exit;
use job_contract::status::JobStatus;
use pool_protocol::IDEMPOTENCY_KEY;
use pool_protocol::id::{LeaseId, TaskId};
use pool_protocol::lease as wire;
use pool_protocol::problem::{Code, Problem};
use pool_protocol::task::TaskState;
use pool_protocol::version::{HEADER, VERSION};
use rstest::rstest;
use serde_json::Value;
use test_peers::http::{Request, Response, Server};
use test_peers::wait::DEADLINE;

use super::*;

/// What the hub says, in seconds.
const LOST_IN: u32 = 600;

fn holder() -> Holder {
    Holder {
        pod: "pod".to_owned(),
        uid: "uid".to_owned(),
        since: String::new(),
    }
}

fn lease_response(job_token: &str, cancel_requested: bool) -> Response {
    let lease = wire::Lease {
        task_id: TaskId::new(),
        lease_id: LeaseId::new(),
        fencing_token: 1,
        state: TaskState::Running,
        expires_at: String::new(),
        expires_in_seconds: 1,
        lost_in_seconds: LOST_IN,
        job_token: job_token.to_owned(),
        cancel_requested,
    };
    Response::new(200, serde_json::to_vec(&lease).unwrap())
}

fn problem(code: Code) -> Response {
    let problem = Problem::new(code, "the reason").with_versions(VERSION..=VERSION, None);
    Response::new(problem.status, serde_json::to_vec(&problem).unwrap())
}

fn lease_at(server: &Server) -> Lease {
    // Programs install the provider at their start. An earlier test may have installed it.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let url = Url::parse(&format!("{}/leases/1", server.url())).unwrap();
    let token = JobToken::new("mfr_first".to_owned().into());
    Lease::new(LeaseConfig::new(url, token)).unwrap()
}

/// Returns a server that gives the responses that the test sends.
fn scripted_server() -> (Server, Sender<Response>) {
    let (responses, answers) = channel();
    let answers: Mutex<Receiver<Response>> = Mutex::new(answers);
    let answer = move |_: &Request| {
        let next = answers.lock().unwrap().recv_timeout(DEADLINE);
        next.unwrap_or_else(|_| Response::new(500, ""))
    };
    (Server::start(answer).unwrap(), responses)
}

fn end(result: RunResult) -> RunEnd {
    RunEnd {
        result,
        exit_code: 0,
        diagnostic: String::new(),
        reported: true,
        report: None,
    }
}

/// The test blocks the only thread of its runtime.
#[tokio::test]
async fn heartbeats_continue_while_the_run_blocks_all_threads_and_use_the_latest_token() {
    let (beat, beats) = channel();
    let beat = Mutex::new(beat);
    let server = Server::start(move |request| {
        if request.path.ends_with("/heartbeat") {
            // The test may have ended.
            let _ = beat.lock().unwrap().send(request.clone());
        }
        lease_response("mfr_next", false)
    });
    let server = server.unwrap();
    let lease = lease_at(&server);
    assert_eq!(lease.accept(&holder()).await.unwrap(), Claim::Granted);
    lease.enter("apply");
    for _ in 0..2 {
        let request = beats.recv_timeout(DEADLINE).unwrap();
        let said: Value = serde_json::from_slice(&request.body).unwrap();
        assert_eq!(said["phase"], "apply");
        assert_eq!(request.header("authorization"), Some("Bearer mfr_next"));
        assert_eq!(request.header(HEADER), Some("1"));
        assert!(request.header("user-agent").unwrap().starts_with("mayfly/"));
    }
    let accepted = &server.requests()[0];
    assert_eq!(accepted.header("authorization"), Some("Bearer mfr_first"));
}

#[tokio::test]
async fn a_claim_is_retried_with_the_same_idempotency_key() {
    let (server, responses) = scripted_server();
    for answer in [
        Response::new(200, "<html>sign in</html>"),
        Response::new(404, ""),
        problem(Code::StoreUnavailable).with_header("Retry-After", "0"),
        lease_response("", false),
    ] {
        responses.send(answer).unwrap();
    }
    let lease = lease_at(&server);
    assert_eq!(lease.accept(&holder()).await.unwrap(), Claim::Granted);
    let requests = server.requests();
    let keys: Vec<_> = requests
        .iter()
        .filter(|request| request.path.ends_with("/accept"))
        .map(|request| request.header(IDEMPOTENCY_KEY).unwrap())
        .collect();
    assert_eq!(keys, [keys[0]; 4]);
}

#[rstest]
#[case(Code::LeaseSuperseded)]
#[case(Code::LeaseExpired)]
#[case(Code::TaskCancelled)]
#[case(Code::TaskAlreadyTerminal)]
#[tokio::test]
async fn a_refused_claim_is_not_retried_and_no_end_is_sent(#[case] code: Code) {
    let (server, responses) = scripted_server();
    responses.send(problem(code)).unwrap();
    let lease = lease_at(&server);
    let Claim::Refused(why) = lease.accept(&holder()).await.unwrap() else {
        panic!("granted");
    };
    assert!(why.starts_with("the reason"), "{why}");
    let deadline = Deadline::after(DEADLINE);
    lease.end(&end(RunResult::Failed), &deadline).await.unwrap();
    assert_eq!(server.requests().len(), 1);
}

#[rstest]
#[case(
    Code::ExecutorProtocolVersionUnsupported,
    Exit::BadConfiguration,
    "speaks versions 1 to 1"
)]
#[case(Code::ExecutorAuthenticationFailed, Exit::Infrastructure, "401")]
#[case(Code::TaskNotFound, Exit::Infrastructure, "404")]
#[tokio::test]
async fn other_errors_of_the_hub_fail_the_claim(
    #[case] code: Code,
    #[case] exit: Exit,
    #[case] text: &str,
) {
    let (server, responses) = scripted_server();
    responses.send(problem(code)).unwrap();
    let error = lease_at(&server).accept(&holder()).await.unwrap_err();
    assert_eq!(error.exit(), exit);
    let shown = format!("{error} {error:?}");
    assert!(shown.contains(text) && !shown.contains("mfr_"), "{shown}");
}

#[tokio::test]
async fn a_cancellation_and_the_loss_of_the_lease_stop_the_run() {
    let (server, responses) = scripted_server();
    let lease = lease_at(&server);
    responses.send(lease_response("", false)).unwrap();
    assert_eq!(lease.accept(&holder()).await.unwrap(), Claim::Granted);
    responses.send(lease_response("", true)).unwrap();
    assert_eq!(lease.stopped().await, JobStatus::Cancelled);
    assert!(!lease.is_lost());
    responses.send(problem(Code::TaskAlreadyTerminal)).unwrap();
    let mut status = lease.0.status.subscribe();
    status
        .wait_for(|now| *now == LeaseStatus::Lost)
        .await
        .unwrap();
    assert_eq!(lease.stopped().await, JobStatus::Failed);
    // A task that is over at the hub is not ended again.
    let before = server.requests().len();
    let deadline = Deadline::after(DEADLINE);
    lease
        .end(&end(RunResult::Completed), &deadline)
        .await
        .unwrap();
    assert_eq!(server.requests().len(), before);
}

#[rstest]
#[case::of_an_apply(600, 265, 335)]
#[case::of_a_plan(600, 30, 570)]
#[case::sooner_than_the_tool_stops(20, 265, 10)]
fn a_run_is_cut_off_while_there_is_time_to_stop_its_tool(
    #[case] lost_in: u64,
    #[case] stopping: u64,
    #[case] patience: u64,
) {
    let [lost_in, stopping, patience] = [lost_in, stopping, patience].map(Duration::from_secs);
    assert_eq!(heartbeat::patience(lost_in, stopping), patience);
}

#[tokio::test]
async fn a_lease_is_cut_off_if_the_hub_has_not_answered_for_too_long() {
    let (server, responses) = scripted_server();
    let lease = lease_at(&server);
    responses.send(lease_response("", false)).unwrap();
    assert_eq!(lease.accept(&holder()).await.unwrap(), Claim::Granted);
    let mut answers = lease.0.renewed.subscribe();
    let claimed = answers.borrow_and_update().unwrap();
    assert_eq!(claimed.lost_in, Duration::from_secs(LOST_IN.into()));
    responses.send(lease_response("", false)).unwrap();
    answers.changed().await.unwrap();
    let renewed = answers.borrow_and_update().unwrap();
    assert!(renewed.at > claimed.at, "a heartbeat renews the lease");
    // Nothing is left of the time after which the run is given up.
    lease.0.renewed.send_replace(Some(Renewal {
        at: renewed.at,
        lost_in: Duration::ZERO,
    }));
    let silence = lease.cut_off(Duration::from_secs(30)).await;
    assert_eq!(silence, Duration::ZERO);
}

#[rstest]
#[case(RunResult::Completed, "complete")]
#[case(RunResult::Failed, "fail")]
#[case(RunResult::Cancelled, "cancelled")]
#[tokio::test]
async fn the_end_is_reported_with_its_result(
    #[case] result: RunResult,
    #[case] name: &'static str,
) {
    let ended = wire::Ended {
        task_id: TaskId::new(),
        state: TaskState::Completed,
    };
    let server = Server::start(move |request| {
        if request.path == format!("/leases/1/{name}") {
            return Response::new(200, serde_json::to_vec(&ended).unwrap());
        }
        lease_response("", false)
    });
    let server = server.unwrap();
    let lease = lease_at(&server);
    lease.accept(&holder()).await.unwrap();
    let end = RunEnd {
        exit_code: 76,
        diagnostic: "x".repeat(5000),
        ..end(result)
    };
    lease.end(&end, &Deadline::after(DEADLINE)).await.unwrap();
    let requests = server.requests();
    let sent = requests.iter().find(|request| request.path.ends_with(name));
    let end: wire::End = serde_json::from_slice(&sent.unwrap().body).unwrap();
    assert_eq!((end.exit_code, end.reported), (Some(76), true));
    assert_eq!(end.diagnostic.len(), DIAGNOSTIC);
}
