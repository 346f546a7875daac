//! Sources and modules by git: over SSH with the key of a run, over HTTP with its token, with the operator's logins.

mod left_process;
mod rule;

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
    a_login_of_the_operator_fetches_source_and_modules,
    source_submodules_and_modules_are_fetched_over_ssh_with_the_key_of_the_run,
}

const TOKEN: &str = "t0k3n-of-the-workspace";

/// Private repositories on one server.
struct Private {
    server: Server,
    source: Repository,
    folder: tempfile::TempDir,
}

impl Private {
    /// Starts the server. `source` is the text of the module `source`, by the URL of the server.
    fn start(source: impl FnOnce(&str) -> String) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let options = GitHttpOptions {
            credentials: Some(format!("x-access-token:{TOKEN}")),
            ..GitHttpOptions::default()
        };
        let server = git_http::serve(folder.path(), options).unwrap();
        let private = Self {
            source: Repository::module(&source(&server.url())),
            server,
            folder,
        };
        private.add("source", &private.source);
        private
    }

    /// A source with a module, which has a module.
    fn nested() -> Self {
        let private = Self::start(|url| call(&format!("{url}/module.git")));
        let text = call(&private.url("inner"));
        private.add("module", &Repository::module(&text));
        private.add("inner", &Repository::module("locals { inner = true }\n"));
        private
    }

    fn add(&self, name: &str, repository: &Repository) {
        let from = repository.path().display().to_string();
        let to = format!("{name}.git");
        git(
            self.folder.path(),
            &["clone", "--quiet", "--bare", &from, &to],
        );
    }

    fn url(&self, name: &str) -> String {
        format!("{}/{name}.git", self.server.url())
    }

    fn plan(&self, tool: Tool) -> JobData {
        JobData {
            source: Some(self.url("source")),
            vcs_type: Some("GITHUB".into()),
            access_token: Some(TOKEN.into()),
            ..job::plan_by(tool, &self.source)
        }
    }

    fn was_asked(&self, name: &str) -> bool {
        let path = format!("/{name}.git/");
        let requests = self.server.requests();
        requests
            .iter()
            .any(|request| request.path.starts_with(&path))
    }
}

/// A call of the module in a repository.
fn call(address: &str) -> String {
    format!("module \"m\" {{\n  source = \"git::{address}\"\n}}\n")
}

fn private_modules_on_the_server_of_the_source_are_fetched_with_its_token(tool: Tool) {
    let (machine, modules) = (machine(), Private::nested());
    let plan = modules.plan(tool);
    machine.queue(&[&plan]);
    let outcome = machine.run(&plan);
    assert_eq!(outcome.code(), 0, "{outcome}");
    assert!(modules.was_asked("inner"));
    assert!(!outcome.log().contains(TOKEN));
    assert!(outcome.left_behind.is_empty(), "{outcome}");
}

fn a_login_of_the_operator_fetches_source_and_modules(tool: Tool) {
    let modules = Private::nested();
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
    assert!(modules.was_asked("inner"));
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

fn source_submodules_and_modules_are_fetched_over_ssh_with_the_key_of_the_run(tool: Tool) {
    let machine = machine();
    let server = Sshd::start().unwrap();
    let module = Repository::module("locals { inner = true }\n");
    let text = format!(
        "{}module \"sub\" {{\n  source = \"./sub\"\n}}\n",
        call(&server.url(module.path()))
    );
    let repository = Repository::module(&text);
    let link = format!("160000,{},sub", module.head());
    let tree = repository.path();
    git(tree, &["update-index", "--add", "--cacheinfo", &link]);
    let submodule = format!(
        "[submodule \"sub\"]\n\tpath = sub\n\turl = {}\n",
        server.url(module.path())
    );
    fs::write(tree.join(".gitmodules"), submodule).unwrap();
    git(tree, &["add", ".gitmodules"]);
    git(tree, &["commit", "--quiet", "-m", "submodule"]);
    let known_hosts = machine.scratch("known_hosts");
    fs::write(&known_hosts, server.known_hosts_line().unwrap()).unwrap();
    let plan = JobData {
        source: Some(server.url(repository.path())),
        vcs_type: Some("SSH~id_ed25519".into()),
        access_token: Some(server.client_key().unwrap()),
        ..job::plan_by(tool, &repository)
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
