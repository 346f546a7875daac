//! Tests of the content of pages, of the escaping of texts from outside, and of what viewers may take from the hub.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::ConnectInfo;
use axum::http::{Request, StatusCode};
use axum::response::Response;
use data_dir::DataDirArgs;
use futures_util::{FutureExt as _, stream};
use http_service::{FRESH, MetricsRegistry, Shutdown};
use maud::Markup;
use pool_protocol::id::{InstanceId, TaskId};
use pool_protocol::task::TaskState;
use pool_store::state::{EndReason, TaskEnd};
use pool_store::{
    Condition, Content, EventView, InstanceView, Payload, PoolView, Submission, TaskView, Wait,
};
use rstest::rstest;
use runtime::setting::from_variables;
use serde_json::Value;
use tempfile::TempDir;
use test_peers::clock::hold_clock;
use tower::ServiceExt as _;

use super::overview::Summary;
use super::pool::PoolPage;
use super::run::RunPage;
use super::viewer::Viewer;
use super::{MAX_ANSWERS_OF_A_VIEWER, MAX_LOGINS, frame, overview, parameter, pool, router, run};
use crate::Hub;
use crate::pools::Boundary;
use crate::sample_views;
use crate::settings::HubArgs;
use crate::tails::Part;

/// A text that would be markup without escaping.
const HOSTILE: &str = "<img src=x onerror=alert(1)>\"'&";
const ESCAPED: &str = "&lt;img src=x onerror=alert(1)&gt;&quot;'&amp;";

fn task() -> TaskView {
    TaskView {
        task: TaskId::new(),
        pool: "eu".parse().unwrap(),
        organization: HOSTILE.to_owned(),
        workspace: HOSTILE.to_owned(),
        job: format!("12{HOSTILE}"),
        step: HOSTILE.to_owned(),
        kind: HOSTILE.to_owned(),
        traceparent: None,
        state: TaskState::Available,
        wait: None,
        age: Duration::from_secs(125),
        attempts: 1,
        reasons: vec![HOSTILE.to_owned()],
        lease: None,
        fencing_token: 1,
        instance: None,
        agent: Some("eu-1".parse().unwrap()),
        credential: None,
        executor: Some(HOSTILE.to_owned()),
        holder: Some(HOSTILE.to_owned()),
        phase: Some(HOSTILE.to_owned()),
        silent: None,
        cancel_requested: false,
        end: None,
        ended: None,
    }
}

fn ended(reason: EndReason, diagnostic: &str) -> TaskView {
    TaskView {
        state: TaskState::Failed,
        end: Some(TaskEnd {
            exit_code: Some(1),
            verdict: Some(HOSTILE.to_owned()),
            ..TaskEnd::new(reason, diagnostic.to_owned(), 0)
        }),
        ended: Some(Duration::from_secs(5)),
        ..task()
    }
}

fn agent() -> InstanceView {
    InstanceView {
        instance: InstanceId::new(),
        pool: "eu".parse().unwrap(),
        agent: "eu-1".parse().unwrap(),
        version: HOSTILE.to_owned(),
        operating_system: HOSTILE.to_owned(),
        architecture: HOSTILE.to_owned(),
        target: HOSTILE.to_owned(),
        tags: vec![HOSTILE.to_owned()],
        condition: Condition::Degraded,
        capacity: 4,
        free: 3,
        tasks: 1,
        failures: 3,
        last_seen: Duration::from_secs(2),
    }
}

fn counts() -> PoolView {
    PoolView {
        offline: 1,
        unconfirmed: 1,
        available: 2,
        leased: 1,
        running: 2,
        orphaned: 1,
        unreported: 1,
        oldest: Some(Duration::from_secs(125)),
        ..sample_views::pool()
    }
}

fn summary() -> Summary {
    Summary {
        pool: "eu".parse().unwrap(),
        counts: Some(counts()),
        is_in_file: true,
    }
}

fn run_page(task: TaskView) -> RunPage {
    RunPage {
        task,
        position: None,
        events: vec![EventView {
            at: UNIX_EPOCH,
            from: None,
            to: "submitted",
            actor: HOSTILE.to_owned(),
            note: HOSTILE.to_owned(),
        }],
        log: Some(Part {
            text: format!("{HOSTILE}\n"),
            start: 0,
            end: 34,
        }),
        kept: None,
        is_listed: false,
        boundary: Some(Boundary::Relay),
        now: UNIX_EPOCH + Duration::from_mins(1),
    }
}

#[test]
fn a_state_that_is_kept_is_named_with_what_to_do() {
    let page = RunPage {
        kept: Some("tfstate/org/ws/state/errored-1-2.raw.json".to_owned()),
        is_listed: true,
        ..run_page(TaskView {
            kind: "terraformApply".to_owned(),
            ..ended(EndReason::Lost, "")
        })
    };
    let page = run::render(&page).into_string();
    for words in [
        "tfstate/org/ws/state/errored-1-2.raw.json",
        "`api-launcher state store ",
    ] {
        assert!(page.contains(words), "{words}: {page}");
    }
    let without = run::render(&run_page(ended(EndReason::Lost, ""))).into_string();
    assert!(!without.contains("state store"), "{without}");
}

fn pool_page(open: Vec<TaskView>) -> PoolPage {
    PoolPage {
        summary: summary(),
        agents: vec![agent()],
        open,
        over: vec![ended(EndReason::Finished, HOSTILE)],
        new_agents: None,
    }
}

/// Returns a whole page with this content.
fn in_page(content: &Markup) -> String {
    let viewer = Viewer::Named(HOSTILE.to_owned());
    frame::page(HOSTILE, Some(&viewer), content).into_string()
}

#[test]
fn every_text_from_outside_is_escaped() {
    let waiting = TaskView {
        wait: Some(Wait::NoInstance),
        ..task()
    };
    let running = TaskView {
        state: TaskState::Running,
        ..task()
    };
    let over = ended(
        EndReason::Finished,
        &format!("{HOSTILE}\n{HOSTILE}\nWhat to do: {HOSTILE}"),
    );
    for page in [
        in_page(&pool::render(&pool_page(vec![
            waiting.clone(),
            running.clone(),
        ]))),
        in_page(&run::render(&run_page(waiting))),
        in_page(&run::render(&run_page(running))),
        in_page(&run::render(&run_page(over))),
        frame::message(HOSTILE, HOSTILE).into_string(),
        frame::login(HOSTILE, Some(HOSTILE)).into_string(),
    ] {
        assert!(!page.contains("<img"), "{page}");
        assert!(page.contains(ESCAPED), "{page}");
        // The policy forbids inline content and other sites.
        for forbidden in [
            " style=",
            "<style",
            " onclick",
            "http://",
            "https://",
            "javascript:",
        ] {
            assert!(!page.contains(forbidden), "{forbidden} in {page}");
        }
        assert_eq!(page.matches("<script").count(), 1, "{page}");
        assert_eq!(page.matches("<h1").count(), 1, "{page}");
    }
}

#[test]
fn the_overview_shows_counts_and_problems() {
    let gone = Summary {
        pool: "us".parse().unwrap(),
        counts: None,
        is_in_file: false,
    };
    let page = overview::render(&[summary(), gone]).into_string();
    for expected in [
        "<dt>Runs waiting</dt><dd>3</dd>",
        "<dt>Runs active</dt><dd>4</dd>",
        "<dt>Agents online</dt><dd>0</dd>",
        r#"<a href="/ui/pools/eu">eu</a>"#,
        "2 min 5 s",
        "Runs wait, and no agent is online",
        "1 run silent",
        "1 outcome to report to the platform",
        "Not in the file of the pools",
        " + 1 offline",
    ] {
        assert!(page.contains(expected), "{expected} not in {page}");
    }
    let none = overview::render(&[]).into_string();
    assert!(none.contains("The file of the pools has no pools."));
}

#[rstest]
#[case(Wait::NoInstance, "No agent is online.", Some("Start an agent"))]
#[case(
    Wait::NoCapacity,
    "No agent has a free slot.",
    Some("give an agent more slots")
)]
#[case(
    Wait::Pause(Duration::from_secs(20)),
    "Pause of 20 s after attempt 1.",
    None
)]
#[case(Wait::Unconfirmed, "The platform has not confirmed", None)]
#[case(Wait::Turn, "takes it soon", None)]
fn a_waiting_run_shows_its_reason_and_advice(
    #[case] wait: Wait,
    #[case] reason: &str,
    #[case] advice: Option<&str>,
) {
    let mut page = run_page(TaskView {
        wait: Some(wait),
        ..task()
    });
    page.position = Some(2);
    let page = run::render(&page).into_string();
    assert!(page.contains(reason), "{page}");
    assert!(page.contains("2 runs are in front of it."), "{page}");
    assert_eq!(page.contains("What to do:"), advice.is_some(), "{page}");
    assert!(advice.is_none_or(|advice| page.contains(advice)), "{page}");
}

#[test]
fn a_run_that_waits_for_its_workspace_names_the_active_run() {
    let active = task().task;
    let page = run_page(TaskView {
        wait: Some(Wait::Workspace(active)),
        ..task()
    });
    let page = run::render(&page).into_string();
    assert!(page.contains("Another step of its workspace is in progress."));
    assert!(
        page.contains(&format!("href=\"/ui/runs/{active}\"")),
        "{page}"
    );
}

#[test]
fn the_queue_of_a_pool_shows_only_waiting_runs() {
    let waiting = TaskView {
        wait: Some(Wait::NoCapacity),
        ..task()
    };
    let running = TaskView {
        state: TaskState::Running,
        ..task()
    };
    let (one, other) = (waiting.task.to_string(), running.task.to_string());
    let page = pool::render(&pool_page(vec![waiting, running])).into_string();
    let (active, rest) = page.split_once("<h2 id=\"queue-title\">").unwrap();
    let (queue, _) = rest.split_once("<h2 id=\"agents-title\">").unwrap();
    assert!(queue.contains(&one) && !queue.contains(&other), "{queue}");
    assert!(
        active.contains(&other) && !active.contains(&one),
        "{active}"
    );
    assert!(queue.contains("No agent has a free slot"), "{queue}");
    assert!(
        !page.contains("More"),
        "a list that is shown in_page has no more"
    );
}

#[test]
fn an_operator_sees_how_an_agent_is_added() {
    let mut page = pool_page(Vec::new());
    assert!(!pool::render(&page).into_string().contains("Add an agent"));
    page.new_agents = Some(pool::NewAgents {
        hub: "https://hub.example.test".to_owned(),
        platform: Some("https://terrakube.example.test/".to_owned()),
    });
    let page = pool::render(&page).into_string();
    for expected in [
        "pool token new --pool eu --values --service-url https://hub.example.test \
         --public-api-url https://terrakube.example.test/ &gt; values.yaml",
        "<code>pools.eu.tokens</code>",
        "helm install eu-agent helm/mayfly",
    ] {
        assert!(page.contains(expected), "no {expected} in {page}");
    }
}

#[test]
fn a_full_list_has_a_link_to_the_next_page() {
    let tasks: Vec<TaskView> = (0..super::ROWS).map(|_| task()).collect();
    let last = tasks.last().unwrap().task;
    let page = pool::render(&pool_page(tasks)).into_string();
    let expected = format!("href=\"/ui/pools/eu?after={last}\"");
    assert!(page.contains(&expected), "{expected}");
}

#[rstest]
#[case(
    EndReason::Finished,
    "The pod was killed.\n  pod: OOMKilled\nWhat to do: raise the limit",
    &["The pod was killed.", "pod: OOMKilled", "</b>raise the limit"]
)]
#[case(EndReason::Finished, "", &["The executor ended with exit code 1."])]
#[case(EndReason::Lost, "no heartbeat for 600 s", &["no heartbeat for 600 s", "look for a lock of the state"])]
#[case(EndReason::Poison, "", &["Every attempt to start the run failed.", "Read the reasons"])]
fn a_run_that_is_over_shows_its_end_and_advice(
    #[case] reason: EndReason,
    #[case] diagnostic: &str,
    #[case] expected: &[&str],
) {
    let page = run::render(&run_page(ended(reason, diagnostic))).into_string();
    for expected in expected {
        assert!(page.contains(expected), "{expected} not in {page}");
    }
    assert!(page.contains("The platform does not have this outcome yet."));
}

#[rstest]
#[case(
    Some(Boundary::Direct),
    false,
    "send their log to the platform themselves"
)]
#[case(Some(Boundary::Relay), false, "No line yet.")]
#[case(Some(Boundary::Relay), true, "This hub has no line of this run.")]
#[case(None, true, "This hub has no line of this run.")]
fn a_missing_log_is_explained(
    #[case] boundary: Option<Boundary>,
    #[case] over: bool,
    #[case] expected: &str,
) {
    let task = if over {
        ended(EndReason::Finished, "")
    } else {
        task()
    };
    let page = RunPage {
        log: None,
        boundary,
        ..run_page(task)
    };
    let page = run::render(&page).into_string();
    assert!(page.contains(expected), "{page}");
}

#[rstest]
#[case("/ui/x?from=12", Some(12))]
#[case("/ui/x?a=1&from=12", Some(12))]
#[case("/ui/x?from=-1", None)]
#[case("/ui/x?from=", None)]
#[case("/ui/x", None)]
fn parameters_that_cannot_be_read_count_as_absent(
    #[case] uri: &str,
    #[case] expected: Option<u64>,
) {
    assert_eq!(parameter(&uri.parse().unwrap(), "from"), expected);
}

#[test]
fn only_a_session_has_a_logout() {
    let open = frame::page("a", Some(&Viewer::Open), &Markup::default()).into_string();
    assert!(!open.contains("Log out"));
    let pool = Viewer::Pool("eu".parse().unwrap());
    let today =
        || humantime::format_rfc3339_seconds(SystemTime::now()).to_string()[..10].to_owned();
    let before = today();
    let page = frame::page("a", Some(&pool), &Markup::default()).into_string();
    assert!(page.contains("Log out") && page.contains("<b>eu</b>"));
    // It may be midnight.
    assert!(page.contains(&before) || page.contains(&today()));
}

/// A hub with pool `eu`, whose page is open to this machine.
async fn open_hub() -> (TempDir, Arc<Hub>, Router) {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let folder = tempfile::tempdir().unwrap();
    let pools = folder.path().join("pools.yaml");
    fs::write(&pools, "pools: {eu: {organizations: [org]}}").unwrap();
    let args = HubArgs {
        pools: Some(pools),
        ..HubArgs::default()
    };
    let data = DataDirArgs {
        data_dir: Some(folder.path().join("data")),
    };
    let settings = args.resolve(&mut Vec::new(), &data, &from_variables(&[]), true, None);
    let (metrics, shutdown) = (MetricsRegistry::default(), Shutdown::default());
    let hub = Hub::open(settings.unwrap(), &metrics, shutdown).await;
    let hub = Arc::new(hub.unwrap());
    let router = router(Arc::clone(&hub), true);
    (folder, hub, router)
}

async fn get(router: &Router, path: &str) -> Response {
    let peer = SocketAddr::from(([127, 0, 0, 1], 1));
    let request = Request::get(path).header("host", "localhost");
    let request = request.extension(ConnectInfo(peer)).body(Body::empty());
    let response = router.clone().oneshot(request.unwrap()).await;
    response.unwrap()
}

/// How many runs of `eu` wait, as the page says.
async fn waiting(router: &Router) -> Value {
    let response = get(router, "/pools").await;
    let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
    let mut pools: Value = serde_json::from_slice(&body).unwrap();
    pools["pools"][0]["waiting"].take()
}

#[tokio::test]
async fn viewers_read_the_store_once_a_second() {
    let (_folder, hub, router) = open_hub().await;
    tokio::time::pause();
    let held = hold_clock();
    assert_eq!(waiting(&router).await, 0);
    let submission = Submission {
        task: TaskId::new(),
        pool: "eu".parse().unwrap(),
        organization: "org".to_owned(),
        workspace: "ws".to_owned(),
        job: "412".to_owned(),
        step: "plan-id".to_owned(),
        kind: "terraformPlan".to_owned(),
        traceparent: None,
        content: Content::Payload(Payload(b"{}".to_vec())),
    };
    hub.store.submit(submission).await.unwrap();
    assert_eq!(waiting(&router).await, 0);
    tokio::time::advance(FRESH).await;
    assert_eq!(waiting(&router).await, 1);
    drop(held);
}

#[tokio::test]
async fn a_viewer_who_reads_no_answer_gets_no_more_of_them() {
    let (_folder, _hub, router) = open_hub().await;
    let mut unread = Vec::new();
    for _ in 0..MAX_ANSWERS_OF_A_VIEWER {
        unread.push(get(&router, "/ui").await);
    }
    assert!(unread.iter().all(|one| one.status() == StatusCode::OK));
    for path in ["/ui", "/pools"] {
        let refused = get(&router, path).await;
        assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS, "{path}");
    }
    let read = to_bytes(unread.remove(0).into_body(), usize::MAX).await;
    assert!(read.unwrap().ends_with(b"</html>"));
    // The task that has passed it on ends now.
    while get(&router, "/pools").await.status() != StatusCode::OK {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_new_login_form_ends_the_oldest_slow_one() {
    let (_folder, _hub, router) = open_hub().await;
    let login = |body: Body| {
        let request = Request::post("/ui/login").body(body).unwrap();
        Box::pin(router.clone().oneshot(request))
    };
    let slow = || login(Body::from_stream(stream::pending::<io::Result<Bytes>>()));
    let mut slow: Vec<_> = (0..MAX_LOGINS).map(|_| slow()).collect();
    assert!(slow.iter_mut().all(|form| form.now_or_never().is_none()));
    let new = login(Body::from("token=unknown")).await.unwrap();
    assert_eq!(new.status(), StatusCode::UNAUTHORIZED);
    let ended = slow.remove(0).now_or_never().expect("the oldest has ended");
    assert_eq!(ended.unwrap().status(), StatusCode::UNAUTHORIZED);
    assert!(slow[0].as_mut().now_or_never().is_none());
}
