//! Sources and modules by git: over SSH with the key of a run, over HTTP with its token, and what the operator does not allow.

use std::fs;

use integration_tests::{Repository, job};
use job_contract::{Exit, JobData, Tool, env};
use test_peers::git_http::{self, GitHttpOptions};
use test_peers::http::Server;
use test_peers::repository::git;
use test_peers::sshd::Sshd;

use crate::machine;

with_both_tools! {
    private_modules_on_the_server_of_the_source_are_fetched_with_its_token,
    a_module_that_is_not_allowed_ends_init,
    a_login_of_the_operator_fetches_source_and_modules,
}

const TOKEN: &str = "t0k3n-of-the-workspace";

/// A source with a module, which has a module: three private repositories on one server.
struct Nested {
    server: Server,
    source: Repository,
    _folder: tempfile::TempDir,
}

impl Nested {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let repositories = folder.path().to_path_buf();
        let options = GitHttpOptions {
            credentials: Some(format!("x-access-token:{TOKEN}")),
            ..GitHttpOptions::default()
        };
        let server = git_http::serve(&repositories, options).unwrap();
        let call = |name: &str| {
            format!(
                "module \"m\" {{\n  source = \"git::{}/{name}.git\"\n}}\n",
                server.url()
            )
        };
        let source = Repository::module(&call("module"));
        for (name, repository) in [
            ("source", &source),
            ("module", &Repository::module(&call("inner"))),
            ("inner", &Repository::module("locals { inner = true }\n")),
        ] {
            let from = repository.path().display().to_string();
            let to = format!("{name}.git");
            git(&repositories, &["clone", "--quiet", "--bare", &from, &to]);
        }
        Self {
            server,
            source,
            _folder: folder,
        }
    }

    fn plan(&self, tool: Tool) -> JobData {
        JobData {
            source: Some(format!("{}/source.git", self.server.url())),
            vcs_type: Some("GITHUB".into()),
            access_token: Some(TOKEN.into()),
            ..job::plan_by(tool, &self.source)
        }
    }

    fn was_asked(&self, path: &str) -> bool {
        let requests = self.server.requests();
        requests
            .iter()
            .any(|request| request.path.starts_with(path))
    }
}

fn private_modules_on_the_server_of_the_source_are_fetched_with_its_token(tool: Tool) {
    let (machine, modules) = (machine(), Nested::start());
    let plan = modules.plan(tool);
    machine.queue(&[&plan]);
    let outcome = machine.run(&plan);
    assert_eq!(outcome.code(), 0, "{outcome}");
    assert!(modules.was_asked("/inner.git"));
    assert!(!outcome.log().contains(TOKEN));
    assert!(outcome.left_behind.is_empty(), "{outcome}");
}

fn a_module_that_is_not_allowed_ends_init(tool: Tool) {
    let (machine, modules) = (machine(), Nested::start());
    let plan = modules.plan(tool);
    machine.queue(&[&plan]);
    let url = modules.server.url();
    let outcome = machine
        .executor(&plan)
        .env(
            env::ALLOWED_VCS_URL_REGEX,
            format!("{url}/(source|module).git"),
        )
        .run();
    // The step has failed, and is reported.
    assert_eq!(
        outcome.code(),
        i32::from(Exit::StepFailed.code()),
        "{outcome}"
    );
    let refusal = format!("the git URL `{url}/inner.git` is not allowed by");
    // The tool breaks its lines.
    let words: Vec<_> = outcome
        .log()
        .split_whitespace()
        .filter(|word| *word != "│")
        .collect();
    assert!(words.join(" ").contains(&refusal), "{outcome}");
    assert!(modules.was_asked("/module.git") && !modules.was_asked("/inner.git"));
}

fn a_login_of_the_operator_fetches_source_and_modules(tool: Tool) {
    let modules = Nested::start();
    let variable = format!("{}HERE", env::GIT_LOGIN_PREFIX);
    let list = serde_json::json!([{ "url": modules.server.url(), "kind": "gitlab", "variable": variable }]);
    let run = |own: &[(&str, &str)]| {
        let machine = machine();
        let mut plan = modules.plan(tool);
        plan.vcs_type = Some("PUBLIC".into());
        plan.access_token = None;
        let own = own
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        plan.environment_variables.extend(own);
        machine.queue(&[&plan]);
        machine
            .executor(&plan)
            .env(env::GIT_LOGINS, list.to_string())
            .env(&variable, format!("x-access-token:{TOKEN}"))
            .run()
    };
    let outcome = run(&[]);
    assert_eq!(outcome.code(), 0, "{outcome}");
    assert!(modules.was_asked("/inner.git"));
    assert!(!outcome.log().contains(TOKEN));
    assert!(outcome.left_behind.is_empty(), "{outcome}");

    // The source is fetched without settings of the run, and modules with them.
    let outcome = run(&[("GIT_SSL_NO_VERIFY", "1")]);
    assert_eq!(
        outcome.code(),
        i32::from(Exit::StepFailed.code()),
        "{outcome}"
    );
    let withheld = format!(
        "The operator's login for {} is not used for modules: the run sets `GIT_SSL_NO_VERIFY`",
        modules.server.url()
    );
    assert!(outcome.log().contains(&withheld), "{outcome}");
}

#[test]
fn a_repository_is_fetched_over_ssh_with_the_runs_key() {
    let (machine, repository) = (machine(), Repository::fixture());
    let server = Sshd::start().unwrap();
    let known_hosts = machine.scratch("known_hosts");
    fs::write(&known_hosts, server.known_hosts_line().unwrap()).unwrap();
    let plan = JobData {
        source: Some(server.url(repository.path())),
        vcs_type: Some("SSH~id_ed25519".into()),
        access_token: Some(server.client_key().unwrap()),
        ..job::plan(&repository)
    };
    machine.queue(&[&plan]);
    let outcome = machine
        .executor(&plan)
        .env(env::SSH_KNOWN_HOSTS, &known_hosts)
        .run();
    assert_eq!(outcome.code(), 0, "{outcome}\n{}", server.log());
    assert_eq!(machine.record(&plan).commit_id, Some(repository.head()));
    assert!(outcome.left_behind.is_empty(), "{outcome}");
}
