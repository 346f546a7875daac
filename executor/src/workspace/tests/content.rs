//! Tarballs and folders.

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use flate2::Compression;
use flate2::write::GzEncoder;
use job_contract::job::REMOTE_CONTENT;
use job_contract::{Exit, JobData};
use reqwest::RequestBuilder;
use rstest::rstest;
use test_peers::http::{Response, Server};
use test_peers::port::Port;
use url::Url;

use super::super::*;
use super::support::*;

const TOKEN: &str = "pl4tf0rm";

fn tarball() -> Vec<u8> {
    let encoder = GzEncoder::new(Vec::new(), Compression::fast());
    let mut builder = tar::Builder::new(encoder);
    for (name, content) in [("main.tf", "# content"), ("live/eu/main.tf", "# eu")] {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        builder
            .append_data(&mut header, name, content.as_bytes())
            .unwrap();
    }
    let mut encoder = builder.into_inner().unwrap();
    encoder.flush().unwrap();
    encoder.finish().unwrap()
}

fn content_job(source: &str) -> JobData {
    job(source, REMOTE_CONTENT)
}

fn with_token(server: &Server) -> Fixture {
    let mut fixture = Fixture::new();
    fixture.config.content_token = Some(ContentToken {
        origins: vec![Url::parse(&server.url()).unwrap().origin()],
        relay: None,
        authorize: Arc::new(|request| request.bearer_auth(TOKEN)),
    });
    fixture
}

/// A token is valid for a minute, which one slow server may take.
#[tokio::test]
async fn every_attempt_has_a_new_token() {
    let server = Server::start(|_| Response::new(503, "")).unwrap();
    let mut fixture = with_token(&server);
    let minted = AtomicUsize::new(0);
    let authorize =
        move |request: RequestBuilder| request.bearer_auth(minted.fetch_add(1, Ordering::Relaxed));
    fixture.config.content_token.as_mut().unwrap().authorize = Arc::new(authorize);
    let source = format!("{}/content.tar.gz", server.url());
    fixture.prepare(&content_job(&source)).await.unwrap_err();
    let brought = ["Bearer 0", "Bearer 1", "Bearer 2"].map(|token| Some(token.to_owned()));
    assert_eq!(tokens(&server), brought);
}

fn tokens(server: &Server) -> Vec<Option<String>> {
    let requests = server.requests();
    requests
        .iter()
        .map(|request| request.header("authorization").map(str::to_owned))
        .collect()
}

#[tokio::test]
async fn a_local_tarball_is_unpacked_and_has_no_commit() {
    let fixture = Fixture::new();
    let file = fixture.work.path().join("terraformContent.tar.gz");
    fs::write(&file, tarball()).unwrap();
    let workspace = fixture
        .prepare(&content_job(file.to_str().unwrap()))
        .await
        .unwrap();
    assert_eq!(workspace.commit_id, "000000000");
    assert_eq!(fixture.main_tf(), "# content");
    assert!(!workspace.root.join("commitHash.info").exists());
    assert!(!workspace.root.join("terraformContent.tar.gz").exists());

    let again = Fixture::new();
    let url = format!("file://{}", file.display());
    again.prepare(&content_job(&url)).await.unwrap();
    assert_eq!(again.main_tf(), "# content");
}

#[test]
fn the_relay_has_what_is_below_the_public_address_of_the_platform() {
    let relay = Relay {
        public: Url::parse("https://terrakube.example.test/api/").unwrap(),
        base: Url::parse("https://hub/leases/1/platform").unwrap(),
    };
    let content = "https://terrakube.example.test/api/remote/v2/x/content.tar.gz?a=b";
    assert_eq!(
        relay.address(&Url::parse(content).unwrap()).as_str(),
        "https://hub/leases/1/platform/remote/v2/x/content.tar.gz?a=b"
    );
}

#[tokio::test]
async fn content_comes_through_the_proxy_unless_its_host_needs_none() {
    let server = Server::start(|_| Response::new(200, tarball())).unwrap();
    let mut fixture = Fixture::new();
    fixture.set("http_proxy", server.url());
    let source = "http://platform.example.test/content.tar.gz";
    fixture.prepare(&content_job(source)).await.unwrap();
    let asked = server.requests();
    let host = asked[0].header("host").map(str::to_owned);
    assert_eq!(
        (asked.len(), host.as_deref()),
        (1, Some("platform.example.test"))
    );

    let mut fixture = Fixture::new();
    // Nobody listens there.
    fixture.set("http_proxy", "http://127.0.0.1:1");
    fixture.set("no_proxy", "127.0.0.1");
    let source = format!("{}/content.tar.gz", server.url());
    fixture.prepare(&content_job(&source)).await.unwrap();
}

#[tokio::test]
async fn the_token_is_sent_to_the_platform_and_not_to_redirect_targets() {
    let elsewhere = Server::start(|_| Response::new(200, tarball())).unwrap();
    let target = format!("{}/blob?sig=1", elsewhere.url());
    let platform =
        Server::start(move |_| Response::new(302, "").with_header("Location", &target)).unwrap();
    let fixture = with_token(&platform);
    fixture
        .prepare(&content_job(&format!("{}/content.tar.gz", platform.url())))
        .await
        .unwrap();
    assert_eq!(fixture.main_tf(), "# content");
    assert_eq!(tokens(&platform), [Some(format!("Bearer {TOKEN}"))]);
    assert_eq!(tokens(&elsewhere), [None]);
}

#[tokio::test]
async fn another_host_gets_no_token() {
    let platform = Server::start(|_| Response::new(200, tarball())).unwrap();
    let other = Server::start(|_| Response::new(200, tarball())).unwrap();
    let fixture = with_token(&platform);
    let source = format!("{}/content.tar.gz", other.url());
    fixture.prepare(&content_job(&source)).await.unwrap();
    assert_eq!(tokens(&other), [None]);
}

#[test]
fn scheme_host_and_port_decide_about_the_token() {
    let token = ContentToken {
        origins: vec![Url::parse("https://api.example.test").unwrap().origin()],
        relay: None,
        authorize: Arc::new(|request| request.bearer_auth(TOKEN)),
    };
    for (url, shown) in [
        ("https://api.example.test/remote/c.tar.gz", true),
        ("https://api.example.test:443/c.tar.gz", true),
        ("http://api.example.test/c.tar.gz", false),
        ("https://api.example.test:8443/c.tar.gz", false),
        ("https://api.example.test.evil.test/c.tar.gz", false),
    ] {
        assert_eq!(token.is_for(&Url::parse(url).unwrap()), shown, "{url}");
    }
}

#[rstest]
#[case(401, Exit::BadJobData, 1)]
#[case(404, Exit::BadJobData, 1)]
#[case(503, Exit::Infrastructure, 3)]
#[tokio::test]
async fn responses_without_content_have_errors_of_their_own(
    #[case] status: u16,
    #[case] exit: Exit,
    #[case] attempts: usize,
) {
    let server = Server::start(move |_| Response::new(status, "")).unwrap();
    let source = format!("{}/c.tar.gz?sig=s3cr3t", server.url());
    let error = Fixture::new()
        .prepare(&content_job(&source))
        .await
        .unwrap_err();
    assert_eq!(error.exit(), exit);
    assert!(error.to_string().contains(&status.to_string()), "{error}");
    assert!(!error.to_string().contains("s3cr3t"));
    assert_eq!(server.requests().len(), attempts);
}

#[tokio::test]
async fn an_interrupted_transfer_is_retried_and_then_reported() {
    let server = Server::start(|_| Response {
        cut_short: true,
        ..Response::new(200, tarball())
    })
    .unwrap();
    let error = Fixture::new()
        .prepare(&content_job(&server.url()))
        .await
        .unwrap_err();
    let text = error.to_string();
    assert!(text.starts_with("could not download the content"), "{text}");
    assert_eq!(error.exit(), Exit::Infrastructure);
    assert_eq!(server.requests().len(), 3);
}

#[tokio::test]
async fn an_unreachable_platform_is_not_the_users_fault() {
    let closed_port = Port::take().unwrap();
    let error = Fixture::new()
        .prepare(&content_job(&format!("http://{}", closed_port.address())))
        .await
        .unwrap_err();
    assert_eq!(error.exit(), Exit::Infrastructure);
    assert!(error.hint().is_some());
}

#[tokio::test]
async fn a_download_stops_at_the_limit() {
    let server = Server::start(|_| Response::new(200, vec![0x1f; 5000])).unwrap();
    let mut fixture = Fixture::new();
    fixture.config.archive_limits.max_bytes = 4999;
    let error = fixture
        .prepare(&content_job(&server.url()))
        .await
        .unwrap_err();
    let text = error.to_string();
    assert!(text.ends_with("is larger than 4999 bytes"), "{text}");
}

#[tokio::test]
async fn endless_redirects_and_other_schemes_end() {
    let server =
        Server::start(|_| Response::new(302, "").with_header("Location", "/again")).unwrap();
    let error = Fixture::new()
        .prepare(&content_job(&server.url()))
        .await
        .unwrap_err();
    assert!(error.to_string().contains("redirects too often"), "{error}");
    let server =
        Server::start(|_| Response::new(302, "").with_header("Location", "file:///etc/passwd"))
            .unwrap();
    let error = Fixture::new()
        .prepare(&content_job(&server.url()))
        .await
        .unwrap_err();
    assert_eq!(error.exit(), Exit::BadJobData);
}

#[rstest]
#[case("")]
#[case("ftp://host/x")]
#[case("nonsense")]
#[case("/nowhere/at/all.tar.gz")]
#[case("/dev/zero")]
#[tokio::test]
async fn unusable_addresses_of_content_are_user_errors(#[case] source: &str) {
    let error = Fixture::new()
        .prepare(&content_job(source))
        .await
        .unwrap_err();
    assert_eq!(error.exit(), Exit::BadJobData, "{error}");
}

fn workspace(root: &Path) -> Workspace {
    Workspace {
        root: fs::canonicalize(root).unwrap(),
        commit_id: String::new(),
        head: String::new(),
        branch_head: None,
        init_ssh_command: None,
        modules: ModuleAccess::default(),
        environment: BTreeMap::new(),
    }
}

fn in_folder(folder: Option<&str>) -> JobData {
    JobData {
        folder: folder.map(str::to_owned),
        ..JobData::default()
    }
}

#[rstest]
#[case(None, "")]
#[case(Some("/"), "")]
#[case(Some(""), "")]
#[case(Some("live/eu"), "live/eu")]
#[case(Some("/live/eu/"), "live/eu")]
#[case(Some("//live"), "live")]
#[case(Some("live,other"), "live")]
#[case(Some("live/../live"), "live")]
#[case(Some("inner-link"), "live")]
fn folders_are_found_below_the_root(#[case] folder: Option<&str>, #[case] expected: &str) {
    let root = tree();
    let workspace = workspace(&root.path().join("checkout"));
    let found = workspace.working_dir(&in_folder(folder)).unwrap();
    assert_eq!(
        found,
        workspace
            .root
            .join(expected)
            .components()
            .collect::<PathBuf>()
    );
}

#[rstest]
#[case("missing", "the folder `missing` does not exist in the source")]
#[case("main.tf", "`main.tf` in the source is not a folder")]
#[case("main.tf/x", "the folder `main.tf/x` does not exist in the source")]
#[case("../checkout-2", "the folder `../checkout-2` is outside the source")]
#[case("..", "the folder `..` is outside the source")]
#[case("outer-link", "the folder `outer-link` is outside the source")]
#[case("a\0b", "the folder `a\0b` does not exist in the source")]
fn other_folders_are_refused_by_name(#[case] folder: &str, #[case] message: &str) {
    let root = tree();
    let error = workspace(&root.path().join("checkout"))
        .working_dir(&in_folder(Some(folder)))
        .unwrap_err();
    assert_eq!(error.to_string(), message);
    assert_eq!(error.exit(), Exit::BadJobData);
    assert!(error.hint().is_some());
}

/// A checkout with a neighbour whose name has the same beginning.
fn tree() -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    let checkout = root.path().join("checkout");
    fs::create_dir_all(checkout.join("live/eu")).unwrap();
    fs::create_dir(root.path().join("checkout-2")).unwrap();
    fs::write(checkout.join("main.tf"), "").unwrap();
    std::os::unix::fs::symlink("live", checkout.join("inner-link")).unwrap();
    std::os::unix::fs::symlink("../checkout-2", checkout.join("outer-link")).unwrap();
    root
}
