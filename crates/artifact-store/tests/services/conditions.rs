//! Changes under a condition, on real servers of every protocol, and on some that know none.

use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use artifact_store::Change;
use job_contract::kept_state::KeptState;

use super::*;

fn served(settings: &StoreSettings) -> ServedStore {
    let _ = rustls::crypto::ring::default_provider().install_default();
    ServedStore::open(settings, &timing()).unwrap()
}

fn with_lock_file(settings: StoreSettings) -> StoreSettings {
    let StoreSettings::S3(settings) = settings else {
        panic!("not S3");
    };
    StoreSettings::S3(S3Settings {
        use_lockfile: true,
        ..settings
    })
}

fn is_changed<T>(done: Result<T, StoreError>) -> bool {
    matches!(done, Err(StoreError::Changed { .. }))
}

/// Checks that of two who have looked at the same object, only the first changes it.
async fn the_first_one_wins(settings: StoreSettings, large: bool) {
    let store = served(&settings);
    let state = store.state("o", "w");
    let seen = async || Condition::unchanged(state.open().await.unwrap().as_ref());
    let put = async |content: &[u8], seen: &Condition| {
        state.put(upload(content, content), None, seen).await
    };
    let absent = seen().await;
    assert_eq!(absent, Condition::Absent);
    put(b"{1}", &absent).await.unwrap();
    let first = seen().await;
    assert!(matches!(first, Condition::Version(_)), "{first:?}");
    put(b"{2}", &first).await.unwrap();
    let whole = vec![b'x'; LARGE];
    let contents = [&b"{3}"[..], &whole[..]];
    let contents = &contents[..=usize::from(large)];
    for condition in [&absent, &first] {
        for &content in contents {
            assert!(is_changed(put(content, condition).await), "{settings:?}");
        }
    }
    assert!(is_changed(state.delete(None, &first).await), "{settings:?}");
    let content = content_of(state.open().await.unwrap()).await;
    assert_eq!(content.as_deref(), Some(&b"{2}"[..]));
    for &content in contents {
        put(content, &seen().await).await.unwrap();
    }
    state.delete(None, &seen().await).await.unwrap();
    assert_eq!(seen().await, Condition::Absent);

    let key = ObjectKey::plan_record("o", "w", "1");
    let put = async |content: &[u8]| {
        let upload = upload(content, content);
        store.put(&key, upload, &Condition::Absent).await
    };
    put(b"one").await.unwrap();
    assert!(is_changed(put(b"two").await), "{settings:?}");
    let content = content_of(store.read(&key).await.unwrap()).await;
    assert_eq!(content.as_deref(), Some(&b"one"[..]));
}

#[tokio::test]
async fn every_store_keeps_a_condition() {
    let folder = tempfile::tempdir().unwrap();
    let data_dir = folder.path().to_owned();
    the_first_one_wins(StoreSettings::Local { data_dir }, true).await;
    // moto joins parts without a condition.
    let s3 = S3::start().unwrap();
    the_first_one_wins(s3_of(&s3), false).await;
    let azure = Azurite::start().unwrap();
    the_first_one_wins(azure_of(&azure), true).await;
    let gcs = Gcs::start().unwrap();
    the_first_one_wins(gcs_at(&gcs, gcs::BUCKET), false).await;
}

#[tokio::test]
async fn the_holder_of_a_lease_writes_under_a_condition_too() {
    let azure = Azurite::start().unwrap();
    let state = served(&azure_of(&azure)).state("o", "w");
    assert!(state.lock(locked_by(ONE)).await.unwrap());
    // The blob of the lock is empty, and it is there.
    let empty = Condition::unchanged(state.open().await.unwrap().as_ref());
    assert!(matches!(empty, Condition::Version(_)), "{empty:?}");
    let whole = vec![b'x'; LARGE];
    let put = async |content: &[u8]| {
        let upload = upload(content, content);
        state.put(upload, Some(ONE), &empty).await
    };
    put(b"{1}").await.unwrap();
    assert!(is_changed(put(b"{2}").await));
    assert!(is_changed(put(&whole).await));
    assert!(is_changed(state.delete(Some(ONE), &empty).await));
    assert_eq!(state.lock_info().await.unwrap(), Some(locked_by(ONE)));
}

#[tokio::test]
async fn a_late_unlock_leaves_the_lock_of_somebody_else() {
    let (s3, gcs) = (S3::start().unwrap(), Gcs::start().unwrap());
    for settings in [with_lock_file(s3_of(&s3)), gcs_at(&gcs, gcs::BUCKET)] {
        let state = served(&settings).state("o", "w");
        assert!(state.lock(locked_by(ONE)).await.unwrap());
        state.unlock(&locked_by(ONE)).await.unwrap();
        assert!(state.lock(locked_by(TWO)).await.unwrap());
        state.unlock(&locked_by(ONE)).await.unwrap();
        assert_eq!(state.lock_info().await.unwrap(), Some(locked_by(TWO)));
        state.unlock(&locked_by(TWO)).await.unwrap();
        assert_eq!(state.lock_info().await.unwrap(), None);
    }
}

/// What stands before moto sees the requests, and may answer one itself.
fn before(
    moto: &S3,
    sees: impl Fn(&mut Request) -> Option<Response> + Send + Sync + 'static,
) -> Server {
    let address = moto.address();
    let passed = move |request: &Request| {
        let mut request = request.clone();
        sees(&mut request)
            .unwrap_or_else(|| pass_on(&request, address, &address.to_string()).unwrap())
    };
    Server::start(passed).unwrap()
}

#[tokio::test]
async fn parts_are_joined_and_locks_deleted_under_the_condition() {
    let moto = S3::start_open().unwrap();
    let front = before(&moto, |_| None);
    let settings = s3_at(&front.url(), s3::BUCKET, "AKIA", "hunter2");
    let state = served(&with_lock_file(settings)).state("o", "w");
    let any = &Condition::Any;
    state.put(upload(b"{}", b"{}"), None, any).await.unwrap();
    let seen = Condition::unchanged(state.open().await.unwrap().as_ref());
    let Condition::Version(tag) = &seen else {
        panic!("{seen:?}");
    };
    let whole = vec![b'x'; LARGE];
    state
        .put(upload(&whole, &whole), None, &seen)
        .await
        .unwrap();
    assert!(state.lock(locked_by(ONE)).await.unwrap());
    state.unlock(&locked_by(ONE)).await.unwrap();
    let requests = front.requests();
    let joined =
        |request: &&Request| request.method == "POST" && request.query.contains("uploadId");
    let joined: Vec<_> = requests.iter().filter(joined).collect();
    let [joined] = joined[..] else {
        panic!("{joined:?}");
    };
    assert_eq!(joined.header("if-match"), Some(&**tag));
    let part = |request: &&Request| request.query.contains("partNumber");
    let mut parts = requests.iter().filter(part);
    assert!(parts.all(|request| request.header("if-match").is_none()));
    let deleted = requests.iter().find(|request| request.method == "DELETE");
    assert!(deleted.unwrap().header("if-match").is_some());
}

#[tokio::test]
async fn a_service_without_conditions_stores_as_before() {
    for is_refused in [false, true] {
        let moto = S3::start_open().unwrap();
        let front = before(&moto, move |request| {
            let is_asked = is_conditional(request);
            request.headers.retain(|(name, _)| !name.starts_with("if-"));
            let refusal = "<Error><Code>NotImplemented</Code></Error>";
            (is_asked && is_refused).then(|| Response::new(501, refusal))
        });
        let settings = s3_at(&front.url(), s3::BUCKET, "AKIA", "hunter2");
        let state = served(&settings).state("o", "w");
        let whole = vec![b'x'; LARGE];
        for content in [&b"{1}"[..], &b"{2}"[..], &whole[..]] {
            let written = upload(content, content);
            state.put(written, None, &Condition::Absent).await.unwrap();
            let found = content_of(state.open().await.unwrap()).await;
            assert!(found.as_deref() == Some(content), "{is_refused}");
        }
        let seen = Condition::Version("\"another\"".to_owned());
        state.delete(None, &seen).await.unwrap();
        assert!(state.open().await.unwrap().is_none());
    }
}

fn is_conditional(request: &Request) -> bool {
    let mut names = request.headers.iter();
    names.any(|(name, _)| name.starts_with("if-"))
}

/// Checks which conditions a store says to keep, and that asking leaves nothing.
async fn keeps(settings: &StoreSettings, expected: &[Change]) {
    let store = served(settings);
    let kept = store.ask_conditions().await.unwrap();
    let found = Change::ALL.into_iter().filter(|change| kept.has(*change));
    assert_eq!(found.collect::<Vec<_>>(), expected, "{settings:?}");
}

#[tokio::test]
async fn a_store_is_asked_which_conditions_it_keeps_and_has_nothing_of_it_afterwards() {
    let folder = tempfile::tempdir().unwrap();
    let data_dir = folder.path().to_owned();
    keeps(&StoreSettings::Local { data_dir }, &Change::ALL).await;
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    let azure = Azurite::start().unwrap();
    keeps(&azure_of(&azure), &Change::ALL).await;
    // moto joins parts without a condition.
    let moto = S3::start_open().unwrap();
    let kept = [Change::Create, Change::Replace, Change::Delete];
    keeps(&s3_of(&moto), &kept).await;
    assert_eq!(moto.objects().unwrap(), []);
}

/// A service may ignore conditions of some changes, or refuse them.
#[tokio::test]
async fn conditions_that_are_ignored_or_refused_are_noticed() {
    let all = ["PUT", "DELETE"];
    let kept = [Change::Create, Change::Replace];
    for (methods, kept) in [(&all[..], &[][..]), (&all[1..], &kept[..])] {
        for is_refused in [false, true] {
            let moto = S3::start_open().unwrap();
            let methods = methods.to_vec();
            let front = before(&moto, move |request| {
                if !methods.contains(&&*request.method) || !is_conditional(request) {
                    return None;
                }
                request.headers.retain(|(name, _)| !name.starts_with("if-"));
                let refusal = "<Error><Code>NotImplemented</Code></Error>";
                is_refused.then(|| Response::new(501, refusal))
            });
            let settings = s3_at(&front.url(), s3::BUCKET, "AKIA", "hunter2");
            keeps(&settings, kept).await;
            assert_eq!(moto.objects().unwrap(), []);
        }
    }
}

#[tokio::test]
async fn an_error_while_a_store_is_asked_says_nothing_about_conditions() {
    let moto = S3::start_open().unwrap();
    let front = before(&moto, |request| {
        let refusal = "<Error><Code>AccessDenied</Code></Error>";
        is_conditional(request).then(|| Response::new(403, refusal))
    });
    let settings = with_lock_file(s3_at(&front.url(), s3::BUCKET, "AKIA", "hunter2"));
    let store = served(&settings);
    let error = store.ask_conditions().await.unwrap_err();
    assert!(matches!(error, StoreError::Refused { .. }), "{error:?}");
    assert!(!store.state("o", "w").unlocks_on_condition());
}

#[tokio::test]
async fn a_store_that_refuses_deletes_has_one_object_however_often_it_is_asked() {
    let moto = S3::start_open().unwrap();
    let front = before(&moto, |request| {
        let refusal = "<Error><Code>AccessDenied</Code></Error>";
        let deletes = request.method == "DELETE" || request.query == "delete";
        deletes.then(|| Response::new(403, refusal))
    });
    let store = served(&s3_at(&front.url(), s3::BUCKET, "AKIA", "hunter2"));
    for _ in 0..2 {
        store.ask_conditions().await.unwrap_err();
        assert_eq!(moto.objects().unwrap().len(), 1);
    }
}

#[tokio::test]
async fn only_a_service_that_keeps_conditions_of_deletes_gets_a_delete_twice() {
    let moto = S3::start_open().unwrap();
    let settings = with_lock_file(s3_of(&moto));
    let store = served(&settings);
    assert!(!store.state("o", "w").unlocks_on_condition(), "unknown");
    store.ask_conditions().await.unwrap();
    assert!(store.state("o", "w").unlocks_on_condition());

    // It has the request, and says nothing of it.
    let front = before(&moto, |request| {
        let failure = "<Error><Code>InternalError</Code></Error>";
        (request.method == "DELETE").then(|| Response::new(500, failure))
    });
    let settings = with_lock_file(s3_at(&front.url(), s3::BUCKET, "AKIA", "hunter2"));
    let state = served(&settings).state("o", "w");
    assert!(state.lock(locked_by(ONE)).await.unwrap());
    let now = SystemTime::now();
    let error = state.unlock_once(&locked_by(ONE), now).await.unwrap_err();
    assert!(matches!(error, StoreError::Uncertain { .. }), "{error:?}");
    let requests = front.requests();
    let deletes = requests.iter().filter(|request| request.method == "DELETE");
    assert_eq!(deletes.count(), 1);

    // A process that was frozen sends nothing.
    let state = store.state("o", "w");
    let long_ago = now - Duration::from_mins(2);
    let late = state.unlock_once(&locked_by(ONE), long_ago).await;
    let error = late.unwrap_err();
    assert!(matches!(error, StoreError::Unavailable { .. }), "{error:?}");
    assert_eq!(state.lock_info().await.unwrap(), Some(locked_by(ONE)));
    state.unlock_once(&locked_by(TWO), now).await.unwrap();
    assert_eq!(state.lock_info().await.unwrap(), Some(locked_by(ONE)));
    let now = SystemTime::now();
    state.unlock_once(&locked_by(ONE), now).await.unwrap();
    assert_eq!(state.lock_info().await.unwrap(), None);
}

/// An executor with keys of its own was killed, and the service does its write after that of the next one.
#[tokio::test]
async fn a_late_write_of_an_executor_replaces_nothing_newer() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("plan");
    fs::write(&file, "late").unwrap();
    let moto = S3::start_open().unwrap();
    let late = Arc::<Mutex<Option<Request>>>::default();
    let kept = Arc::clone(&late);
    let front = before(&moto, move |request| {
        let is_late = request.method == "PUT" && request.body == b"late";
        is_late.then(|| {
            *kept.lock().unwrap() = Some(request.clone());
            Response::new(403, "<Error><Code>AccessDenied</Code></Error>")
        })
    });
    let store = open(s3_at(&front.url(), s3::BUCKET, "AKIA", "hunter2"));
    let address = moto.address();
    for key in [
        ObjectKey::plan("o", "w", "1", "s"),
        ObjectKey::plan_files("o", "w", "1", "s"),
        ObjectKey::plan_record("o", "w", "1"),
        ObjectKey::state_raw("o", "w", "name"),
        ObjectKey::errored_state("o", "w", "1", "s"),
    ] {
        for earlier in ["", "first"] {
            if !earlier.is_empty() {
                store.put(&key, earlier).await.unwrap();
            }
            let failed = [
                store.put(&key, "late").await.is_err(),
                store.put_file(&key, &file).await.is_err(),
            ];
            assert_eq!(failed, [true; 2]);
            let newer = format!("newer than {earlier}");
            store.put(&key, newer.clone()).await.unwrap();
            let late = late.lock().unwrap().take().unwrap();
            let done = pass_on(&late, address, &address.to_string()).unwrap();
            assert_eq!(done.status, 412, "{key:?}");
            let found = store.read(&key).await.unwrap();
            assert_eq!(found.unwrap(), newer);
        }
    }
}

/// The answer to a write is lost, and the client repeats it.
#[tokio::test]
async fn an_executor_does_not_take_its_own_write_for_that_of_somebody_else() {
    let moto = S3::start_open().unwrap();
    let (address, is_lost) = (moto.address(), AtomicUsize::new(1));
    let front = before(&moto, move |request| {
        let lose = |n: usize| n.checked_sub(1);
        if request.method != "PUT"
            || is_lost
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, lose)
                .is_err()
        {
            return None;
        }
        pass_on(request, address, &address.to_string()).unwrap();
        Some(Response::new(
            500,
            "<Error><Code>InternalError</Code></Error>",
        ))
    });
    let store = open(s3_at(&front.url(), s3::BUCKET, "AKIA", "hunter2"));
    let key = ObjectKey::plan_record("o", "w", "1");
    store.put(&key, "record").await.unwrap();
    assert_eq!(store.read(&key).await.unwrap().unwrap(), "record");
}

#[tokio::test]
async fn an_executor_replaces_nothing_that_appears_while_it_stores() {
    let moto = S3::start_open().unwrap();
    let address = moto.address();
    let front = before(&moto, move |request| {
        if request.method == "PUT" && request.body == b"mine" {
            let mut newer = request.clone();
            newer.body = b"newer".to_vec();
            newer.headers.retain(|(name, _)| name == "authorization");
            pass_on(&newer, address, &address.to_string()).unwrap();
        }
        None
    });
    let store = open(s3_at(&front.url(), s3::BUCKET, "AKIA", "hunter2"));
    let key = ObjectKey::plan_record("o", "w", "1");
    for earlier in [None, Some("first")] {
        if let Some(earlier) = earlier {
            store.put(&key, earlier).await.unwrap();
        }
        assert!(is_changed(store.put(&key, "mine").await));
        assert_eq!(store.read(&key).await.unwrap().unwrap(), "newer");
    }
}

/// Some services compare tags in a way of their own.
#[tokio::test]
async fn executors_store_also_where_a_condition_that_is_true_is_refused() {
    let moto = S3::start_open().unwrap();
    let front = before(&moto, |request| {
        let refusal = "<Error><Code>PreconditionFailed</Code></Error>";
        let is_asked = request.method == "PUT" && request.header("if-match").is_some();
        is_asked.then(|| Response::new(412, refusal))
    });
    let store = open(s3_at(&front.url(), s3::BUCKET, "AKIA", "hunter2"));
    let key = ObjectKey::plan_record("o", "w", "1");
    for name in ["first", "second"] {
        store.put(&key, name).await.unwrap();
        assert_eq!(store.read(&key).await.unwrap().unwrap(), name);
        let listed = store.served().unwrap();
        let listed = listed.change_kept_states("o", "w", |list| {
            list.states.insert(name.to_owned(), KeptState::default());
        });
        listed.await.unwrap();
    }
    let names = store.kept_states("o", "w").await.unwrap();
    assert_eq!(names, ["first", "second"]);
}

/// Credentials that may not list objects cannot tell a list that does not exist from one that they may not read.
#[tokio::test]
async fn a_list_of_kept_states_that_cannot_be_read_is_not_replaced() {
    let moto = S3::start_open().unwrap();
    let front = before(&moto, |request| {
        let refusal = "<Error><Code>AccessDenied</Code></Error>";
        (request.method == "GET").then(|| Response::new(403, refusal))
    });
    let settings = s3_at(&front.url(), s3::BUCKET, "AKIA", "hunter2");
    let store = served(&settings);
    let add = |name: &'static str| {
        store.change_kept_states("o", "w", move |list| {
            list.states.insert(name.to_owned(), KeptState::default());
        })
    };
    add("first").await.unwrap();
    let runs = open(settings);
    let refused = [
        add("second").await.unwrap_err(),
        store.kept_states("o", "w").await.unwrap_err(),
        runs.kept_states("o", "w").await.unwrap_err(),
    ];
    for error in refused {
        assert!(matches!(error, StoreError::Refused { .. }), "{error:?}");
    }
    let names = store.names_of_kept_states("o", "w").await.unwrap();
    assert_eq!(names, [""; 0]);
    let readable = open(s3_of(&moto));
    assert_eq!(readable.kept_states("o", "w").await.unwrap(), ["first"]);
}

/// A refusal of something in front of the service does not end the conditions.
#[tokio::test]
async fn only_the_service_itself_refuses_conditions() {
    let moto = S3::start_open().unwrap();
    let front = before(&moto, |request| {
        is_conditional(request).then(|| Response::new(501, "<html>not implemented</html>"))
    });
    let settings = s3_at(&front.url(), s3::BUCKET, "AKIA", "hunter2");
    let state = served(&settings).state("o", "w");
    let written = state.put(upload(b"{}", b"{}"), None, &Condition::Absent);
    let error = written.await.unwrap_err();
    assert!(matches!(error, StoreError::Unavailable { .. }), "{error:?}");
    assert!(state.open().await.unwrap().is_none());
}

/// The service joins parts without a condition, and copies under one.
#[tokio::test]
async fn gcs_joins_parts_beside_the_object() {
    let account = Gcs::start().unwrap();
    for is_changed_meanwhile in [false, true] {
        let server = Server::start(move |request| {
            let is_copy = request.header("x-goog-copy-source").is_some();
            match (request.method.as_str(), request.query.as_str()) {
                ("PUT", _) if is_copy && is_changed_meanwhile => {
                    Response::new(412, "<Error><Code>PreconditionFailed</Code></Error>")
                }
                ("POST", query) if query.starts_with("uploads") => Response::new(
                    200,
                    "<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>",
                ),
                ("POST", _) => Response::new(
                    200,
                    "<CompleteMultipartUploadResult><ETag>e</ETag></CompleteMultipartUploadResult>",
                ),
                ("DELETE", _) => Response::new(204, ""),
                _ => Response::new(200, "").with_header("ETag", "\"e\""),
            }
        });
        let server = server.unwrap();
        let settings = gcs_account_at(&account, gcs::BUCKET, &server.url());
        let state = served(&settings).state("o", "w");
        let whole = vec![b'x'; LARGE];
        let seen = Condition::Version("7".to_owned());
        let written = state.put(upload(&whole, &whole), None, &seen).await;
        assert_eq!(is_changed(written), is_changed_meanwhile);
        let requests = server.requests();
        let condition = |request: &Request| {
            let value = request.header("x-goog-if-generation-match");
            value.map(ToOwned::to_owned)
        };
        let copied = |request: &&Request| request.header("x-goog-copy-source").is_some();
        let copied = requests.iter().find(copied).unwrap();
        assert_eq!(condition(copied).as_deref(), Some("7"));
        let others = requests
            .iter()
            .filter(|request| request.path != copied.path);
        let others: Vec<_> = others.collect();
        assert!(others.iter().all(|request| condition(request).is_none()));
        let left = others.last().unwrap();
        assert_eq!(
            (left.method.as_str(), &left.path),
            ("DELETE", &others[0].path)
        );
    }
}
