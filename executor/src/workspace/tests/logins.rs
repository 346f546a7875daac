//! The operator's logins: for source, submodules and modules, for their own servers, and not where settings of a run lead.

use std::time::Duration;

use job_contract::env;
use rstest::rstest;
use secret_stores::RunIds;
use serde_json::{Value, json};
use test_peers::git_http::{self, GitHttpOptions};
use test_peers::github::{APP, GitHub};
use test_peers::http::{Request, Response, Server};

use super::super::*;
use super::rules::{add_submodule, allow, child_env, git_of_init};
use super::support::*;

const TOKEN: &str = "t0k3n-of-the-operator";

/// Logins with these entries, each with its secret.
fn give(fixture: &mut Fixture, entries: &[(Value, &str)]) {
    let variable = |number| format!("{}{number}", env::GIT_LOGIN_PREFIX);
    let list = entries.iter().enumerate().map(|(number, (entry, _))| {
        let mut entry = entry.clone();
        entry["variable"] = variable(number).into();
        entry
    });
    let list = Value::Array(list.collect()).to_string();
    let own = |name: &str| match name {
        env::GIT_LOGINS => Some(list.clone()),
        _ => (0..entries.len())
            .find(|number| name == variable(*number))
            .map(|number| entries[number].1.to_owned()),
    };
    let run = RunIds {
        organization: "",
        workspace: "",
    };
    let settings = git_logins::Settings::read(&own, run).unwrap();
    let client = http_client(&[]).unwrap();
    let logins = Logins::new(settings, client, Box::new(|_| {}));
    fixture.config.logins = Some(Arc::new(logins));
}

/// Another work dir with the same logins.
fn another(fixture: &Fixture) -> Fixture {
    let mut another = Fixture::new();
    another.config.logins.clone_from(&fixture.config.logins);
    another
}

fn gitlab(url: &str) -> Value {
    json!({ "url": url, "kind": "gitlab" })
}

/// `repo.git`, which has the submodule `module.git`.
fn with_submodule() -> Repository {
    let (module, outer) = (Repository::new(), Repository::new());
    add_submodule(&outer, &module, "../module.git");
    fs::rename(module.bare(), outer.served().join("module.git")).unwrap();
    outer
}

fn demanding(credentials: &str) -> GitHttpOptions {
    GitHttpOptions {
        credentials: Some(credentials.to_owned()),
        ..GitHttpOptions::default()
    }
}

/// The requests that brought a login.
fn with_login(server: &Server) -> usize {
    let requests = server.requests();
    let has = |request: &&Request| request.header("authorization").is_some();
    requests.iter().filter(has).count()
}

#[rstest]
#[case("gitlab", TOKEN, demanding("oauth2:t0k3n-of-the-operator"))]
#[case(
    "gitlab",
    "bob:t0k3n-of-the-operator",
    demanding("bob:t0k3n-of-the-operator")
)]
#[case(
    "bitbucket",
    "bob:t0k3n-of-the-operator",
    demanding("bob:t0k3n-of-the-operator")
)]
#[case("bitbucket", TOKEN, GitHttpOptions { bearer: Some(TOKEN.to_owned()), ..GitHttpOptions::default() })]
#[tokio::test]
async fn sources_submodules_and_modules_are_fetched_with_the_operators_logins(
    #[case] kind: &str,
    #[case] secret: &str,
    #[case] options: GitHttpOptions,
) {
    let repository = with_submodule();
    let server = git_http::serve(repository.served(), options.clone()).unwrap();
    let elsewhere = git_http::serve(repository.served(), options).unwrap();
    let mut fixture = Fixture::new();
    give(
        &mut fixture,
        &[(json!({ "url": server.url(), "kind": kind }), secret)],
    );
    let source = format!("{}/repo.git", server.url());
    let prepared = fixture.prepare(&job(&source, "main")).await.unwrap();
    assert!(fixture.layout.checkout().join("sub/main.tf").exists());
    let module = format!("{}/module.git", server.url());
    let (ok, text) = git_of_init(&fixture, &prepared.modules, &[], &["ls-remote", &module]).await;
    assert!(ok, "{text}");
    let other = format!("{}/module.git", elsewhere.url());
    let (ok, _) = git_of_init(&fixture, &prepared.modules, &[], &["ls-remote", &other]).await;
    assert!(!ok && with_login(&elsewhere) == 0);
    // It is in no variable, no argument, and no file that stays.
    let mut env = child_env(&fixture, &[]);
    let (private, folder) = (fixture.layout.private(), fixture.layout.checkout());
    let opening = prepared
        .modules
        .open(private, &fixture.config.path, folder, &mut env);
    drop(opening.await.unwrap());
    assert!(
        env.iter()
            .all(|(_, value)| !value.to_string_lossy().contains(TOKEN))
    );
    assert!(!fixture.commands().contains(TOKEN));
    assert!(files_holding(fixture.work.path(), TOKEN).is_empty());
}

#[tokio::test]
async fn an_app_of_github_gives_a_token_for_each_repository() {
    let repository = with_submodule();
    let team = repository.served().join("team");
    fs::create_dir(&team).unwrap();
    for name in ["repo.git", "module.git"] {
        fs::rename(repository.served().join(name), team.join(name)).unwrap();
    }
    let github = GitHub::start(repository.served(), Duration::from_hours(1)).unwrap();
    let base = github.server().url();
    let mut fixture = Fixture::new();
    let app = json!({ "url": base, "kind": "github-app", "app": APP });
    give(&mut fixture, &[(app, github.key())]);
    let source = format!("{base}/team/repo.git");
    let modules = fixture
        .prepare(&job(&source, "main"))
        .await
        .unwrap()
        .modules;
    assert!(fixture.layout.checkout().join("sub/main.tf").exists());
    let module = format!("{base}/team/module.git");
    let (ok, text) = git_of_init(&fixture, &modules, &[], &["ls-remote", &module]).await;
    assert!(ok, "{text}");
    assert_eq!(github.tokens().len(), 2);

    let foreign = format!("{base}/other/repo.git");
    let error = another(&fixture)
        .prepare(&job(&foreign, "main"))
        .await
        .unwrap_err();
    let text = error.to_string();
    assert!(text.contains("the App is not installed there"), "{text}");
    assert!(github.tokens().iter().all(|token| !text.contains(token)));
}

#[tokio::test]
async fn a_token_of_an_app_is_replaced_before_its_end_during_one_init() {
    let repository = Repository::new();
    let team = repository.served().join("team");
    fs::create_dir(&team).unwrap();
    fs::rename(repository.bare(), team.join("repo.git")).unwrap();
    // So little is left of it that each question gets a new one.
    let github = GitHub::start(repository.served(), Duration::from_mins(1)).unwrap();
    let base = github.server().url();
    let mut fixture = Fixture::new();
    let app = json!({ "url": base, "kind": "github-app", "app": APP });
    give(&mut fixture, &[(app, github.key())]);
    let source = format!("{base}/team/repo.git");
    let prepared = fixture.prepare(&job(&source, "main")).await.unwrap();
    let mut env = child_env(&fixture, &[]);
    let (private, folder) = (fixture.layout.private(), fixture.layout.checkout());
    let opening = prepared
        .modules
        .open(private, &fixture.config.path, folder, &mut env);
    let _open = opening.await.unwrap();
    for _ in 0..2 {
        let before = github.tokens().len();
        github.end_tokens();
        let mut command = tokio::process::Command::new("git");
        command
            .args(["ls-remote", &source])
            .env_clear()
            .envs(env.iter());
        let (ok, text) = super::rules::run(command).await;
        assert!(ok, "{text}");
        assert_eq!(github.tokens().len(), before + 1);
    }
}

#[tokio::test]
async fn the_most_exact_login_is_used_and_only_for_allowed_addresses() {
    let repository = Repository::new();
    for folder in ["team", "other", "hidden"] {
        let folder = repository.served().join(folder);
        fs::create_dir(&folder).unwrap();
        git(
            &folder,
            &["clone", "-q", "--bare", "../repo.git", "repo.git"],
        );
    }
    let folder = repository.served().to_path_buf();
    let server = Server::start(move |request| {
        let wanted = if request.path.starts_with("/team/") {
            "oauth2:of-team"
        } else {
            "oauth2:of-all"
        };
        git_http::answer(&folder, &demanding(wanted), request)
    })
    .unwrap();
    let url = server.url();
    let mut fixture = Fixture::new();
    let entries = [
        (gitlab(&url), "of-all"),
        (gitlab(&format!("{url}/team")), "of-team"),
    ];
    give(&mut fixture, &entries);
    for name in ["team", "other"] {
        let source = format!("{url}/{name}/repo.git");
        another(&fixture)
            .prepare(&job(&source, "main"))
            .await
            .unwrap();
    }
    allow(&mut fixture, &format!("{url}/(team|other)/.*"));
    let source = format!("{url}/team/repo.git");
    let modules = fixture
        .prepare(&job(&source, "main"))
        .await
        .unwrap()
        .modules;
    // Without the guard, as hostile code would ask.
    let fill = |path: &str| format!("printf 'url={url}/{path}\\n\\n' | git credential fill");
    for (path, expected) in [("other/repo.git", true), ("hidden/repo.git", false)] {
        let mut env = child_env(&fixture, &[]);
        let folder = fixture.layout.checkout();
        let opening = modules.open(
            fixture.layout.private(),
            &fixture.config.path,
            folder,
            &mut env,
        );
        let open = opening.await.unwrap();
        let mut shell = tokio::process::Command::new("sh");
        shell.args(["-c", &fill(path)]).env_clear().envs(env.iter());
        let (_, text) = super::rules::run(shell).await;
        assert_eq!(text.contains("password=of-all"), expected, "{text}");
        drop(open);
    }
}

#[tokio::test]
async fn the_token_of_a_workspace_wins_on_the_server_of_its_source() {
    let repository = Repository::new();
    let server = git_http::serve(repository.served(), demanding("x-access-token:own")).unwrap();
    let mut fixture = Fixture::new();
    give(&mut fixture, &[(gitlab(&server.url()), TOKEN)]);
    let source = format!("{}/repo.git", server.url());
    let modules = fixture
        .prepare(&github(&source, "own"))
        .await
        .unwrap()
        .modules;
    let (ok, text) = git_of_init(&fixture, &modules, &[], &["ls-remote", &source]).await;
    assert!(ok, "{text}");
}

#[rstest]
#[case("gitlab")]
#[case("bitbucket")]
#[tokio::test]
async fn no_redirect_takes_a_login_elsewhere(#[case] kind: &str) {
    let repository = Repository::new();
    // One asks for a login. git would send a header also to one that asks for nothing.
    let options = match kind {
        "gitlab" => demanding("oauth2:t0k3n-of-the-operator"),
        _ => GitHttpOptions::default(),
    };
    let elsewhere = git_http::serve(repository.served(), options).unwrap();
    let target = elsewhere.url();
    let here = Server::start(move |request| {
        let location = format!("{target}{}", request.target());
        Response::new(301, "").with_header("Location", &location)
    })
    .unwrap();
    let mut fixture = Fixture::new();
    let entry = json!({ "url": here.url(), "kind": kind });
    give(&mut fixture, &[(entry, TOKEN)]);
    let source = format!("{}/repo.git", here.url());
    fixture.prepare(&job(&source, "main")).await.unwrap_err();
    let modules = ModuleAccess {
        operators: fixture.config.logins.clone(),
        ..ModuleAccess::default()
    };
    let (ok, _) = git_of_init(&fixture, &modules, &[], &["ls-remote", &source]).await;
    assert!(!ok && !here.requests().is_empty());
    assert_eq!(with_login(&elsewhere), 0);
}

/// What the run sets, in variables and in `~/.gitconfig`.
#[rstest]
#[case(&[("GIT_SSL_NO_VERIFY", "1")], "", "GIT_SSL_NO_VERIFY")]
#[case(&[("https_proxy", "http://127.0.0.1:9")], "", "https_proxy")]
#[case(&[("GIT_TRACE2_CONFIG_PARAMS", "http.*")], "", "GIT_TRACE2_CONFIG_PARAMS")]
#[case(&[("SSL_CERT_FILE", "/tmp/own.pem")], "", "SSL_CERT_FILE")]
#[case(&[("GIT_CONFIG_COUNT", "1"), ("GIT_CONFIG_KEY_0", "http.proxy"), ("GIT_CONFIG_VALUE_0", "")], "", "http.proxy")]
#[case(&[("GIT_CONFIG_PARAMETERS", "'http.sslVerify=false'")], "", "http.sslverify")]
#[case(&[], "[http]\n\tcurloptResolve = h:443:127.0.0.1\n", "http.curloptresolve")]
#[case(&[], "[credential]\n\thelper = store\n", "credential.helper")]
#[case(&[("GIT_CONFIG_SYSTEM", "/dev/null")], "", "GIT_CONFIG_SYSTEM")]
#[case(&[("GIT_CONFIG", "/dev/null")], "[http]\n\tproxy = x\n", "http.proxy")]
#[case(&[], "[includeIf \"gitdir:**/modules/\"]\n\tpath = /x\n", "includeIf")]
#[case(&[], "[http \"https://elsewhere\"]\n\tproxy = x\n", "")]
#[case(&[], "not a configuration", "cannot be read")]
#[tokio::test]
async fn a_login_is_withheld_if_settings_of_the_run_could_lead_it_elsewhere(
    #[case] variables: &[(&str, &str)],
    #[case] config: &str,
    #[case] expected: &str,
) {
    let mut fixture = Fixture::new();
    let (url, bearer) = ("https://127.0.0.1:9", "https://127.0.0.1:9/scm");
    give(
        &mut fixture,
        &[
            (gitlab(url), TOKEN),
            (json!({ "url": bearer, "kind": "bitbucket" }), TOKEN),
        ],
    );
    fs::write(fixture.config.home.join(".gitconfig"), config).unwrap();
    fs::create_dir_all(fixture.layout.checkout()).unwrap();
    let modules = ModuleAccess {
        operators: fixture.config.logins.clone(),
        ..ModuleAccess::default()
    };
    let mut env = child_env(&fixture, variables);
    let opening = modules.open(
        fixture.layout.private(),
        &fixture.config.path,
        fixture.layout.checkout(),
        &mut env,
    );
    let open = opening.await.unwrap().unwrap();
    let names: Vec<_> = env
        .iter()
        .filter(|(name, _)| name.to_string_lossy().starts_with("GIT_CONFIG_KEY_"))
        .map(|(_, value)| value.to_string_lossy().into_owned())
        .collect();
    let is_offered = names.iter().any(|name| name.starts_with("credential."));
    assert_eq!(is_offered, expected.is_empty(), "{names:?}");
    assert_eq!(names.contains(&"include.path".to_owned()), is_offered);
    match &*open.withheld {
        [] => assert!(expected.is_empty()),
        [only] => assert!(only.contains(url) && only.contains(expected), "{only}"),
        more => panic!("{more:?}"),
    }
}

#[tokio::test]
async fn an_address_that_the_run_replaces_gets_no_login() {
    let evil = Server::start(|_| {
        Response::new(401, "").with_header("WWW-Authenticate", "Basic realm=\"x\"")
    })
    .unwrap();
    let mut fixture = Fixture::new();
    let here = "https://git.acme.test";
    give(&mut fixture, &[(gitlab(here), TOKEN)]);
    fs::create_dir_all(fixture.layout.checkout()).unwrap();
    let modules = ModuleAccess {
        operators: fixture.config.logins.clone(),
        ..ModuleAccess::default()
    };
    let instead = [
        ("GIT_CONFIG_COUNT", "1"),
        (
            "GIT_CONFIG_KEY_0",
            &*format!("url.{}.insteadOf", evil.url()),
        ),
        ("GIT_CONFIG_VALUE_0", here),
    ];
    let address = format!("{here}/repo.git");
    let (ok, _) = git_of_init(&fixture, &modules, &instead, &["ls-remote", &address]).await;
    assert!(!ok && !evil.requests().is_empty());
    assert_eq!(with_login(&evil), 0);
}

#[tokio::test]
async fn the_executors_identity_is_withheld_like_a_login_of_the_operator() {
    let fixture = Fixture::new();
    fs::create_dir_all(fixture.layout.checkout()).unwrap();
    let modules = |is_own_identity| ModuleAccess {
        login: Some(super::super::git::Login {
            base: git_address::Address::parse("https://dev.azure.com").unwrap(),
            username: "dummy".into(),
            password: TOKEN.into(),
        }),
        is_own_identity,
        ..ModuleAccess::default()
    };
    for (is_own_identity, withheld) in [(true, 1), (false, 0)] {
        let mut env = child_env(&fixture, &[("GIT_SSL_NO_VERIFY", "1")]);
        let modules = modules(is_own_identity);
        let opening = modules.open(
            fixture.layout.private(),
            &fixture.config.path,
            fixture.layout.checkout(),
            &mut env,
        );
        let open = opening.await.unwrap().unwrap();
        assert_eq!(open.withheld.len(), withheld);
        let is_offered = env.get("GIT_CONFIG_VALUE_0").is_some();
        assert_eq!(is_offered, !is_own_identity);
    }
}
