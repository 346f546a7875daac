//! The server, between a client and a registry of the test.

use std::fs;
use std::sync::mpsc;

use job_contract::JobData;
use provider_store::ProviderStore;
use reqwest::redirect::Policy;
use serde_json::json;
use tempfile::TempDir;
use test_peers::http::{Response as Answer, Server};

use super::*;

const CONTENT: &str = "the archive";
/// Nothing listens there.
const ELSEWHERE: &str = "https://127.0.0.1:1/null.zip";
const DOCUMENT: &str = "acme/null/1.0.0/download/linux/amd64";
const VERSIONS: &str = "acme/null/versions?page=2";

/// A registry of these tests is never too slow by chance.
const LONG: Duration = Duration::from_mins(5);

struct Fixture {
    folder: TempDir,
    upstream: Server,
    server: RegistryServer,
    base: String,
    client: reqwest::Client,
}

impl Fixture {
    fn new(document: impl Fn() -> Answer + Send + Sync + 'static) -> Self {
        Self::waiting(LONG, document)
    }

    /// With a server that waits so long for a document.
    fn waiting(limit: Duration, document: impl Fn() -> Answer + Send + Sync + 'static) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let folder = tempfile::tempdir().unwrap();
        let upstream = Server::start(move |request| match request.path.as_str() {
            "/v1/acme/null/1.0.0/download/linux/amd64" => document(),
            _ => Answer::new(404, ""),
        });
        let upstream = upstream.unwrap();
        let at = |path: &str| Url::parse(&format!("{}{path}", upstream.url())).unwrap();
        let server = RegistryServer::start(Setup {
            hosts: vec![Host {
                name: "registry.example.test".to_owned(),
                services: Services {
                    providers: at("/v1/"),
                    others: vec![("modules.v1".to_owned(), at("/modules/"))],
                },
            }],
            patience: Patience {
                services: LONG,
                document: limit,
                archive: LONG,
            },
            platform: "linux_amd64".to_owned(),
            store: SharedStore::new(ProviderStore::new(folder.path().join("store"))),
            fetcher: Fetcher::patient().unwrap(),
            scratch: folder.path().to_owned(),
        });
        let server = server.unwrap();
        let hosts = server.hosts();
        let services: Vec<_> = hosts[0].services.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(services, ["modules.v1", "providers.v1"]);
        assert_eq!(hosts[0].services[0].1, at("/modules/").as_str());
        let client = reqwest::Client::builder().redirect(Policy::none()).build();
        Self {
            base: hosts[0].services[1].1.clone(),
            client: client.unwrap(),
            folder,
            upstream,
            server,
        }
    }

    async fn get(&self, url: &str) -> reqwest::Response {
        self.client.get(url).send().await.unwrap()
    }

    /// Where the tool is sent.
    async fn redirected(&self, url: &str) -> String {
        let answer = self.get(url).await;
        assert_eq!(answer.status(), StatusCode::TEMPORARY_REDIRECT, "{url}");
        answer.headers()[LOCATION].to_str().unwrap().to_owned()
    }

    /// Where the tool is sent for the document.
    async fn redirected_for_document(&self) {
        let address = self.redirected(&format!("{}{}", self.base, DOCUMENT)).await;
        assert_eq!(address, format!("{}/v1/{}", self.upstream.url(), DOCUMENT));
    }

    async fn document(&self) -> Value {
        let answer = self.get(&format!("{}{}", self.base, DOCUMENT)).await;
        assert_eq!(answer.status(), StatusCode::OK);
        answer.json().await.unwrap()
    }
}

fn sha256() -> String {
    hex(&Sha256::digest(CONTENT))
}

fn document() -> Answer {
    let document = json!({
        "filename": "null.zip", "download_url": ELSEWHERE, "shasum": sha256(),
        "shasums_url": "sums", "shasums_signature_url": "/sums.sig", "signing_keys": {"kept": true},
    });
    Answer::new(200, document.to_string())
}

#[tokio::test]
async fn the_tool_asks_the_registry_for_all_but_archives() {
    let fixture = Fixture::new(document);
    let (base, upstream) = (&fixture.base, fixture.upstream.url());
    let versions = fixture.redirected(&format!("{base}{VERSIONS}")).await;
    assert_eq!(versions, format!("{upstream}/v1/{VERSIONS}"));
    let other = DOCUMENT.replace("amd64", "arm64");
    assert_eq!(fixture.redirected(&format!("{base}{other}")).await, format!("{upstream}/v1/{other}"));
    assert_eq!(fixture.upstream.requests().len(), 0);

    let post = fixture.client.post(format!("{base}{VERSIONS}")).send().await;
    assert_eq!(post.unwrap().status(), StatusCode::METHOD_NOT_ALLOWED);
    let password = fixture.server.secret().expose_secret().to_owned();
    let refused = [
        base.replace(&password, "x") + VERSIONS,
        base.replace("/registry/0/", "/registry/1/") + VERSIONS,
        format!("{base}%2e%2e/versions"),
        format!("{base}//versions"),
        base.replace("/registry/0/", "/archive/0"),
        base.replace("/registry/0/", "/other/0"),
        base.replace(&format!("{password}/registry/0/"), ""),
    ];
    for url in refused {
        assert_eq!(fixture.get(&url).await.status(), StatusCode::NOT_FOUND, "{url}");
    }
    assert_eq!(fixture.upstream.requests().len(), 0);
    assert_eq!(fixture.server.finish().await, Served::default());
}

#[tokio::test]
async fn an_archive_comes_from_the_store_and_else_from_where_the_registry_has_it() {
    let fixture = Fixture::new(document);
    let document = fixture.document().await;
    let upstream = fixture.upstream.url();
    let sums = DOCUMENT.replace("/amd64", "/sums");
    assert_eq!(document["shasums_url"], format!("{upstream}/v1/{sums}"));
    assert_eq!(document["shasums_signature_url"], format!("{upstream}/sums.sig"));
    assert_eq!(document["signing_keys"], json!({"kept": true}));
    let archive = document["download_url"].as_str().unwrap();
    assert_eq!(fixture.redirected(archive).await, ELSEWHERE);

    let file = fixture.folder.path().join("archive");
    fs::write(&file, CONTENT).unwrap();
    let package = Package::new("registry.example.test/acme/null", "1.0.0", "linux_amd64");
    let store = ProviderStore::new(fixture.folder.path().join("store"));
    store.publish(&package.unwrap(), &file, &sha256()).unwrap();
    let stored = fixture.get(archive).await;
    assert_eq!(stored.content_length(), Some(CONTENT.len() as u64));
    assert_eq!(stored.text().await.unwrap(), CONTENT);
    let served = fixture.server.finish().await;
    assert_eq!((served.stored, served.fetched), (1, 0));
    assert_eq!(served.failures.len(), 1, "{served:?}");
    let names_both = ["registry.example.test/acme/null 1.0.0", "127.0.0.1:1"]
        .iter()
        .all(|name| served.failures[0].contains(name));
    assert!(names_both, "{served:?}");
    let left: Vec<_> = fs::read_dir(fixture.folder.path()).unwrap().collect();
    assert_eq!(left.len(), 2, "copies are left: {left:?}");
}

#[tokio::test]
async fn documents_that_say_nothing_useful_are_left_to_the_tool() {
    let insecure = json!({"download_url": "http://127.0.0.1:1/x", "shasum": sha256()}).to_string();
    let unchecked = json!({"download_url": ELSEWHERE}).to_string();
    let documents = [
        (404, "no such package".to_owned()),
        (200, "[]".to_owned()),
        (200, insecure),
        (200, unchecked),
        (200, " ".repeat(2 << 20)),
    ];
    for (code, text) in documents {
        let fixture = Fixture::new(move || Answer::new(code, text.clone()));
        fixture.redirected_for_document().await;
    }
}

#[tokio::test]
async fn a_slow_registry_is_asked_by_the_tool_alone() {
    let (answer, wait) = mpsc::channel::<()>();
    let wait = Mutex::new(wait);
    let fixture = Fixture::waiting(Duration::from_millis(10), move || {
        let _ = wait.lock().unwrap().recv();
        document()
    });
    fixture.redirected_for_document().await;
    assert_eq!(fixture.upstream.requests().len(), 1);
    // The tool's second attempt has all its time.
    fixture.redirected_for_document().await;
    assert_eq!(fixture.upstream.requests().len(), 1);
    drop(answer);
}

#[test]
fn the_tools_time_limit_is_that_of_the_run() {
    for (set, seconds) in [(None, 10), (Some("60"), 60), (Some("0"), 10), (Some("1m"), 10)] {
        let mut job = JobData::default();
        if let Some(set) = set {
            job.environment_variables
                .insert(TOOLS_TIMEOUT_VARIABLE.to_owned(), set.to_owned());
        }
        let env = ChildEnv::new(Vec::new(), &[], &job).unwrap();
        let patience = Patience::of_tool(&env);
        assert_eq!(patience.archive, Duration::from_secs(2 * seconds), "{set:?}");
        assert_eq!(patience.document * 5, 2 * Duration::from_secs(seconds));
    }
}
