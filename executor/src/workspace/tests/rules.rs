//! The operator's rule for addresses: what it refuses is never asked.

use git_address::{AllowList, Match};
use job_contract::{Exit, JobData};
use rstest::rstest;
use test_peers::git_http::{self, GitHttpOptions};
use test_peers::http::{Response, Server};
use test_peers::sshd::Sshd;

use super::super::git::GitFailure;
use super::super::*;
use super::support::*;
use crate::child_env::ChildEnv;

pub(super) fn allow(fixture: &mut Fixture, pattern: &str) {
    let list = AllowList::new(pattern, Match::Full).unwrap();
    fixture.config.allowed = Some(Arc::new(list));
}

#[tokio::test]
async fn a_source_that_is_not_allowed_is_never_asked() {
    let server = Server::start(|_| Response::new(500, "")).unwrap();
    let mut fixture = Fixture::new();
    allow(&mut fixture, "https://git.acme.com/.*");
    let host = server.host();
    let job = job(&format!("http://bob:hunter2@{host}/r"), "main");
    let error = fixture.prepare(&job).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("the git URL `http://{host}/r` is not allowed by `ALLOWED_VCS_URL_REGEX`")
    );
    assert_eq!(error.exit(), Exit::BadJobData);
    assert!(error.hint().is_some());
    let target = fixture.layout.checkout().join("tools");
    let address = format!("{}/tools", server.url());
    let environment = BTreeMap::new();
    let tools = clone_tools_repository(
        &address,
        "main",
        &target,
        &environment,
        &fixture.layout,
        &fixture.config,
    );
    let error = tools.await.unwrap_err().to_string();
    assert!(error.contains("/tools` is not allowed by"), "{error}");
    assert!(server.requests().is_empty());
    // No git ran at all.
    assert!(!fixture.work.path().join("commands").exists());
}

#[tokio::test]
async fn a_source_that_is_allowed_is_fetched() {
    let repository = Repository::new();
    let server = git_http::serve(repository.served(), GitHttpOptions::default()).unwrap();
    let mut fixture = Fixture::new();
    allow(&mut fixture, &format!("{}/repo.git", server.url()));
    let source = format!("{}/repo.git", server.url());
    fixture.prepare(&job(&source, "main")).await.unwrap();
    assert_eq!(fixture.main_tf(), "# two");
}

/// Repositories of one server: `repo.git` has the submodule `middle`, which has the submodule `inner`.
fn nested(address_of_inner: &str) -> Repository {
    let (inner, middle, outer) = (Repository::new(), Repository::new(), Repository::new());
    add_submodule(&middle, &inner, address_of_inner);
    add_submodule(&outer, &middle, "../middle.git");
    fs::rename(inner.bare(), outer.served().join("inner.git")).unwrap();
    fs::rename(middle.bare(), outer.served().join("middle.git")).unwrap();
    outer
}

pub(super) fn add_submodule(outer: &Repository, inner: &Repository, address: &str) {
    let tree = outer.tree();
    let head = git(&inner.tree(), &["rev-parse", "HEAD"]);
    let link = format!("160000,{head},sub");
    git(&tree, &["update-index", "--add", "--cacheinfo", &link]);
    let text = format!("[submodule \"sub\"]\n\tpath = sub\n\turl = {address}\n");
    fs::write(tree.join(".gitmodules"), text).unwrap();
    git(&tree, &["add", ".gitmodules"]);
    git(&tree, &["commit", "-q", "-m", "submodule"]);
    outer.publish();
}

#[tokio::test]
async fn submodules_at_any_depth_are_judged() {
    let outer = nested("../inner.git");
    let server = git_http::serve(outer.served(), GitHttpOptions::default()).unwrap();
    let source = format!("{}/repo.git", server.url());
    let mut fixture = Fixture::new();
    allow(&mut fixture, &format!("{}/(repo|middle).git", server.url()));
    let error = fixture.prepare(&job(&source, "main")).await.unwrap_err();
    assert_failure(&error, GitFailure::NotAllowed);
    assert_eq!(error.exit(), Exit::BadJobData);
    let refused = format!(
        "the git URL `{}/inner.git` is not allowed by `ALLOWED_VCS_URL_REGEX`",
        server.url()
    );
    assert!(error.to_string().contains(&refused), "{error}");
    let asked = |path: &str| server.requests().iter().any(|r| r.path.starts_with(path));
    assert!(asked("/middle.git") && !asked("/inner.git"));

    let mut fixture = Fixture::new();
    allow(&mut fixture, &format!("{}/[a-z]+.git", server.url()));
    fixture.prepare(&job(&source, "main")).await.unwrap();
    assert!(asked("/inner.git"));
    assert!(fixture.layout.checkout().join("sub/sub/main.tf").exists());
}

/// git takes such an address as it is.
#[rstest]
#[case("inner.git\\r")]
#[case("\\r.evil.test/inner.git")]
#[tokio::test]
async fn a_submodule_whose_address_has_a_carriage_return_is_never_asked(#[case] end: &str) {
    let (inner, outer) = (Repository::new(), Repository::new());
    let server = git_http::serve(outer.served(), GitHttpOptions::default()).unwrap();
    let end = end.replace("\\r", "\r");
    add_submodule(&outer, &inner, &format!("\"{}/{end}\"", server.url()));
    fs::rename(inner.bare(), outer.served().join("inner.git")).unwrap();
    let mut fixture = Fixture::new();
    allow(&mut fixture, &format!("{}(?s:.*)", server.url()));
    let source = format!("{}/repo.git", server.url());
    let error = fixture.prepare(&job(&source, "main")).await.unwrap_err();
    assert_failure(&error, GitFailure::NotAllowed);
    assert!(!error.to_string().contains('\r'), "{error}");
    let requests = server.requests();
    assert!(requests.iter().all(|r| r.path.starts_with("/repo.git/")));
}

/// A server without git's own protocol, which says that another one has the objects.
#[tokio::test]
async fn a_server_cannot_lead_git_to_the_objects_of_another_server() {
    let repository = Repository::new();
    git(&repository.bare(), &["update-server-info"]);
    let elsewhere = Server::start(|_| Response::new(404, "")).unwrap();
    let (folder, alternate) = (repository.bare(), format!("{}/objects", elsewhere.url()));
    let here = Server::start(move |request| {
        let path = request.path.trim_start_matches("/repo.git/");
        match (path, fs::read(folder.join(path))) {
            ("objects/info/http-alternates", _) => Response::new(200, format!("{alternate}\n")),
            (path, Ok(content)) if !path.starts_with("objects/") => Response::new(200, content),
            _ => Response::new(404, ""),
        }
    })
    .unwrap();
    let address = format!("{}/repo.git", here.url());
    let mut fixture = Fixture::new();
    let clone = async |fixture: &Fixture, variables: &[(&str, &str)], target| {
        let modules = ModuleAccess {
            allowed: fixture.config.allowed.clone(),
            ssh_command: ssh::ssh_command(None, None),
            ..ModuleAccess::default()
        };
        let arguments = ["clone", &address, target];
        let (ok, text) = git_of_init(fixture, &modules, variables, &arguments).await;
        assert!(!ok, "{text}");
        text
    };
    // More exact than what the executor sets.
    let key = format!("http.{}/.followRedirects", here.url());
    let redirects = [
        ("GIT_CONFIG_COUNT", "1"),
        ("GIT_CONFIG_KEY_0", &*key),
        ("GIT_CONFIG_VALUE_0", "true"),
    ];
    allow(&mut fixture, &format!("{}/.*", here.url()));
    let text = clone(&fixture, &[], "a").await;
    assert!(text.contains("alternate disabled"), "{text}");
    let text = clone(&fixture, &redirects, "b").await;
    assert!(text.contains("follows redirects"), "{text}");
    assert!(elsewhere.requests().is_empty());
    // Without a rule, a run may allow it.
    fixture.config.allowed = None;
    clone(&fixture, &redirects, "c").await;
    assert!(!elsewhere.requests().is_empty());
}

/// A repository says where its large files are. git-lfs looks at this variable, and then asks no server.
#[tokio::test]
async fn filters_of_large_files_fetch_nothing_from_where_a_repository_says() {
    let repository = Repository::new();
    let tree = repository.tree();
    fs::write(tree.join(".gitattributes"), "*.tf filter=lfs\n").unwrap();
    fs::write(
        tree.join(".lfsconfig"),
        "[lfs]\n\turl = https://evil.test\n",
    )
    .unwrap();
    commit_all(&tree);
    repository.publish();
    let server = git_http::serve(repository.served(), GitHttpOptions::default()).unwrap();
    let source = format!("{}/repo.git", server.url());
    let mut fixture = Fixture::new();
    let seen = fixture.work.path().join("seen");
    let filter = format!(
        "sh -c 'echo skips=$GIT_LFS_SKIP_SMUDGE >> {}; cat'",
        seen.display()
    );
    let config = format!("[filter \"lfs\"]\n\tsmudge = \"{filter}\"\n");
    fs::write(fixture.config.home.join(".gitconfig"), config).unwrap();
    allow(&mut fixture, &source);
    let modules = fixture
        .prepare(&job(&source, "main"))
        .await
        .unwrap()
        .modules;
    // No filter of the run is called for its source.
    assert!(!seen.exists());
    let arguments = ["clone", "--quiet", &source, "module"];
    let (ok, text) = git_of_init(&fixture, &modules, &[], &arguments).await;
    assert!(ok, "{text}");
    let seen = fs::read_to_string(seen).unwrap();
    assert!(
        !seen.is_empty() && seen.lines().all(|line| line == "skips=1"),
        "{seen}"
    );
}

#[tokio::test]
async fn files_of_this_machine_are_no_submodules_of_a_judged_source() {
    let inner = Repository::new();
    let outer = Repository::new();
    add_submodule(
        &outer,
        &inner,
        &format!("file://{}", inner.bare().display()),
    );
    let mut fixture = Fixture::new();
    allow(&mut fixture, &format!("file://{}", outer.bare().display()));
    let source = outer.bare().display().to_string();
    let error = fixture.prepare(&job(&source, "main")).await.unwrap_err();
    assert!(error.to_string().contains("transport 'file'"), "{error}");
}

#[tokio::test]
async fn a_redirect_to_another_server_gets_no_token_and_no_connection() {
    let repository = Repository::new();
    let options = GitHttpOptions {
        credentials: Some("x-access-token:t0k3n".to_owned()),
        ..GitHttpOptions::default()
    };
    let elsewhere = git_http::serve(repository.served(), options).unwrap();
    let target = elsewhere.url();
    let here = Server::start(move |request| {
        let location = format!("{target}{}", request.target());
        Response::new(301, "").with_header("Location", &location)
    })
    .unwrap();
    let source = format!("{}/repo.git", here.url());
    let job = github(&source, "t0k3n");
    let error = Fixture::new().prepare(&job).await.unwrap_err();
    assert_failure(&error, GitFailure::AuthRefused);
    let requests = elsewhere.requests();
    assert!(!requests.is_empty());
    assert!(
        requests
            .iter()
            .all(|request| request.basic_auth().is_none())
    );

    let before = elsewhere.requests().len();
    let mut fixture = Fixture::new();
    allow(&mut fixture, &format!("{}/.*", here.url()));
    let error = fixture.prepare(&job).await.unwrap_err();
    assert_failure(&error, GitFailure::Redirect);
    assert_eq!(elsewhere.requests().len(), before);
}

#[tokio::test]
async fn ssh_connects_to_allowed_repositories_only() {
    let repository = Repository::new();
    let server = Sshd::start().unwrap();
    let source = server.url(&repository.bare());
    let job = JobData {
        vcs_type: Some("SSH~id".to_owned()),
        access_token: Some(server.client_key().unwrap()),
        ..job(&source, "main")
    };
    let mut fixture = Fixture::new();
    allow(&mut fixture, "ssh://.*/repo.git");
    fixture.prepare(&job).await.unwrap();
    assert_eq!(fixture.main_tf(), "# two");

    let modules = ModuleAccess {
        ssh_command: ssh::ssh_command(None, None),
        allowed: fixture.config.allowed.clone(),
        ..ModuleAccess::default()
    };
    let other = source.replace("repo.git", "other.git");
    let (ok, text) = git_of_init(&fixture, &modules, &[], &["ls-remote", &other]).await;
    assert!(
        !ok && text.contains("other.git` is not allowed by"),
        "{text}"
    );
}

/// Runs git as the tool does during `init`, with these variables of the run.
pub(super) async fn git_of_init(
    fixture: &Fixture,
    modules: &ModuleAccess,
    variables: &[(&str, &str)],
    args: &[&str],
) -> (bool, String) {
    let mut env = child_env(fixture, variables);
    let open = modules
        .open(
            fixture.layout.private(),
            &fixture.config.path,
            fixture.layout.checkout(),
            &mut env,
        )
        .await
        .unwrap();
    let ssh = open.as_ref().and_then(|open| open.ssh_command.clone());
    let mut command = tokio::process::Command::new("git");
    command
        .args(args)
        .current_dir(fixture.work.path())
        .env_clear()
        .envs(env.iter());
    if let Some(ssh) = ssh {
        command.env("GIT_SSH_COMMAND", ssh);
    }
    run(command).await
}

pub(super) fn child_env(fixture: &Fixture, variables: &[(&str, &str)]) -> ChildEnv {
    let own = [
        ("PATH".into(), fixture.config.path.clone()),
        ("HOME".into(), fixture.config.home.clone().into()),
    ];
    let mut env = ChildEnv::new(own, &[], &JobData::default()).unwrap();
    env.set("GIT_TERMINAL_PROMPT", "0").unwrap();
    for (name, value) in variables {
        env.set(name, value).unwrap();
    }
    env
}

/// Runs a command as a child that the executor started.
pub(super) async fn run(mut command: tokio::process::Command) -> (bool, String) {
    command
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped());
    let child = runtime::reaper::spawn(&mut command).unwrap();
    let output = child.wait_with_output().await.unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8(text).unwrap())
}

#[tokio::test]
async fn git_of_init_connects_to_allowed_repositories_only() {
    let repository = Repository::new();
    fs::rename(repository.bare(), repository.served().join("evil.git")).unwrap();
    repository.publish();
    let server = git_http::serve(repository.served(), GitHttpOptions::default()).unwrap();
    let [good, evil] = ["repo", "evil"].map(|name| format!("{}/{name}.git", server.url()));
    let mut fixture = Fixture::new();
    allow(&mut fixture, &good);
    let modules = fixture.prepare(&job(&good, "main")).await.unwrap().modules;
    let asked = |path: &str| server.requests().iter().any(|r| r.path.starts_with(path));

    let (ok, text) = git_of_init(&fixture, &modules, &[], &["ls-remote", &good]).await;
    assert!(ok, "{text}");
    let (ok, text) = git_of_init(&fixture, &modules, &[], &["clone", &evil, "x"]).await;
    assert!(
        !ok && text.contains("evil.git` is not allowed by"),
        "{text}"
    );
    // The run's own settings lead to another address, follow redirects, or run a program.
    let instead = [
        ("GIT_CONFIG_COUNT", "1"),
        ("GIT_CONFIG_KEY_0", &*format!("url.{evil}.insteadOf")),
        ("GIT_CONFIG_VALUE_0", &good),
    ];
    let (ok, text) = git_of_init(&fixture, &modules, &instead, &["ls-remote", &good]).await;
    assert!(
        !ok && text.contains("evil.git` is not allowed by"),
        "{text}"
    );
    let key = format!("http.{}/.followRedirects", server.url());
    let redirects = [
        ("GIT_CONFIG_COUNT", "1"),
        ("GIT_CONFIG_KEY_0", &*key),
        ("GIT_CONFIG_VALUE_0", "true"),
    ];
    let (ok, text) = git_of_init(&fixture, &modules, &redirects, &["ls-remote", &good]).await;
    assert!(!ok && text.contains("follows redirects"), "{text}");
    let external = [("GIT_ALLOW_PROTOCOL", "ext:file")];
    let program = ["ls-remote", "ext::touch marker"];
    let (ok, text) = git_of_init(&fixture, &modules, &external, &program).await;
    assert!(
        !ok && text.contains("transport 'ext' not allowed"),
        "{text}"
    );
    assert!(!asked("/evil.git"));
}

#[tokio::test]
async fn init_gets_the_token_for_modules_on_the_same_server() {
    let repository = Repository::new();
    let options = GitHttpOptions {
        credentials: Some("x-access-token:t0k3n-of-the-run".to_owned()),
        ..GitHttpOptions::default()
    };
    let server = git_http::serve(repository.served(), options.clone()).unwrap();
    let other = git_http::serve(repository.served(), options).unwrap();
    let address = format!("{}/repo.git", server.url());
    let fixture = Fixture::new();
    let job = github(&address, "t0k3n-of-the-run");
    let modules = fixture.prepare(&job).await.unwrap().modules;
    let (ok, text) = git_of_init(&fixture, &modules, &[], &["ls-remote", &address]).await;
    assert!(ok, "{text}");
    let elsewhere = format!("{}/repo.git", other.url());
    let (ok, _) = git_of_init(&fixture, &modules, &[], &["ls-remote", &elsewhere]).await;
    assert!(!ok);
    let sent = other
        .requests()
        .iter()
        .filter_map(test_peers::http::Request::basic_auth)
        .count();
    assert_eq!(sent, 0);

    // No variable has the token. Without the broker there is none, and another process gets none.
    let mut env = child_env(&fixture, &[]);
    let private = fixture.layout.private();
    let folder = fixture.layout.checkout();
    let opening = modules.open(private, &fixture.config.path, folder, &mut env);
    let open = opening.await.unwrap();
    assert!(
        env.iter()
            .all(|(_, value)| !value.to_string_lossy().contains("t0k3n"))
    );
    let command = |program: &str| {
        let mut command = tokio::process::Command::new(program);
        command
            .args(["ls-remote", &address])
            .env_clear()
            .envs(env.iter());
        command
    };
    let (ok, text) = run(command("git")).await;
    assert!(ok, "{text}");
    let foreign = command("git").output().await.unwrap();
    assert!(!foreign.status.success());
    drop(open);
    let (ok, text) = run(command("git")).await;
    assert!(!ok && !text.contains("t0k3n"), "{text}");
    assert!(files_holding(private, "t0k3n").is_empty());
}
