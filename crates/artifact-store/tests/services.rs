//! Stores the same artifacts on real servers of every protocol, and on servers that misbehave.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::needless_pass_by_value,
    clippy::wildcard_imports,
    reason = "these are tests"
)]

#[path = "services/answers.rs"]
mod answers;
#[path = "services/conditions.rs"]
mod conditions;

use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use artifact_store::{
    AzureLogin, AzureSettings, Condition, Content, Digest, GcsLogin, GcsSettings, Handover,
    HttpUrl, RequestTiming, S3Credentials, S3Settings, ServedStore, StaticKeys, Store, StoreError,
    StoreSettings, Upload,
};
use bytes::Bytes;
use futures_util::TryStreamExt as _;
use futures_util::future::join_all;
use job_contract::keys::ObjectKey;
use secrecy::SecretString;
use tempfile::TempDir;
use test_peers::azurite::{self, Azurite};
use test_peers::gcs::{self, Gcs};
use test_peers::http::{Request, Response, Server, pass_on};
use test_peers::proxy::{Moment, Proxy};
use test_peers::s3::{self, S3};
use test_peers::wait;
use tokio_util::io::InspectReader;
use url::Url;

/// More than two parts, and no multiple of a part.
const LARGE: usize = 19 * 1024 * 1024 + 7;

fn timing() -> RequestTiming {
    RequestTiming {
        connect_timeout: wait::DEADLINE,
        read_timeout: wait::DEADLINE,
        request_timeout: wait::DEADLINE,
        retry_for: Duration::from_secs(1),
        first_pause: Duration::from_millis(10),
        longest_pause: Duration::from_millis(100),
    }
}

fn open(settings: StoreSettings) -> Store {
    open_with(settings, &timing())
}

/// Opens the store of a real server, which may be busy with other tests.
fn open_busy(settings: StoreSettings) -> Store {
    let timing = RequestTiming {
        retry_for: wait::DEADLINE,
        ..timing()
    };
    open_with(settings, &timing)
}

fn open_with(settings: StoreSettings, timing: &RequestTiming) -> Store {
    // A second installation leaves the first in force.
    let _ = rustls::crypto::ring::default_provider().install_default();
    Store::open_with(&settings, timing).unwrap()
}

fn s3_at(url: &str, bucket: &str, access_key: &str, secret_key: &str) -> StoreSettings {
    StoreSettings::S3(S3Settings {
        bucket: bucket.to_owned(),
        region: s3::REGION.to_owned(),
        endpoint: Some(HttpUrl {
            url: Url::parse(url).unwrap(),
            text: url.to_owned(),
        }),
        endpoint_region: None,
        path_style: true,
        credentials: S3Credentials::Keys(StaticKeys {
            access_key: SecretString::from(access_key),
            secret_key: SecretString::from(secret_key),
        }),
        role: None,
        handover: Handover::Outside,
        use_lockfile: false,
    })
}

fn s3_of(server: &S3) -> StoreSettings {
    s3_at(
        &server.url(),
        s3::BUCKET,
        server.access_key(),
        server.secret_key(),
    )
}

fn azure_of(server: &Azurite) -> StoreSettings {
    azure_at(&server.url(), server.account(), azurite::ACCOUNT_KEY)
}

fn azure_at(url: &str, account: &str, key: &str) -> StoreSettings {
    StoreSettings::Azure(AzureSettings {
        account: account.to_owned(),
        login: AzureLogin::Key(SecretString::from(key)),
        container: "states".to_owned(),
        resource_group: None,
        handover: Handover::Outside,
        endpoint: Url::parse(url).unwrap(),
    })
}

fn gcs_at(server: &Gcs, bucket: &str) -> StoreSettings {
    gcs_account_at(server, bucket, &server.url())
}

fn gcs_account_at(server: &Gcs, bucket: &str, url: &str) -> StoreSettings {
    StoreSettings::Gcs(GcsSettings {
        bucket: bucket.to_owned(),
        login: GcsLogin::Key(SecretString::from(server.service_account())),
        handover: Handover::Outside,
        endpoint: Url::parse(url).unwrap(),
    })
}

/// Checks what every store must do.
async fn keeps_what_it_is_given(store: &Store) {
    let folder = tempfile::tempdir().unwrap();
    small_objects_come_back(store, &folder).await;
    large_files_come_back(store, &folder).await;
    missing_and_empty_objects_differ(store, &folder).await;
}

async fn small_objects_come_back(store: &Store, folder: &TempDir) {
    let key = ObjectKey::step_output("o", "1", "s");
    assert_eq!(store.read(&key).await.unwrap(), None);
    for content in ["first", "second"] {
        let reference = store.put(&key, content).await.unwrap();
        assert_eq!(reference, store.reference(&key).await.unwrap());
        assert_eq!(store.read(&key).await.unwrap().unwrap(), content);
        let target = folder.path().join(content);
        let digest = store.fetch(&reference, &target).await.unwrap();
        assert_eq!(fs::read_to_string(&target).unwrap(), content);
        assert_eq!(digest, Digest::of(&target).unwrap());
    }
}

async fn large_files_come_back(store: &Store, folder: &TempDir) {
    let (source, target) = (folder.path().join("large"), folder.path().join("copy"));
    let content: Vec<u8> = (0u8..=250).cycle().take(LARGE).collect();
    fs::write(&source, &content).unwrap();
    let key = ObjectKey::plan("o", "w", "1", "s");
    let reference = store.put_file(&key, &source).await.unwrap();
    let digest = store.fetch(&reference, &target).await.unwrap();
    assert_eq!(digest, Digest::of(&source).unwrap());
    assert!(fs::read(&target).unwrap() == content);
    // A fetch never overwrites an existing file.
    let again = store.fetch(&reference, &target).await.unwrap_err();
    let text = again.to_string();
    assert!(
        text.starts_with("could not write a fetched object to "),
        "{text}"
    );
}

async fn missing_and_empty_objects_differ(store: &Store, folder: &TempDir) {
    let target = folder.path().join("nothing");
    let missing = store
        .reference(&ObjectKey::plan("o", "w", "1", "never"))
        .await
        .unwrap();
    let error = store.fetch(&missing, &target).await.unwrap_err();
    assert!(matches!(error, StoreError::Missing { .. }), "{error:?}");
    assert!(!target.exists());

    let empty = ObjectKey::plan("o", "w", "1", "empty");
    let source = folder.path().join("empty");
    fs::write(&source, "").unwrap();
    let reference = store.put_file(&empty, &source).await.unwrap();
    let digest = store.fetch(&reference, &target).await.unwrap();
    assert_eq!(digest.size_bytes, 0);
    assert_eq!(store.read(&empty).await.unwrap(), Some(Bytes::new()));

    let absent = store.put_file(&empty, &folder.path().join("absent")).await;
    let text = absent.unwrap_err().to_string();
    assert!(
        text.starts_with("could not read the file to store "),
        "{text}"
    );
    for foreign in ["https://elsewhere.test/other/key", "/etc/passwd", ""] {
        let error = store.fetch(foreign, &target).await.unwrap_err();
        assert!(matches!(error, StoreError::Foreign { .. }), "{error:?}");
    }
}

#[tokio::test]
async fn s3_keeps_what_it_is_given() {
    let server = S3::start().unwrap();
    let store = open_busy(s3_of(&server));
    keeps_what_it_is_given(&store).await;
    let key = ObjectKey::plan("o", "w", "1", "s");
    let expected = format!(
        "{}/{}/tfstate/o/w/1/s/terraformLibrary.tfPlan",
        server.url(),
        s3::BUCKET
    );
    assert_eq!(store.reference(&key).await.unwrap(), expected);
}

#[tokio::test]
async fn azure_keeps_what_it_is_given() {
    let server = Azurite::start().unwrap();
    let store = open_busy(azure_of(&server));
    keeps_what_it_is_given(&store).await;
    // As the stock executor's client writes it.
    let stock = format!(
        "{}/tfstate/o%2Fw%2F1%2Fs%2FterraformLibrary.tfPlan",
        server.url()
    );
    let target = tempfile::tempdir().unwrap().path().with_extension("plan");
    let digest = store.fetch(&stock, &target).await.unwrap();
    assert_eq!(digest.size_bytes, LARGE as u64);
    fs::remove_file(target).unwrap();
}

#[tokio::test]
async fn containers_are_made_once_however_many_runs_begin() {
    let server = Azurite::start().unwrap();
    let store = open_busy(azure_of(&server));
    let keys = ["a", "b", "c"].map(|step| ObjectKey::step_output("o", "1", step));
    let [a, b, c] = &keys;
    let (a, b, c) = tokio::join!(store.put(a, "a"), store.put(b, "b"), store.put(c, "c"));
    for stored in [a, b, c] {
        stored.unwrap();
    }
}

#[tokio::test]
async fn gcs_keeps_what_it_is_given() {
    let server = Gcs::start().unwrap();
    let store = open_busy(gcs_at(&server, gcs::BUCKET));
    let folder = tempfile::tempdir().unwrap();
    small_objects_come_back(&store, &folder).await;
    missing_and_empty_objects_differ(&store, &folder).await;
    assert_eq!(
        store
            .reference(&ObjectKey::plan("o", "w", "1", "s"))
            .await
            .unwrap(),
        "https://storage.cloud.google.com/states/tfstate/o/w/1/s/terraformLibrary.tfPlan"
    );
}

/// Uploads in parts to GCS use the protocol of S3. The GCS test server has no such uploads, so the S3 server takes them.
#[tokio::test]
async fn gcs_sends_large_files_in_parts() {
    let (account, server) = (Gcs::start().unwrap(), S3::start_open().unwrap());
    let address = server.address();
    let front = Server::start(move |request| {
        let mut request = request.clone();
        for (name, _) in &mut request.headers {
            if name == "x-goog-copy-source" {
                "x-amz-copy-source".clone_into(name);
            }
        }
        let answer = pass_on(&request, address, &address.to_string()).unwrap();
        answer.with_header("x-goog-request-id", "1")
    });
    let front = front.unwrap();
    let store = open(gcs_account_at(&account, s3::BUCKET, &front.url()));
    large_files_come_back(&store, &tempfile::tempdir().unwrap()).await;
    assert!(server.log().contains("partNumber=3"), "{}", server.log());
}

/// Checks that reads and writes are refused, and that the error has the names of these settings but no values.
async fn is_refused(store: &Store, settings: &[&str], secret: &str) {
    let key = ObjectKey::step_output("o", "1", "s");
    let written = store.put(&key, "x").await.map(drop);
    let read = store.read(&key).await.map(drop);
    for error in [written.unwrap_err(), read.unwrap_err()] {
        assert!(matches!(error, StoreError::Refused { .. }), "{error:?}");
        let text = format!("{error} {error:?} {}", error.hint().unwrap());
        for name in settings {
            assert!(text.contains(name), "{text}");
        }
        assert!(!text.contains(secret), "{text}");
    }
}

#[tokio::test]
async fn the_error_of_wrong_credentials_names_their_settings() {
    let server = S3::start().unwrap();
    let keys = ["AwsTerraformStateAccessKey", "AwsTerraformStateSecretKey"];
    let url = server.url();
    let wrong_secret = s3_at(&url, s3::BUCKET, server.access_key(), "hunter2");
    is_refused(&open(wrong_secret), &keys, "hunter2").await;
    let unknown_key = s3_at(&url, s3::BUCKET, "AKIAHUNTER2", "x");
    is_refused(&open(unknown_key), &keys, "AKIAHUNTER2").await;

    let server = Azurite::start().unwrap();
    let other_key = "aHVudGVyMmh1bnRlcjI=";
    let store = open(azure_at(&server.url(), server.account(), other_key));
    is_refused(&store, &["AzureTerraformStateStorageAccessKey"], other_key).await;

    let server = Gcs::start().unwrap();
    let unknown = server.service_account().replace("store@", "hunter2@");
    let StoreSettings::Gcs(settings) = gcs_at(&server, gcs::BUCKET) else {
        panic!("not GCS");
    };
    let store = open(StoreSettings::Gcs(GcsSettings {
        login: GcsLogin::Key(SecretString::from(unknown)),
        ..settings
    }));
    is_refused(&store, &["GcpTerraformStateCredentials"], "hunter2").await;
}

#[tokio::test]
async fn the_error_of_a_missing_bucket_names_its_setting() {
    let server = S3::start().unwrap();
    let settings = s3_at(
        &server.url(),
        "absent",
        server.access_key(),
        server.secret_key(),
    );
    has_no_bucket(&open(settings), "AwsTerraformStateBucketName").await;
    let server = Gcs::start().unwrap();
    has_no_bucket(
        &open(gcs_at(&server, "absent")),
        "GcpTerraformStateBucketName",
    )
    .await;
}

async fn has_no_bucket(store: &Store, setting: &str) {
    let key = ObjectKey::step_output("o", "1", "s");
    let error = store.put(&key, "x").await.unwrap_err();
    assert!(matches!(error, StoreError::NoBucket { .. }), "{error:?}");
    let text = format!("{error} {}", error.hint().unwrap());
    assert!(text.contains("absent") && text.contains(setting), "{text}");
}

/// A store whose service is a closure.
fn s3_that(answers: impl Fn(&Request) -> Response + Send + Sync + 'static) -> (Server, Store) {
    let server = Server::start(answers).unwrap();
    let settings = s3_at(&server.url(), "b", "AKIA", "hunter2");
    (server, open(settings))
}

/// Answers the first `times` requests with `refusal`.
fn refuses(times: usize, refusal: Response) -> impl Fn(&Request) -> Response + Send + Sync {
    let failures = AtomicUsize::new(times);
    move |_| {
        let left = failures.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1));
        match left {
            Ok(_) => refusal.clone(),
            Err(_) => Response::new(200, "").with_header("ETag", "\"e\""),
        }
    }
}

fn slow_down() -> Response {
    Response::new(503, "<Error><Code>SlowDown</Code></Error>")
}

#[tokio::test]
async fn time_and_not_a_number_limits_how_often_a_service_is_asked() {
    let server = Server::start(refuses(40, slow_down())).unwrap();
    let timing = RequestTiming {
        retry_for: Duration::from_mins(1),
        first_pause: Duration::from_millis(1),
        longest_pause: Duration::from_millis(3),
        ..timing()
    };
    let store = open_with(s3_at(&server.url(), "b", "AKIA", "hunter2"), &timing);
    let mut trouble = store.trouble().unwrap();
    let learn = async {
        let begins = trouble.wait_for(Option::is_some).await.unwrap();
        let text = begins.clone().unwrap();
        drop(begins);
        trouble.wait_for(Option::is_none).await.unwrap();
        text
    };
    let key = ObjectKey::step_output("o", "1", "s");
    let (stored, text) = tokio::join!(store.put(&key, "x"), learn);
    stored.unwrap();
    assert_eq!(text, "S3 answers 503 Service Unavailable");
    assert_eq!(server.requests().len(), 41);
}

#[tokio::test]
async fn a_service_is_not_asked_sooner_than_it_wants() {
    let server = Server::start(refuses(1, slow_down().with_header("Retry-After", "1"))).unwrap();
    let timing = RequestTiming {
        retry_for: Duration::from_mins(1),
        ..timing()
    };
    let store = open_with(s3_at(&server.url(), "b", "AKIA", "hunter2"), &timing);
    let start = Instant::now();
    let key = ObjectKey::step_output("o", "1", "s");
    store.put(&key, "x").await.unwrap();
    assert!(start.elapsed() >= Duration::from_secs(1));
    assert_eq!(server.requests().len(), 2);
}

#[tokio::test]
async fn the_error_of_a_failing_service_has_its_message() {
    let (_server, store) = s3_that(|_| {
        Response::new(
            500,
            "<Error><Code>InternalError</Code><Message>no</Message></Error>",
        )
    });
    let key = ObjectKey::step_output("o", "1", "s");
    let error = store.put(&key, "x").await.unwrap_err();
    let StoreError::Unavailable { source, .. } = &error else {
        panic!("{error:?}");
    };
    assert_eq!(source.to_string(), "InternalError: no");
}

#[tokio::test]
async fn a_service_that_falls_silent_is_not_waited_for_without_end() {
    // The kernel accepts connections, but no program answers them.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", silent.local_addr().unwrap());
    let timing = RequestTiming {
        read_timeout: Duration::from_millis(300),
        request_timeout: Duration::from_millis(600),
        ..timing()
    };
    let store = open_with(s3_at(&url, "b", "AKIA", "hunter2"), &timing);
    let key = ObjectKey::step_output("o", "1", "s");
    let error = store.put(&key, "x").await.unwrap_err();
    assert!(matches!(error, StoreError::Unavailable { .. }), "{error:?}");
    let error = store.read(&key).await.unwrap_err();
    assert!(matches!(error, StoreError::Unavailable { .. }), "{error:?}");
}

#[tokio::test]
async fn a_service_that_goes_away_in_the_middle_of_an_upload_leaves_no_object() {
    let (server, store) = s3_that(|request| match request.method.as_str() {
        "POST" if request.query.starts_with("uploads") => Response::new(
            200,
            "<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>",
        ),
        "PUT" if request.query.contains("partNumber=1&") => {
            Response::new(200, "").with_header("ETag", "\"e\"")
        }
        "DELETE" => Response::new(204, ""),
        "GET" => Response::new(404, "<Error><Code>NoSuchKey</Code></Error>"),
        _ => Response {
            cut_short: true,
            ..Response::new(500, "gone")
        },
    });
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("large");
    fs::write(&source, vec![7; LARGE]).unwrap();
    let key = ObjectKey::plan("o", "w", "1", "s");
    let error = store.put_file(&key, &source).await.unwrap_err();
    assert!(matches!(error, StoreError::Unavailable { .. }), "{error:?}");
    let asked = server.requests();
    let is_completed =
        |request: &Request| request.method == "POST" && request.query.contains("uploadId");
    assert!(!asked.iter().any(is_completed));
    assert!(asked.iter().any(|request| request.method == "DELETE"));
}

/// The length of each part, and how much of the content was read when it came.
type Parts = Arc<Mutex<Vec<(usize, usize)>>>;

/// A service of S3 without objects that notes parts.
fn s3_that_notes(read: &Arc<AtomicUsize>) -> (Server, Parts) {
    let noted = Parts::default();
    let (read, parts) = (Arc::clone(read), Arc::clone(&noted));
    let server = Server::start(move |request| match request.method.as_str() {
        "POST" if request.query.starts_with("uploads") => Response::new(
            200,
            "<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>",
        ),
        "POST" => Response::new(
            200,
            "<CompleteMultipartUploadResult><ETag>e</ETag></CompleteMultipartUploadResult>",
        ),
        "PUT" => {
            let part = (request.body.len(), read.load(Ordering::SeqCst));
            parts.lock().unwrap().push(part);
            Response::new(200, "").with_header("ETag", "\"e\"")
        }
        _ => Response::new(404, "<Error><Code>NoSuchKey</Code></Error>"),
    });
    (server.unwrap(), noted)
}

#[tokio::test]
async fn memory_holds_one_small_part_of_an_object() {
    const PART: usize = 5 * 1024 * 1024;
    let read = Arc::<AtomicUsize>::default();
    let (server, noted) = s3_that_notes(&read);
    let settings = s3_at(&server.url(), "b", "AKIA", "hunter2");
    let key = ObjectKey::plan("o", "w", "1", "s");
    let whole = vec![7; LARGE];

    let Upload { content, digest } = upload(&whole, &whole);
    let content = InspectReader::new(content, move |bytes: &[u8]| {
        read.fetch_add(bytes.len(), Ordering::SeqCst);
    });
    let upload = Upload {
        content: Box::new(content),
        digest,
    };
    let _ = rustls::crypto::ring::default_provider().install_default();
    let store = ServedStore::open(&settings, &timing()).unwrap();
    store.put(&key, upload, &Condition::Any).await.unwrap();
    let parts = std::mem::take(&mut *noted.lock().unwrap());
    let mut sent = 0;
    for (length, read) in parts {
        sent += length;
        assert!(length <= PART, "{length}");
        assert_eq!(read, sent);
    }
    assert_eq!(sent, LARGE);

    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("large");
    fs::write(&source, whole).unwrap();
    open(settings).put_file(&key, &source).await.unwrap();
    let lengths: Vec<_> = noted.lock().unwrap().iter().map(|part| part.0).collect();
    assert_eq!(lengths, [PART, PART, PART, LARGE - 3 * PART]);
}

#[tokio::test]
async fn half_a_download_is_no_file() {
    let (_server, store) = s3_that(|_| {
        Response {
            cut_short: true,
            ..Response::new(200, "half")
        }
        .with_header("ETag", "\"e\"")
        .with_header("Last-Modified", "Sat, 21 Nov 2026 12:00:00 GMT")
    });
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("plan");
    let reference = store
        .reference(&ObjectKey::plan("o", "w", "1", "s"))
        .await
        .unwrap();
    let error = store.fetch(&reference, &target).await.unwrap_err();
    assert!(matches!(error, StoreError::Unavailable { .. }), "{error:?}");
    assert!(!target.exists());
}

#[tokio::test]
async fn an_object_too_large_for_memory_is_refused_before_it_is_read() {
    let body = vec![b'x'; usize::try_from(artifact_store::READ_BYTES).unwrap() + 1];
    let (_server, store) = s3_that(move |_| {
        Response::new(200, body.clone())
            .with_header("ETag", "\"e\"")
            .with_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
    });
    let key = ObjectKey::step_output("o", "1", "s");
    let error = store.read(&key).await.unwrap_err();
    assert!(matches!(error, StoreError::TooLarge { .. }), "{error:?}");
}

fn upload(content: &[u8], declared: &[u8]) -> Upload {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("declared");
    fs::write(&file, declared).unwrap();
    Upload {
        content: Box::new(std::io::Cursor::new(content.to_vec())),
        digest: Digest::of(&file).unwrap(),
    }
}

async fn content_of(content: Option<Content>) -> Option<Vec<u8>> {
    let content = content?;
    let chunks: Vec<Bytes> = content.chunks.try_collect().await.unwrap();
    let whole = chunks.concat();
    assert_eq!(content.size_bytes, whole.len() as u64);
    Some(whole)
}

/// Ids of locks.
const ONE: &str = "6c2a9f0e-3f0b-4b52-9d0c-6f6c8b8d7a11";
const TWO: &str = "0b9e1c55-8f5e-4d0f-8a56-1f5d3c3a9b22";

/// The description of a lock.
fn locked_by(id: &str) -> Bytes {
    format!(r#"{{"ID":"{id}","Who":"me"}}"#).into()
}

/// Checks what every store of a hub must do.
async fn passes_on(settings: StoreSettings, large: bool, has_lock: bool) {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let store = ServedStore::open(&settings, &timing()).unwrap();
    let key = ObjectKey::plan("o", "w", "1", "s");
    assert_eq!(store.key_behind(&store.reference(&key)), Some(key.clone()));
    assert_eq!(store.key_behind("/etc/passwd"), None);
    let read = async || content_of(store.read(&key).await.unwrap()).await;
    assert_eq!(read().await, None);
    let whole: Vec<u8> = (0u8..=250).cycle().take(LARGE).collect();
    let contents = [b"small".to_vec(), whole];
    for content in &contents[..=usize::from(large)] {
        let any = &Condition::Any;
        let stored = store.put(&key, upload(content, content), any).await;
        stored.unwrap();
        // What breaks off, differs, or does not end changes nothing.
        let [mut other, mut longer] = [content.clone(), content.clone()];
        other[0] = b'X';
        longer.push(b'X');
        for wrong in [&content[1..], &other, &longer] {
            let stored = store.put(&key, upload(wrong, content), any).await;
            let error = stored.unwrap_err();
            assert!(matches!(error, StoreError::Altered { .. }), "{error:?}");
        }
        assert!(read().await.as_ref() == Some(content));
    }

    let state = store.state("o", "w");
    let read = async || content_of(state.open().await.unwrap()).await;
    assert_eq!(read().await, None);
    let any = &Condition::Any;
    let written = async |content: &[u8], lock| state.put(upload(content, content), lock, any).await;
    written(b"{}", None).await.unwrap();
    assert_eq!(read().await.as_deref(), Some(&b"{}"[..]));
    assert_eq!(state.has_lock(), has_lock);
    for taken in [true, !has_lock] {
        let info = if taken {
            locked_by(ONE)
        } else {
            locked_by(TWO)
        };
        let locked = state.lock(info).await.unwrap();
        assert_eq!(locked, taken, "{settings:?}");
    }
    let info = state.lock_info().await.unwrap();
    assert_eq!(info, has_lock.then(|| locked_by(ONE)));
    let whole = vec![b'x'; LARGE];
    let holders = if large { &whole[..] } else { &b"{1}"[..] };
    written(holders, Some(ONE)).await.unwrap();
    assert!(read().await.as_deref() == Some(holders));
    assert_eq!(state.lock_info().await.unwrap(), info, "the write took it");
    for _ in 0..2 {
        state.unlock(&locked_by(ONE)).await.unwrap();
        state.delete(None, any).await.unwrap();
    }
    assert_eq!(state.lock_info().await.unwrap(), None);
    assert_eq!(read().await, None);
}

#[tokio::test]
async fn every_store_passes_on_what_comes_whole() {
    let folder = tempfile::tempdir().unwrap();
    let data_dir = folder.path().to_owned();
    passes_on(StoreSettings::Local { data_dir }, true, false).await;
    let s3 = S3::start().unwrap();
    let StoreSettings::S3(settings) = s3_of(&s3) else {
        unreachable!("it is S3")
    };
    let settings = S3Settings {
        use_lockfile: true,
        ..settings
    };
    passes_on(StoreSettings::S3(settings), true, true).await;
    let azure = Azurite::start().unwrap();
    passes_on(azure_of(&azure), true, true).await;
    let gcs = Gcs::start().unwrap();
    passes_on(gcs_at(&gcs, gcs::BUCKET), false, true).await;
}

/// Whoever takes and releases a lease ends after each of the twelve calls of that. Nobody has to remove what is left: either it
/// says whose it is, or it ends by itself.
#[tokio::test(flavor = "multi_thread")]
async fn a_lease_is_described_or_ends_wherever_its_holder_ends() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let azure = Azurite::start().unwrap();
    let settings = azure_of(&azure);
    let store = ServedStore::open(&settings, &timing()).unwrap();
    let ends = (1..=12).map(async |last| {
        let proxy = Proxy::of_calls(&[azure.address()]).unwrap();
        let address = format!("{}/{}", proxy.url(), azure.account());
        let workspace = format!("w{last}");
        let of_holder = azure_at(&address, azure.account(), azurite::ACCOUNT_KEY);
        let of_holder = ServedStore::open(&of_holder, &timing()).unwrap();
        let of_holder = of_holder.state("o", &workspace);
        let state = store.state("o", &workspace);
        let calls = AtomicUsize::new(0);
        let held = proxy.hold(move |call| {
            call.moment() == Moment::Answered && calls.fetch_add(1, Ordering::SeqCst) + 1 == last
        });
        let mut holder = tokio::spawn(async move {
            assert!(of_holder.lock(locked_by(ONE)).await.unwrap());
            of_holder.unlock(&locked_by(ONE)).await.unwrap();
        });
        let held = tokio::select! {
            held = held => held.unwrap(),
            ended = &mut holder => panic!("call {last} was not made: {ended:?}"),
        };
        holder.abort();
        drop(held);
        // After its last call, the lock is there until it is released.
        let found = state.lock_info().await.unwrap();
        assert!(last != 8 || found == Some(locked_by(ONE)), "{found:?}");
        wait::until("the lock of another", async || {
            if let Some(left) = state.lock_info().await.unwrap() {
                assert_eq!(left, locked_by(ONE));
                state.unlock(&left).await.unwrap();
            }
            state.lock(locked_by(TWO)).await.unwrap()
        })
        .await;
        assert_eq!(state.lock_info().await.unwrap(), Some(locked_by(TWO)));
    });
    join_all(ends).await;
}

#[tokio::test]
async fn a_lease_keeps_out_every_other_writer_and_who_only_knows_its_id() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let azure = Azurite::start().unwrap();
    let settings = azure_of(&azure);
    let store = ServedStore::open(&settings, &timing()).unwrap();
    let state = store.state("o", "w");
    assert!(state.lock(locked_by(ONE)).await.unwrap());
    for other in [None, Some(TWO)] {
        let written = state.put(upload(b"{}", b"{}"), other, &Condition::Any);
        let error = written.await.unwrap_err();
        assert!(matches!(error, StoreError::Locked { .. }), "{error:?}");
        let deleted = state.delete(other, &Condition::Any);
        let error = deleted.await.unwrap_err();
        assert!(matches!(error, StoreError::Locked { .. }), "{error:?}");
    }
    let thief = Bytes::from(format!(r#"{{"ID":"{ONE}","Who":"somebody else"}}"#));
    assert!(!state.lock(thief).await.unwrap());
    state.unlock(&locked_by(TWO)).await.unwrap();
    assert_eq!(state.lock_info().await.unwrap(), Some(locked_by(ONE)));
    state.delete(Some(ONE), &Condition::Any).await.unwrap();
    assert_eq!(state.lock_info().await.unwrap(), None);
}
