//! Tests of a hub's status page in a real browser.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use pool_protocol::path::LeaseCall;
use pool_protocol::task::LeasedTask;
use pool_protocol::token::{OperatorToken, PoolToken};
use reqwest::{Method, StatusCode};
use serde_json::json;
use test_peers::browser::{Browser, Screen};
use test_peers::http::{Server, pass_on};
use test_platform::{Flow, NewJob, Status, Variable, Workspace};

use super::client::{Client, executor_of};
use super::fixture::{Fixture, Hub};
use super::runs::run_plan;

const DESKTOP: Screen = Screen {
    width: 1280,
    height: 900,
    dark: false,
};
const DARK: Screen = Screen {
    dark: true,
    ..DESKTOP
};
const PHONE: Screen = Screen {
    width: 390,
    height: 844,
    dark: false,
};
/// A secret in the job data of all runs.
const SECRET: &str = "hunter2";
/// A name that tries to inject markup.
const HOSTILE: &str = "</pre><script>document.title='taken'</script>";

/// Writes the file of the pools with tokens of `eu` and of operators, and a trusted proxy on this machine.
fn write_pools(fixture: &Fixture, eu: &[&PoolToken], operator: &OperatorToken) {
    let organization = fixture.platform.organization();
    let tokens: Vec<String> = eu
        .iter()
        .zip(0..)
        .map(|(token, number)| format!("{{id: t{number}, sha256: {}}}", token.digest()))
        .collect();
    let tokens = tokens.join(", ");
    fixture.replace_pools(&format!(
        "pools:\n  eu: {{organizations: [{organization}], tokens: [{tokens}]}}\n  \
         us: {{organizations: [another]}}\n\
         operators:\n  tokens: [{{id: o, sha256: {}}}]\n  \
         proxy: {{header: X-Forwarded-User, addresses: [127.0.0.1]}}\n",
        operator.digest()
    ));
}

async fn send_line(executor: &Client, lease: &LeasedTask, number: u32, output: &str) {
    let task = &lease.task;
    let line = json!({"jobId": task.job_id.parse::<u32>().unwrap(), "stepId": task.step_id,
        "lineNumber": number, "output": output});
    let lines = json!({"data": [line]});
    let answer = executor.relay(lease, Method::POST, "/logs", Some(lines));
    answer.await.ok();
}

/// Returns the path of a screenshot. Screenshots are kept for people.
fn screenshot_path(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("status-page");
    fs::create_dir_all(&folder).unwrap();
    folder.join(format!("{name}.png"))
}

/// Takes screenshots on each kind of screen. No page may be wider than the screen.
fn check_screens(browser: &mut Browser, name: &str) {
    for (screen, kind) in [(PHONE, "phone"), (DARK, "dark"), (DESKTOP, "desktop")] {
        browser.show_on(screen).unwrap();
        let wide = "document.documentElement.scrollWidth";
        let width = browser.value(wide).unwrap();
        assert!(
            width.as_u64().unwrap() <= screen.width.into(),
            "{name} on {kind}: {width}"
        );
        browser
            .screenshot(&screenshot_path(&format!("{name}-{kind}")))
            .unwrap();
    }
}

/// Dispatches a plan whose workspace has the secret.
async fn dispatch_plan(fixture: &Fixture) {
    let workspace = Workspace::new("https://git.example.test/a.git");
    let workspace = workspace.with(Variable::env("PASSWORD", SECRET));
    let workspace = fixture.platform.workspace(workspace);
    let plan = NewJob::new(&workspace, Flow::only("terraformPlan"));
    let job = fixture.platform.start_job(plan);
    fixture.platform.until_job(job, Status::Queue).await;
}

/// Creates runs in each state: a completed, a failed, a running and two waiting ones.
async fn create_runs(fixture: &Fixture, hub: &Hub) -> [LeasedTask; 2] {
    let agent = fixture.client(hub);
    let instance = agent.register().await;
    agent.try_register("eu-2", "two").await.ok();
    dispatch_plan(fixture).await;
    let done = agent.request(instance).await;
    run_plan(fixture, &executor_of(&agent, &done), &done).await;

    dispatch_plan(fixture).await;
    let failed = agent.request(instance).await;
    let payload = failed.task.payload.to_string();
    assert!(payload.contains(SECRET), "{payload}");
    let started = json!({"executor": format!("Job {HOSTILE}")});
    agent.lease(&failed, LeaseCall::Started, started).await.ok();
    let executor = executor_of(&agent, &failed);
    executor.accept(&failed, "failed").await.ok();
    send_line(&executor, &failed, 1, HOSTILE).await;
    send_line(&executor, &failed, 2, "Error: the memory is used up").await;
    let diagnostic = format!(
        "The pod was killed because it used too much memory.\n  pod: OOMKilled, exit code 137 {HOSTILE}\n\
         What to do: raise the memory limit of the run or lower its parallelism"
    );
    let end = json!({"exitCode": 137, "verdict": "oom_killed", "diagnostic": diagnostic, "reported": false});
    agent.lease(&failed, LeaseCall::Fail, end).await.ok();

    dispatch_plan(fixture).await;
    let running = agent.request(instance).await;
    let started = json!({"executor": "Job mayfly-run-7"});
    agent
        .lease(&running, LeaseCall::Started, started)
        .await
        .ok();
    let executor = executor_of(&agent, &running);
    executor.accept(&running, "running").await.ok();
    send_line(&executor, &running, 1, "Initializing the backend...").await;
    dispatch_plan(fixture).await;
    dispatch_plan(fixture).await;
    [running, failed]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_browser_shows_pools_and_runs_with_and_without_scripts() {
    let mut browser = or_skip!(test_peers::skips::needed(Browser::start()));
    let fixture = Fixture::new().await;
    let operator = OperatorToken::random();
    write_pools(&fixture, &[&fixture.token], &operator);
    let hub = fixture.serve();
    let [running, failed] = create_runs(&fixture, &hub).await;
    let base = hub.url();
    let page = |path: &str| format!("{base}{path}");
    let run = |lease: &LeasedTask| format!("{base}/ui/runs/{}", lease.task_id);

    // Without scripts: a user logs in with a token at the requested page, and sees the token's pool.
    browser.allow_scripts(false).unwrap();
    browser.open(&run(&failed)).unwrap();
    let login = browser.until("Log in</h1>").unwrap();
    assert!(!login.contains("OOMKilled"), "{login}");
    browser.enter("mfp_eu_wrong_123456").unwrap();
    browser.until("The token is unknown").unwrap();
    browser.enter(fixture.token.reveal()).unwrap();
    let html = browser.until("used too much memory").unwrap();
    for expected in [
        "raise the memory limit of the run",
        "oom_killed",
        "Error: the memory is used up",
        "&lt;/pre&gt;&lt;script&gt;",
        "Executor starts",
    ] {
        assert!(html.contains(expected), "{expected} not in {html}");
    }
    browser.open(&page("/ui")).unwrap();
    let html = browser.until("Token of pool").unwrap();
    assert!(html.contains("/ui/pools/eu") && !html.contains("/ui/pools/us"));
    browser.open(&page("/ui/pools/us")).unwrap();
    browser.until("Not found</h1>").unwrap();

    // With scripts, the page is updated during the run.
    browser.allow_scripts(true).unwrap();
    browser.open(&page("/ui")).unwrap();
    check_screens(&mut browser, "overview");
    browser.open(&page("/ui/pools/eu")).unwrap();
    let html = browser.until("Queue</h2>").unwrap();
    for expected in ["eu-2", "Completed", "Failed", "Running", "Waits because"] {
        assert!(html.contains(expected), "{expected} not in {html}");
    }
    check_screens(&mut browser, "pool");
    browser.open(&run(&failed)).unwrap();
    check_screens(&mut browser, "failed");
    assert_ne!(browser.value("document.title").unwrap(), "taken");
    browser.open(&run(&running)).unwrap();
    browser.until("Initializing the backend").unwrap();
    check_screens(&mut browser, "running");
    let agent = fixture.client(&hub);
    let executor = executor_of(&agent, &running);
    send_line(&executor, &running, 2, "Plan: 1 to add").await;
    browser.until("Plan: 1 to add").unwrap();
    let end = json!({"exitCode": 1, "diagnostic": "the provider answers 403", "reported": true});
    executor.lease(&running, LeaseCall::Fail, end).await.ok();
    browser.until("the provider answers 403").unwrap();

    // The browser sent no request to other sites, and no page violated its policy.
    let elsewhere = |url: &&String| !url.starts_with(&base) && *url != "about:blank";
    let elsewhere: Vec<_> = browser.requests().iter().filter(elsewhere).collect();
    assert!(elsewhere.is_empty(), "{elsewhere:?}");
    let is_expected = |problem: &&String| problem.contains("401") || problem.contains("404");
    let problems = browser.problems().iter();
    let problems: Vec<_> = problems.filter(|problem| !is_expected(problem)).collect();
    assert!(problems.is_empty(), "{problems:#?}");

    // A session ends with its token.
    write_pools(&fixture, &[], &operator);
    browser.until("Log in</h1>").unwrap();
    browser.open(&page("/ui")).unwrap();
    browser.until("Log in</h1>").unwrap();
    check_screens(&mut browser, "login");
    browser.enter(operator.reveal()).unwrap();
    let html = browser.until("Free slots").unwrap();
    assert!(html.contains("/ui/pools/eu") && html.contains("/ui/pools/us"));
    let log_out = "document.querySelector('form[action=\"/ui/logout\"] button').click()";
    browser.value(log_out).unwrap();
    browser.until("Log in</h1>").unwrap();
    browser.open(&page("/ui")).unwrap();
    browser.until("Log in</h1>").unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_trusted_proxy_names_operators() {
    let mut browser = or_skip!(test_peers::skips::needed(Browser::start()));
    let fixture = Fixture::new().await;
    write_pools(&fixture, &[&fixture.token], &OperatorToken::random());
    let hub = fixture.serve();
    let address: SocketAddr = hub.url().trim_start_matches("http://").parse().unwrap();
    let proxy = Server::start(move |request| {
        let mut request = request.clone();
        let user = ("x-forwarded-user".to_owned(), "ada".to_owned());
        request.headers.push(user);
        pass_on(&request, address, "hub.example.test").unwrap()
    })
    .unwrap();
    browser.open(&format!("{}/ui", proxy.url())).unwrap();
    let html = browser.until("Operator").unwrap();
    for expected in ["<b>ada</b>", "/ui/pools/eu", "/ui/pools/us"] {
        assert!(html.contains(expected), "{expected} not in {html}");
    }
    assert!(!html.contains("Log out"), "{html}");
    assert!(browser.problems().is_empty(), "{:?}", browser.problems());
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_need_a_token_that_may_see_them() {
    let fixture = Fixture::new().await;
    let operator = OperatorToken::random();
    write_pools(&fixture, &[&fixture.token], &operator);
    let hub = fixture.serve();
    fixture.dispatched_plan().await;
    let agent = fixture.client(&hub);
    let instance = agent.register().await;
    let lease = agent.request(instance).await;
    let run = format!("/ui/runs/{}", lease.task_id);
    let log = format!("{run}/log");
    let status = async |path: &str, token: &str| {
        let request = agent.plain(Method::GET, path).bearer_auth(token);
        request.send().await.unwrap().status()
    };
    let elsewhere = PoolToken::new("us".parse().unwrap());
    for path in ["/ui", "/ui/pools/eu", &run, &log] {
        let response = agent.plain(Method::GET, path).send().await.unwrap();
        assert_eq!(response.status(), StatusCode::UNAUTHORIZED, "{path}");
        let policy = &response.headers()["content-security-policy"];
        assert!(!policy.to_str().unwrap().contains("unsafe"), "{policy:?}");
        assert_eq!(response.headers()["cache-control"], "no-store");
        assert_eq!(status(path, fixture.token.reveal()).await, StatusCode::OK);
        assert_eq!(status(path, operator.reveal()).await, StatusCode::OK);
        for token in [elsewhere.reveal(), &lease.job_token] {
            assert_eq!(status(path, token).await, StatusCode::UNAUTHORIZED);
        }
    }
    // An operator token takes no runs. For a pool token, runs of other pools do not exist.
    let taken = agent.with_token(operator.reveal());
    let taken = taken.try_request(instance, 0, &[]).await;
    assert_eq!(taken.status, StatusCode::UNAUTHORIZED);
    let us = PoolToken::new("us".parse().unwrap());
    fixture.replace_pools(&format!(
        "pools: {{us: {{organizations: [a], tokens: [{{id: u, sha256: {}}}]}}}}",
        us.digest()
    ));
    for path in ["/ui/pools/eu", &run, &log] {
        assert_eq!(status(path, us.reveal()).await, StatusCode::NOT_FOUND);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_begins_at_this_site_and_ends_with_its_logout() {
    let fixture = Fixture::new().await;
    write_pools(&fixture, &[&fixture.token], &OperatorToken::random());
    let hub = fixture.serve();
    let client = reqwest::Client::builder()
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .build()
        .unwrap();
    let login = async |name: &str, value: &str| {
        let request = client.post(format!("{}/ui/login", hub.url()));
        let form = format!("token={}", fixture.token.reveal());
        let request = request.header(name, value).body(form);
        let response = request.send().await.unwrap();
        let cookie = response.headers().get("set-cookie");
        let cookie = cookie.map(|cookie| cookie.to_str().unwrap().to_owned());
        let session = cookie.and_then(|cookie| Some(cookie.split_once(';')?.0.to_owned()));
        assert_eq!(
            response.status() == StatusCode::SEE_OTHER,
            session.is_some(),
            "{name}: {value}"
        );
        session
    };
    for (name, value) in [
        ("sec-fetch-site", "cross-site"),
        ("origin", "http://evil.example"),
        ("origin", "null"),
    ] {
        assert_eq!(login(name, value).await, None, "{name}: {value}");
    }
    let first = login("sec-fetch-site", "same-origin").await.unwrap();
    let second = login("origin", &hub.url()).await.unwrap();
    let seen = async |session: &str| {
        let request = client.get(format!("{}/ui", hub.url()));
        let request = request.header("cookie", session);
        request.send().await.unwrap().status()
    };
    let log_out = async |session: &str, origin: &str| {
        let request = client.post(format!("{}/ui/logout", hub.url()));
        let request = request.header("cookie", session).header("origin", origin);
        request.send().await.unwrap();
    };
    log_out(&first, "http://evil.example").await;
    assert_eq!(seen(&first).await, StatusCode::OK);
    log_out(&first, &hub.url()).await;
    assert_eq!(seen(&first).await, StatusCode::UNAUTHORIZED);
    assert_eq!(seen(&second).await, StatusCode::OK);
}

#[tokio::test(flavor = "multi_thread")]
async fn scripts_get_the_same_as_json_with_the_same_tokens() {
    let fixture = Fixture::new().await;
    let operator = OperatorToken::random();
    write_pools(&fixture, &[&fixture.token], &operator);
    let hub = fixture.serve();
    let [running, failed] = create_runs(&fixture, &hub).await;
    let client = fixture.client(&hub);
    let get = async |path: &str, token: &str| {
        let request = client.plain(Method::GET, path).bearer_auth(token);
        let response = request.send().await.unwrap();
        let status = response.status();
        let text = response.text().await.unwrap();
        assert!(
            !text.contains(SECRET) && !text.contains("payload"),
            "{text}"
        );
        (
            status,
            serde_json::from_str::<serde_json::Value>(&text).unwrap_or_default(),
        )
    };
    let (_, all) = get("/pools", operator.reveal()).await;
    let names: Vec<_> = all["pools"].as_array().unwrap().iter().collect();
    assert_eq!(
        (&names[0]["pool"], &names[1]["pool"]),
        (&json!("eu"), &json!("us"))
    );
    assert_eq!(
        (&names[0]["waiting"], &names[0]["active"]),
        (&json!(2), &json!(1))
    );
    let own = fixture.token.reveal();
    let (_, seen) = get("/pools", own).await;
    assert_eq!(seen["pools"].as_array().unwrap().len(), 1);
    let (_, agents) = get("/pools/eu/agents", own).await;
    assert_eq!(agents["agents"].as_array().unwrap().len(), 2);
    let (_, open) = get("/pools/eu/runs", own).await;
    let states: Vec<_> = open["runs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|run| &run["state"])
        .collect();
    assert_eq!(states, ["RUNNING", "AVAILABLE", "AVAILABLE"]);
    let (_, run) = get(&format!("/pools/eu/runs/{}", failed.task_id), own).await;
    assert_eq!(run["end"]["verdict"], "oom_killed");
    assert!(run["events"].as_array().unwrap().len() >= 5, "{run}");
    let log = get(&format!("/pools/eu/runs/{}/log", running.task_id), own).await;
    assert_eq!(log.0, StatusCode::OK);
    for page in [
        "/ui/pools/eu",
        &format!("/ui/runs/{}", failed.task_id),
        &format!("/ui/runs/{}", running.task_id),
    ] {
        assert_eq!(get(page, own).await.0, StatusCode::OK, "{page}");
    }
    // Who sees what is as on the page.
    for (path, token, expected) in [
        ("/pools", "", StatusCode::UNAUTHORIZED),
        (
            "/pools/eu/runs",
            &*running.job_token,
            StatusCode::UNAUTHORIZED,
        ),
        ("/pools/us/runs", own, StatusCode::NOT_FOUND),
        ("/pools/us/agents", operator.reveal(), StatusCode::OK),
        ("/pools/eu/runs?state=ended", own, StatusCode::BAD_REQUEST),
    ] {
        assert_eq!(get(path, token).await.0, expected, "{path}");
    }
    let elsewhere = format!("/pools/us/runs/{}", failed.task_id);
    let unknown = get(&elsewhere, operator.reveal()).await;
    assert_eq!(unknown.0, StatusCode::NOT_FOUND);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_authentication_this_machine_alone_needs_no_token() {
    let fixture = Fixture::new()
        .await
        .with("MAYFLY_ALLOW_UNAUTHENTICATED", "true");
    let hub = fixture.serve();
    let client = fixture.client(&hub);
    let status = async |host: &str| {
        let request = client.plain(Method::GET, "/ui").header("host", host);
        request.send().await.unwrap().status()
    };
    assert_eq!(status("localhost").await, StatusCode::OK);
    // A name of another site may resolve to this machine.
    assert_eq!(status("evil.example").await, StatusCode::UNAUTHORIZED);
}
