//! Tests of the content of pages, and of the escaping of texts from outside.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use maud::Markup;
use pool_protocol::id::{InstanceId, TaskId};
use pool_protocol::task::TaskState;
use pool_store::state::EndReason;
use pool_store::{Condition, EndView, EventView, InstanceView, PoolView, TaskView, Wait};
use rstest::rstest;

use super::access::Viewer;
use super::overview::Summary;
use super::pool::PoolPage;
use super::run::RunPage;
use super::{frame, overview, parameter, pool, run};
use crate::hub::pools::Boundary;
use crate::hub::tails::Part;
use crate::hub::wire;

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
    }
}

fn ended(reason: EndReason, diagnostic: &str) -> TaskView {
    TaskView {
        state: TaskState::Failed,
        end: Some(EndView {
            reason,
            diagnostic: diagnostic.to_owned(),
            exit_code: Some(1),
            verdict: Some(HOSTILE.to_owned()),
            final_log_sequence: None,
            report: None,
            ago: Duration::from_secs(5),
            reported: false,
        }),
        ..task()
    }
}

fn agent() -> InstanceView {
    InstanceView {
        instance: InstanceId::new(),
        pool: "eu".parse().unwrap(),
        agent: "eu-1".parse().unwrap(),
        system_id: HOSTILE.to_owned(),
        installation: HOSTILE.to_owned(),
        version: HOSTILE.to_owned(),
        platform: HOSTILE.to_owned(),
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
        ..wire::tests::pool()
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
        boundary: Some(Boundary::Relay),
        now: UNIX_EPOCH + Duration::from_mins(1),
    }
}

fn pool_page(open: Vec<TaskView>) -> PoolPage {
    PoolPage {
        summary: summary(),
        agents: vec![agent()],
        open,
        over: vec![ended(EndReason::Finished, HOSTILE)],
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
    let page = frame::page("a", Some(&pool), &Markup::default()).into_string();
    assert!(page.contains("Log out") && page.contains("<b>eu</b>"));
    assert!(page.contains(&humantime::format_rfc3339_seconds(SystemTime::now()).to_string()[..10]));
}
