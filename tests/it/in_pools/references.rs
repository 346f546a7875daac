//! References to secrets in runs of an agent on target `process`, which has the login of their organization.

use std::fs;

use integration_tests::Running;
use job_contract::env;
use nix::sys::signal::Signal;
use serde_json::json;
use test_peers::http::{Response, Server};
use test_platform::{Flow, NewJob, Status, Variable, Workspace};

use super::agent::ends_with;
use super::fixture::Fixture;

const TOKEN: &str = "hvs.token-of-the-team";
const SECRET: &str = "agent-canary";

#[tokio::test(flavor = "multi_thread")]
async fn a_run_gets_a_secret_by_the_login_of_its_organization() {
    let fixture = Fixture::new().await;
    let hub = fixture.serve();
    let vault = Server::start(|request| {
        let is_ours = request.header("x-vault-token") == Some(TOKEN);
        if is_ours && request.path == "/v1/kv/app" {
            return Response::new(200, json!({ "data": { "k": SECRET } }).to_string());
        }
        Response::new(403, "")
    })
    .unwrap();
    let variable = format!("{}TEAM", env::SECRET_LOGIN_PREFIX);
    let logins = json!([{
        "organizations": [fixture.platform.organization()],
        "variables": { env::CUSTOMER_VAULT_TOKEN: variable },
    }]);
    fs::write(fixture.path("logins.json"), logins.to_string()).unwrap();
    let mut command = fixture.agent(&hub.url());
    command
        .env(env::CUSTOMER_VAULT_ADDRESS, vault.url())
        .env(env::CUSTOMER_VAULT_TOKEN, "hvs.token-of-nobody")
        .env(
            format!("{}{}", env::SECRET_LOGINS, env::FILE_SUFFIX),
            fixture.path("logins.json"),
        )
        .env(variable, TOKEN);
    let agent = Running::start(&mut command);
    let workspace =
        Workspace::new(&fixture.repository.url()).with(Variable::env("A", "${vault:kv/app.k}"));
    let workspace = fixture.platform.workspace(workspace);
    let script = format!(
        "printf %s \"$A\" > {}; echo \"A=$A\"; env",
        fixture.path("seen").display()
    );
    let flow = Flow::new("customScripts", 100).with_script(&script);
    let job = NewJob::new(&workspace, vec![flow]);
    let job = fixture.platform.start_job(job);
    let job = fixture.platform.until_job(job, Status::Completed).await;
    assert_eq!(fs::read_to_string(fixture.path("seen")).unwrap(), SECRET);
    let output = fixture.output(job.id);
    assert!(output.contains("A=***"), "{output}");
    agent.signal(Signal::SIGTERM);
    let log = ends_with(agent, 0);
    for hidden in [SECRET, TOKEN, "CUSTOMER_VAULT", env::SECRET_LOGIN_PREFIX] {
        assert!(!output.contains(hidden), "{hidden}\n{output}");
        assert!(!log.contains(hidden), "{hidden}\n{log}");
    }
}
