//! Each credential arrives at its server, and is found nowhere else.

use std::fs;
use std::process::Command;

use git_address::{AllowList, Match};
use job_contract::{Exit, JobData};
use rstest::rstest;
use test_peers::git_http::{self, GitHttpOptions};
use test_peers::http::{Response, Server};
use test_peers::port::Port;
use test_peers::sshd::{self, Sshd};

use super::super::git::GitFailure;
use super::super::*;
use super::support::*;

const TOKEN: &str = "ghs_5up3rs3cr3t";

fn demanding(credentials: &str) -> GitHttpOptions {
    GitHttpOptions {
        credentials: Some(credentials.to_owned()),
        ..GitHttpOptions::default()
    }
}

#[rstest]
#[case("GITHUB", Some("OAUTH"), "ghs_5up3rs3cr3t:")]
#[case("GITHUB", Some("STANDALONE"), "x-access-token:ghs_5up3rs3cr3t")]
#[case("GITLAB", Some("OAUTH"), "oauth2:ghs_5up3rs3cr3t")]
#[case("BITBUCKET", None, "x-token-auth:ghs_5up3rs3cr3t")]
#[case("AZURE_DEVOPS", None, "dummy:ghs_5up3rs3cr3t")]
#[tokio::test]
async fn a_token_reaches_only_the_server(
    #[case] vcs_type: &str,
    #[case] connection_type: Option<&str>,
    #[case] credentials: &str,
) {
    let repository = Repository::new();
    let options = GitHttpOptions {
        tls: true,
        ..demanding(credentials)
    };
    let server = git_http::serve(repository.served(), options).unwrap();
    let mut fixture = Fixture::new();
    let bundle = fixture.work.path().join("ca.pem");
    fs::write(&bundle, server.certificate().unwrap()).unwrap();
    fixture.set("SSL_CERT_FILE", bundle);
    let job = JobData {
        vcs_type: Some(vcs_type.to_owned()),
        connection_type: connection_type.map(str::to_owned),
        ..github(&format!("{}/repo.git", server.url()), TOKEN)
    };
    fixture.prepare(&job).await.unwrap();
    assert_eq!(fixture.main_tf(), "# two");
    assert!(fixture.commands().contains("clone"));
    assert!(!fixture.commands().contains(TOKEN));
    assert_eq!(fixture.leaks(TOKEN), Vec::<PathBuf>::new());
    // The session's files are removed as soon as git has ended.
    assert_eq!(
        files_holding(fixture.layout.private(), TOKEN),
        Vec::<PathBuf>::new()
    );
}

#[tokio::test]
async fn an_untrusted_certificate_is_named() {
    let repository = Repository::new();
    let options = GitHttpOptions {
        tls: true,
        ..GitHttpOptions::default()
    };
    let server = git_http::serve(repository.served(), options).unwrap();
    let source = format!("{}/repo.git", server.url());
    let error = Fixture::new()
        .prepare(&job(&source, "main"))
        .await
        .unwrap_err();
    assert_failure(&error, GitFailure::Certificate);
}

#[rstest]
#[case("someone:p%40ss-w0rd@", "someone:p@ss-w0rd")]
#[case("t0k3n-alone@", "t0k3n-alone:")]
#[tokio::test]
async fn credentials_in_the_address_work_and_are_not_kept(
    #[case] userinfo: &str,
    #[case] credentials: &str,
) {
    let repository = Repository::new();
    let server = git_http::serve(repository.served(), demanding(credentials)).unwrap();
    let fixture = Fixture::new();
    let source = format!("http://{userinfo}{}/repo.git", server.host());
    fixture.prepare(&job(&source, "main")).await.unwrap();
    for secret in ["ss-w0rd", "t0k3n-alone"] {
        assert!(!fixture.commands().contains(secret));
        assert!(fixture.leaks(secret).is_empty());
    }
    let origin = git(fixture.layout.checkout(), &["remote", "get-url", "origin"]);
    assert_eq!(origin, format!("http://{}/repo.git", server.host()));
}

#[tokio::test]
async fn refused_credentials_are_named_and_not_shown() {
    let repository = Repository::new();
    let server = git_http::serve(repository.served(), demanding("x-access-token:right")).unwrap();
    let source = format!("{}/repo.git", server.url());
    for job in [github(&source, TOKEN), job(&source, "main")] {
        let error = Fixture::new().prepare(&job).await.unwrap_err();
        assert_failure(&error, GitFailure::AuthRefused);
        assert_eq!(error.exit(), Exit::BadJobData);
        assert!(error.to_string().starts_with(&format!(
            "could not clone `{source}`: the server refused the credentials: "
        )));
        assert!(!error.to_string().contains(TOKEN));
    }
}

#[tokio::test]
async fn the_message_of_a_server_is_shown_without_the_token() {
    let server = Server::start(|request| match request.basic_auth() {
        None => Response::new(401, "").with_header("WWW-Authenticate", "Basic realm=\"x\""),
        Some(sent) => Response::new(403, format!("no entry for {sent}"))
            .with_header("Content-Type", "text/plain"),
    })
    .unwrap();
    let source = format!("{}/repo.git", server.url());
    let error = Fixture::new()
        .prepare(&github(&source, TOKEN))
        .await
        .unwrap_err();
    assert_failure(&error, GitFailure::AuthRefused);
    assert!(!error.to_string().contains(TOKEN), "{error}");
}

#[tokio::test]
async fn a_submodule_on_another_host_never_sees_the_token() {
    let inner = Repository::new();
    let outer = Repository::new();
    let credentials = format!("x-access-token:{TOKEN}");
    let elsewhere = git_http::serve(inner.served(), demanding(&credentials)).unwrap();
    let here = git_http::serve(outer.served(), demanding(&credentials)).unwrap();
    let tree = outer.tree();
    let link = format!("160000,{},sub", inner.last);
    git(&tree, &["update-index", "--add", "--cacheinfo", &link]);
    fs::write(
        tree.join(".gitmodules"),
        format!(
            "[submodule \"sub\"]\n\tpath = sub\n\turl = {}/repo.git\n",
            elsewhere.url()
        ),
    )
    .unwrap();
    git(&tree, &["add", ".gitmodules"]);
    git(&tree, &["commit", "-q", "-m", "submodule"]);
    outer.publish();
    let fixture = Fixture::new();
    let job = github(&format!("{}/repo.git", here.url()), TOKEN);
    let error = fixture.prepare(&job).await.unwrap_err();
    assert!(error.to_string().contains("submodules"), "{error}");
    assert_failure(&error, GitFailure::AuthRefused);
    assert!(here.requests().iter().any(|r| r.basic_auth().is_some()));
    assert!(!elsewhere.requests().is_empty());
    assert!(
        elsewhere
            .requests()
            .iter()
            .all(|r| r.basic_auth().is_none())
    );
}

#[tokio::test]
async fn a_submodule_on_the_same_host_uses_the_same_token() {
    let inner = Repository::new();
    let outer = Repository::new();
    fs::rename(inner.bare(), outer.served().join("inner.git")).unwrap();
    let credentials = format!("x-access-token:{TOKEN}");
    let server = git_http::serve(outer.served(), demanding(&credentials)).unwrap();
    let tree = outer.tree();
    let link = format!("160000,{},sub", inner.last);
    git(&tree, &["update-index", "--add", "--cacheinfo", &link]);
    let address = format!("{}/inner.git", server.url());
    let text = format!("[submodule \"sub\"]\n\tpath = sub\n\turl = {address}\n");
    fs::write(tree.join(".gitmodules"), text).unwrap();
    git(&tree, &["add", ".gitmodules"]);
    git(&tree, &["commit", "-q", "-m", "submodule"]);
    outer.publish();
    let fixture = Fixture::new();
    let job = github(&format!("{}/repo.git", server.url()), TOKEN);
    fixture.prepare(&job).await.unwrap();
    assert!(fixture.layout.checkout().join("sub/main.tf").exists());
    assert!(fixture.leaks(TOKEN).is_empty());
    assert!(!fixture.commands().contains(TOKEN));
}

fn ssh_job(server: &Sshd, repository: &Repository) -> JobData {
    JobData {
        vcs_type: Some("SSH~id_rsa".to_owned()),
        access_token: Some(server.client_key().unwrap()),
        ..job(&server.url(&repository.bare()), "main")
    }
}

#[tokio::test]
async fn ssh_clones_with_the_key_of_the_job_in_any_line_ends() {
    let server = Sshd::start().unwrap();
    let repository = Repository::new();
    let mut job = ssh_job(&server, &repository);
    let dos = server
        .client_key()
        .unwrap()
        .trim_end()
        .replace('\n', "\r\n");
    job.access_token = Some(dos);
    let fixture = Fixture::new();
    fixture
        .prepare(&job)
        .await
        .unwrap_or_else(|e| panic!("{e}\n{}", server.log()));
    assert_eq!(fixture.main_tf(), "# two");
    let secret_line = server
        .client_key()
        .unwrap()
        .lines()
        .nth(2)
        .unwrap()
        .to_owned();
    assert!(fixture.leaks(&secret_line).is_empty());
    assert!(!fixture.commands().contains(&secret_line));
}

#[tokio::test]
async fn init_reaches_modules_with_the_clone_key_or_the_module_key() {
    let server = Sshd::start().unwrap();
    let repository = Repository::new();
    let with_clone_key = ssh_job(&server, &repository);
    let with_module_key = JobData {
        module_ssh_key: Some(server.client_key().unwrap()),
        ..job(&repository.bare().display().to_string(), "main")
    };
    for job in [with_clone_key, with_module_key] {
        let fixture = Fixture::new();
        let workspace = fixture.prepare(&job).await.unwrap();
        let listing = Command::new("git")
            .args([
                "ls-remote",
                &server.url(&repository.bare()),
                "refs/heads/main",
            ])
            .env("GIT_SSH_COMMAND", workspace.init_ssh_command.unwrap())
            .output()
            .unwrap();
        assert!(
            String::from_utf8_lossy(&listing.stdout).starts_with(&repository.last),
            "{listing:?}"
        );
    }
}

#[tokio::test]
async fn host_keys_are_checked_against_a_configured_file() {
    let server = Sshd::start().unwrap();
    let repository = Repository::new();
    let job = ssh_job(&server, &repository);
    let mut fixture = Fixture::new();
    let hosts_file = fixture.work.path().join("known hosts");
    fixture.config.known_hosts = Some(hosts_file.clone());

    fs::write(&hosts_file, server.known_hosts_line().unwrap()).unwrap();
    fixture.prepare(&job).await.unwrap();

    let other = Sshd::start().unwrap().known_hosts_line().unwrap();
    let key = other.split_once(' ').unwrap().1;
    let host = server.known_hosts_line().unwrap();
    let host = host.split(' ').next().unwrap();
    for content in [String::new(), format!("{host} {key}")] {
        fs::write(&hosts_file, content).unwrap();
        let mut fixture = Fixture::new();
        fixture.config.known_hosts = Some(hosts_file.clone());
        let error = fixture.prepare(&job).await.unwrap_err();
        assert_failure(&error, GitFailure::HostKey);
        assert_eq!(error.exit(), Exit::BadJobData);
    }
}

#[tokio::test]
async fn a_wrong_or_broken_key_is_named() {
    let server = Sshd::start().unwrap();
    let repository = Repository::new();
    let fixture = Fixture::new();
    let mut job = ssh_job(&server, &repository);
    let stranger = sshd::generate_key(&fixture.work.path().join("stranger"), "ed25519").unwrap();
    job.access_token = Some(stranger);
    let error = fixture.prepare(&job).await.unwrap_err();
    assert_failure(&error, GitFailure::AuthRefused);

    job.access_token = Some("-----BEGIN RSA PRIVATE KEY-----\nnot one\n".to_owned());
    let error = fixture.prepare(&job).await.unwrap_err();
    assert_failure(&error, GitFailure::PrivateKey);

    job.access_token = None;
    let error = fixture.prepare(&job).await.unwrap_err();
    assert!(error.to_string().contains("SSH~id_rsa"), "{error}");
}

#[tokio::test]
async fn removing_the_layout_removes_every_secret() {
    let repository = Repository::new();
    let fixture = Fixture::new();
    let job = JobData {
        module_ssh_key: Some("m0dul3k3y".to_owned()),
        environment_variables: [(
            "TERRAKUBE_AWS_CREDENTIALS_FILE".to_owned(),
            "aw5jwt".to_owned(),
        )]
        .into(),
        ..job(&repository.bare().display().to_string(), "main")
    };
    let workspace = fixture.prepare(&job).await.unwrap();
    let token_file = &workspace.environment["AWS_WEB_IDENTITY_TOKEN_FILE"];
    assert_eq!(fs::read_to_string(token_file).unwrap(), "aw5jwt");
    for secret in ["m0dul3k3y", "aw5jwt"] {
        assert!(fixture.leaks(secret).is_empty());
        assert_eq!(files_holding(fixture.layout.private(), secret).len(), 1);
    }
    let Fixture { work, layout, .. } = fixture;
    layout.remove().unwrap();
    for secret in ["m0dul3k3y", "aw5jwt"] {
        assert!(files_holding(work.path(), secret).is_empty());
    }
}

mod azure {
    use super::*;

    const ANSWER: &str = r#"{"access_token":"azur3t0k3n","expires_in":3600}"#;

    async fn prepare_with(environment: &[(&str, &str)]) -> Result<(), StepError> {
        let repository = Repository::new();
        let server = git_http::serve(repository.served(), demanding("dummy:azur3t0k3n")).unwrap();
        let mut fixture = Fixture::new();
        let rule = AllowList::new(&format!("{}/.*", server.url()), Match::Full).unwrap();
        fixture.config.allowed = Some(Arc::new(rule));
        fixture.config.azure = AzureEnvironment::from_lookup(|name| {
            let found = environment.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| (*value).to_owned())
        });
        let job = JobData {
            vcs_type: Some("AZURE_SP_MI".to_owned()),
            access_token: Some(String::new()),
            ..job(&format!("{}/repo.git", server.url()), "main")
        };
        fixture.prepare(&job).await.map(drop)
    }

    fn form(body: &[u8]) -> BTreeMap<String, String> {
        url::form_urlencoded::parse(body).into_owned().collect()
    }

    #[tokio::test]
    async fn a_server_that_a_workspace_names_gets_no_token_of_the_executor() {
        let (authority, server) = (
            Server::start(|_| Response::new(200, ANSWER)).unwrap(),
            Server::start(|_| Response::new(401, "")).unwrap(),
        );
        let mut fixture = Fixture::new();
        fixture.config.azure.identity_endpoint = Some(authority.url());
        fixture.config.azure.identity_header = Some("h".into());
        let job = JobData {
            vcs_type: Some("AZURE_SP_MI".to_owned()),
            ..job(&format!("{}/repo.git", server.url()), "main")
        };
        let error = fixture.prepare(&job).await.unwrap_err();
        assert!(error.to_string().contains("is not used for"), "{error}");
        assert_eq!(error.exit(), Exit::BadJobData);
        assert!(authority.requests().is_empty() && server.requests().is_empty());
    }

    const SCOPE: &str = "499b84ac-1321-427f-aa17-267ca6975798/.default";

    #[tokio::test]
    async fn a_client_secret_gets_a_token() {
        let authority = Server::start(|_| Response::new(200, ANSWER)).unwrap();
        prepare_with(&[
            ("AZURE_AUTHORITY_HOST", &format!("{}/", authority.url())),
            ("AZURE_TENANT_ID", "tenant"),
            ("AZURE_CLIENT_ID", "client"),
            ("AZURE_CLIENT_SECRET", "s3cr3t&x"),
        ])
        .await
        .unwrap();
        let request = &authority.requests()[0];
        assert_eq!(request.path, "/tenant/oauth2/v2.0/token");
        let form = form(&request.body);
        assert_eq!(form["grant_type"], "client_credentials");
        assert_eq!(form["scope"], SCOPE);
        assert_eq!(form["client_id"], "client");
        assert_eq!(form["client_secret"], "s3cr3t&x");
    }

    #[tokio::test]
    async fn a_federated_token_gets_a_token() {
        let authority = Server::start(|_| Response::new(200, ANSWER)).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        fs::write(&file, "jwt\n").unwrap();
        prepare_with(&[
            ("AZURE_AUTHORITY_HOST", &authority.url()),
            ("AZURE_TENANT_ID", "tenant"),
            ("AZURE_CLIENT_ID", "client"),
            ("AZURE_FEDERATED_TOKEN_FILE", file.to_str().unwrap()),
        ])
        .await
        .unwrap();
        let form = form(&authority.requests()[0].body);
        assert_eq!(form["client_assertion"], "jwt");
        assert_eq!(
            form["client_assertion_type"],
            "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
        );
    }

    #[tokio::test]
    async fn managed_identities_are_requested_from_the_configured_endpoint() {
        let hosted = Server::start(|_| Response::new(200, ANSWER)).unwrap();
        prepare_with(&[
            ("IDENTITY_ENDPOINT", &format!("{}/msi/token", hosted.url())),
            ("IDENTITY_HEADER", "h3ad3r"),
            ("AZURE_CLIENT_ID", "client"),
        ])
        .await
        .unwrap();
        let request = &hosted.requests()[0];
        assert_eq!(request.path, "/msi/token");
        assert_eq!(request.header("x-identity-header"), Some("h3ad3r"));
        assert!(request.query.contains("client_id=client"));

        let metadata = Server::start(|_| Response::new(200, ANSWER)).unwrap();
        prepare_with(&[("AZURE_POD_IDENTITY_AUTHORITY_HOST", &metadata.url())])
            .await
            .unwrap();
        let request = &metadata.requests()[0];
        assert_eq!(request.path, "/metadata/identity/oauth2/token");
        assert_eq!(request.header("metadata"), Some("true"));
        assert!(
            request
                .query
                .contains("resource=499b84ac-1321-427f-aa17-267ca6975798")
        );
    }

    #[tokio::test]
    async fn a_refusal_contains_the_reason_but_not_the_secret() {
        let body = r#"{"error":"invalid_client","error_description":"AADSTS7000215: wrong.\r\nTrace ID: 1"}"#;
        let authority = Server::start(move |_| Response::new(401, body)).unwrap();
        let error = prepare_with(&[
            ("AZURE_AUTHORITY_HOST", &authority.url()),
            ("AZURE_TENANT_ID", "tenant"),
            ("AZURE_CLIENT_ID", "client"),
            ("AZURE_CLIENT_SECRET", "s3cr3t"),
        ])
        .await
        .unwrap_err();
        assert_eq!(
            error.to_string(),
            "could not acquire a token for Azure DevOps: the client secret was refused with status \
             401 Unauthorized: invalid_client: AADSTS7000215: wrong."
        );
        assert_eq!(error.exit(), Exit::BadJobData);
        assert_eq!(authority.requests().len(), 1);
    }

    #[tokio::test]
    async fn requests_to_a_starting_metadata_service_are_retried_unlike_those_to_a_missing_one() {
        let metadata = Server::start({
            let calls = std::sync::atomic::AtomicU32::new(0);
            move |_| match calls.fetch_add(1, Ordering::SeqCst) {
                0 => Response::new(503, ""),
                _ => Response::new(200, ANSWER),
            }
        })
        .unwrap();
        let url = metadata.url();
        prepare_with(&[("AZURE_POD_IDENTITY_AUTHORITY_HOST", &url)])
            .await
            .unwrap();
        let closed_port = Port::take().unwrap();
        let url = format!("http://{}", closed_port.address());
        let error = prepare_with(&[("AZURE_POD_IDENTITY_AUTHORITY_HOST", &url)])
            .await
            .unwrap_err();
        assert!(
            error.to_string().contains("names no Azure identity"),
            "{}",
            error.to_string()
        );
        assert_eq!(error.exit(), Exit::BadJobData);
    }
}
