//! Answers of something in front of a service. None of them may mean that an object is missing, empty or stored. Neither may a
//! connection that breaks off.

use std::fmt::Debug;
use std::net::TcpListener;

use job_contract::keys::local_backend_state;

use super::*;

/// A service is not asked again.
fn once() -> RequestTiming {
    RequestTiming {
        retry_for: Duration::ZERO,
        ..timing()
    }
}

/// What a proxy, a load balancer or a captive portal answers.
fn of_a_proxy() -> Vec<Response> {
    let tagged = |answer: Response| {
        let answer = answer.with_header("ETag", "\"e\"");
        answer.with_header("Last-Modified", "Wed, 01 Jan 2025 00:00:00 GMT")
    };
    let html = ("Content-Type", "text/html");
    let page = "<html>default backend - 404</html>";
    vec![
        Response::new(404, page).with_header(html.0, html.1),
        Response::new(404, ""),
        Response::new(404, r#"{"error":"no route"}"#),
        tagged(Response::new(204, "")),
        tagged(Response::new(200, "")),
        tagged(Response::new(200, "<html>sign in</html>")).with_header(html.0, html.1),
    ]
}

/// The stores of the clouds at one address.
fn each_at(url: &str, account: &Gcs) -> [StoreSettings; 3] {
    [
        with_lock(s3_at(url, "b", "AKIA", "hunter2")),
        gcs_account_at(account, gcs::BUCKET, url),
        azure_at(url, "account", azurite::ACCOUNT_KEY),
    ]
}

/// Checks that no read takes the answer for one of the store.
async fn is_unavailable(settings: &StoreSettings, answer: &impl Debug) {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let served = ServedStore::open(settings, &once()).unwrap();
    let store = Store::open_with(settings, &once()).unwrap();
    let state = served.state("o", "w");
    let key = ObjectKey::plan("o", "w", "1", "s");
    let folder = tempfile::tempdir().unwrap();
    let reference = store.reference(&key).await.unwrap();
    let errors = [
        state.open().await.err(),
        state.lock_info().await.err(),
        store.open_state("o", "w").await.err(),
        served.read(&key).await.err(),
        store.read(&key).await.err(),
        store
            .fetch(&reference, &folder.path().join("plan"))
            .await
            .err(),
    ];
    assert_unavailable(&errors, settings, answer);
}

/// Checks that no write takes the answer for one of the store.
async fn takes_nothing(settings: &StoreSettings, answer: &impl Debug) {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let served = ServedStore::open(settings, &once()).unwrap();
    let store = Store::open_with(settings, &once()).unwrap();
    let (state, key) = (served.state("o", "w"), ObjectKey::plan("o", "w", "1", "s"));
    let seen = Condition::Version("\"1\"".to_owned());
    let put = async |condition: &Condition| state.put(upload(b"{}", b"{}"), None, condition).await;
    let errors = [
        put(&Condition::Absent).await.err(),
        put(&seen).await.err(),
        state.lock(locked_by(ONE)).await.err(),
        store.put(&key, "plan").await.err(),
    ];
    assert_unavailable(&errors, settings, answer);
}

fn assert_unavailable(
    errors: &[Option<StoreError>],
    settings: &StoreSettings,
    answer: &impl Debug,
) {
    for error in errors {
        let is_unavailable = matches!(error, Some(StoreError::Unavailable { .. }));
        assert!(is_unavailable, "{error:?} for {answer:?} of {settings:?}");
    }
}

/// S3 with the lock that the tool takes.
fn with_lock(settings: StoreSettings) -> StoreSettings {
    match settings {
        StoreSettings::S3(settings) => StoreSettings::S3(S3Settings {
            use_lockfile: true,
            ..settings
        }),
        other => other,
    }
}

#[tokio::test]
async fn what_something_before_a_store_answers_is_never_an_absence() {
    let account = Gcs::start().unwrap();
    for answer in of_a_proxy() {
        let given = answer.clone();
        let server = Server::start(move |_| given.clone()).unwrap();
        for settings in each_at(&server.url(), &account) {
            is_unavailable(&settings, &answer).await;
        }
    }
}

#[tokio::test]
async fn what_something_before_a_store_answers_is_never_a_success() {
    let account = Gcs::start().unwrap();
    let page =
        |status, text: &str| Response::new(status, text).with_header("Content-Type", "text/html");
    for answer in [
        page(404, "<html>default backend - 404</html>"),
        page(200, "<html>sign in</html>"),
        Response::new(404, ""),
        Response::new(200, ""),
        Response::new(204, ""),
    ] {
        let given = answer.clone();
        let server = Server::start(move |_| given.clone()).unwrap();
        for settings in each_at(&server.url(), &account) {
            takes_nothing(&settings, &answer).await;
        }
    }
}

#[tokio::test]
async fn a_store_that_is_cut_off_lacks_nothing_and_takes_nothing() {
    let account = Gcs::start().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || listener.incoming().for_each(drop));
    for settings in each_at(&url, &account) {
        is_unavailable(&settings, &"a broken connection").await;
        takes_nothing(&settings, &"a broken connection").await;
    }
}

/// What is no folder hides the states below it.
#[tokio::test]
async fn a_folder_that_is_away_lacks_nothing_and_takes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(local_backend_state("o", "w"));
    let states = path.parent().unwrap();
    fs::create_dir_all(states.parent().unwrap()).unwrap();
    fs::write(states, "in the way").unwrap();
    let data_dir = folder.path().to_owned();
    let settings = StoreSettings::Local { data_dir };
    let state = ServedStore::open(&settings, &once())
        .unwrap()
        .state("o", "w");
    let store = Store::open_with(&settings, &once()).unwrap();
    let errors = [
        state.open().await.err(),
        store.open_state("o", "w").await.err(),
    ];
    for error in errors {
        assert!(matches!(error, Some(StoreError::Read { .. })), "{error:?}");
    }
    let put = async || {
        let written = upload(b"{}", b"{}");
        state.put(written, None, &Condition::Absent).await
    };
    let error = put().await.unwrap_err();
    assert!(matches!(error, StoreError::Write { .. }), "{error:?}");
    fs::remove_file(states).unwrap();
    put().await.unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"{}");
}

#[tokio::test]
async fn what_a_store_itself_calls_missing_is_missing() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let xml = |code: &str| Response::new(404, format!("<Error><Code>{code}</Code></Error>"));
    let no_key = xml("NoSuchKey");
    let server = Server::start(move |_| no_key.clone()).unwrap();
    let settings = with_lock(s3_at(&server.url(), "b", "AKIA", "hunter2"));
    let state = ServedStore::open(&settings, &once())
        .unwrap()
        .state("o", "w");
    assert!(state.open().await.unwrap().is_none());
    assert_eq!(state.lock_info().await.unwrap(), None);
    let no_bucket = xml("NoSuchBucket");
    let server = Server::start(move |_| no_bucket.clone()).unwrap();
    let settings = with_lock(s3_at(&server.url(), "b", "AKIA", "hunter2"));
    let state = ServedStore::open(&settings, &once())
        .unwrap()
        .state("o", "w");
    let error = state.open().await.err();
    assert!(
        matches!(error, Some(StoreError::NoBucket { .. })),
        "{error:?}"
    );
}

#[tokio::test]
async fn a_store_that_is_hidden_for_a_while_is_asked_again() {
    let page = Response::new(404, "<html>404</html>");
    let server = Server::start({
        let hidden = AtomicUsize::new(2);
        move |_| {
            let left =
                hidden.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1));
            match left {
                Ok(_) => page.clone(),
                Err(_) => Response::new(200, "log")
                    .with_header("ETag", "\"e\"")
                    .with_header("Last-Modified", "Wed, 01 Jan 2025 00:00:00 GMT"),
            }
        }
    });
    let server = server.unwrap();
    let timing = RequestTiming {
        retry_for: Duration::from_mins(1),
        ..timing()
    };
    let store = open_with(s3_at(&server.url(), "b", "AKIA", "hunter2"), &timing);
    let key = ObjectKey::step_output("o", "1", "s");
    assert_eq!(store.read(&key).await.unwrap().unwrap(), "log");
    assert_eq!(server.requests().len(), 3);
}
