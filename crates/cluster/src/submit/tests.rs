use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Once};

use axum::body::Body as AnyBody;
use http::{Response, StatusCode};
use job_contract::{Document, encoding, env};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::EnvVar;
use k8s_openapi::jiff::SignedDuration;
use manifest::Deployment;
use manifest::job_data::Mode;
use rstest::rstest;
use serde_json::{Value, json};

use super::super::fake_server::{Crash, Server, inline, objects, refusal};
use super::*;

/// One Job, released, with a Secret that it owns.
fn assert_whole(server: &Server, name: &str) {
    let job = server.object("jobs", name).expect("the Job is there");
    assert_eq!(job["spec"]["suspend"], json!(false), "released");
    assert_eq!(server.count("jobs"), 1);
    let (_, secret) = server.job_data_of(name);
    let secret = secret.expect("its Secret is there");
    let owner = &secret["metadata"]["ownerReferences"][0];
    assert_eq!(owner["uid"], job["metadata"]["uid"]);
    assert_eq!(owner["kind"], json!("Job"));
    assert_ne!(owner["blockOwnerDeletion"], json!(true));
    assert_eq!(server.count("secrets"), 1);
    assert_never_reads_secrets(server);
}

/// The Role grants it `create` and nothing else.
fn assert_never_reads_secrets(server: &Server) {
    let asked = server.requests().into_iter();
    let of_secrets = asked.filter(|request| request.ends_with(" secrets"));
    for request in of_secrets {
        assert!(request.ends_with("post secrets"), "{request}");
    }
}

#[tokio::test]
async fn a_run_is_a_suspended_job_an_owned_secret_and_a_release() {
    let server = Server::start();
    let submitted = server.cluster().submit(&objects("1", "a")).await.unwrap();
    assert_eq!(submitted, Submitted::Created);
    assert_eq!(
        server.requests(),
        ["post jobs", "post secrets", "patch jobs"]
    );
    assert_whole(&server, "job-1-a");
}

/// A run for a queue of the cluster.
fn queued(objects: Manifest) -> Manifest {
    objects.labelled(&[(labels::KUEUE_QUEUE, "team")], &[])
}

/// The queue that the Job names. It was never released by the launcher.
fn queue_of(server: &Server) -> Value {
    let job = server.object("jobs", "job-1-a").unwrap();
    assert_eq!(job["spec"]["suspend"], json!(true));
    let meta = &job["metadata"];
    assert!(meta["annotations"][annotations::RELEASED_AT].is_null());
    meta["labels"][labels::KUEUE_QUEUE].clone()
}

/// In its queue, it may be released at any time.
fn assert_queued_with_job_data(server: &Server) {
    assert_eq!(queue_of(server), json!("team"));
    assert!(server.job_data_of("job-1-a").1.is_some());
    let job = server.object("jobs", "job-1-a").unwrap();
    assert!(job["metadata"]["annotations"][annotations::QUEUE].is_null());
    assert_eq!(server.count("jobs"), 1);
}

#[rstest]
#[tokio::test]
async fn whatever_call_a_crash_falls_on_a_job_enters_its_queue_after_its_secret(
    #[values(0, 1, 2, 3)] calls: usize,
    #[values(true, false)] carried_out: bool,
    #[values(0, 1)] limit: usize,
) {
    let server = Server::start();
    let crash = if carried_out {
        Crash::Within(calls)
    } else {
        Crash::Before(calls)
    };
    let objects = queued(objects("1", "a"));
    let crashing = server.crashing(crash).with_max_in_flight(limit);
    crashing.submit(&objects).await.ok();
    if server.count("jobs") == 1 && server.count("secrets") == 0 {
        assert_eq!(queue_of(&server), json!(labels::NO_QUEUE));
    }
    let other = server.cluster().with_max_in_flight(limit);
    other.submit(&objects).await.unwrap();
    assert_queued_with_job_data(&server);
    // A delivery that comes later changes nothing.
    other.submit(&objects).await.unwrap();
    assert_queued_with_job_data(&server);
}

#[tokio::test]
async fn a_job_cut_off_from_its_queue_enters_it_by_the_watcher_once() {
    let server = Server::start();
    let objects = queued(objects("1", "a"));
    server.submit_and_crash(Crash::Within(2), &objects).await;
    assert_eq!(queue_of(&server), json!(labels::NO_QUEUE));
    let watcher = server.cluster();
    let released = watcher.release_held("job-1-a", true).await.unwrap();
    assert_eq!(released, ReleaseOutcome::Released);
    assert_queued_with_job_data(&server);
    // The queue releases it from here on.
    watcher.release_held("job-1-a", true).await.unwrap();
    watcher.release("job-1-a").await.unwrap();
    assert_queued_with_job_data(&server);
}

#[tokio::test]
async fn a_held_job_enters_its_queue_only_when_it_is_released() {
    let server = Server::start();
    let cluster = server.cluster();
    cluster.hold(&queued(objects("1", "a"))).await.unwrap();
    assert_eq!(queue_of(&server), json!(labels::NO_QUEUE));
    cluster.release("job-1-a").await.unwrap();
    assert_queued_with_job_data(&server);
}

/// In a namespace with a default queue, a webhook names it in every Job that names none.
#[tokio::test]
async fn a_job_that_the_cluster_queued_is_left_to_its_queue() {
    let server = Server::start();
    let inner = Arc::clone(&server);
    let cluster = server.faulty(move |line, _| {
        if line.ends_with("/secrets") {
            let labels = json!({labels::KUEUE_QUEUE: "default"});
            inner.put(
                "jobs",
                json!({"metadata": {"name": "job-1-a", "labels": labels}}),
            );
        }
        None
    });
    cluster.store(&objects("1", "a")).await.unwrap();
    let released = server.cluster().release_held("job-1-a", true).await;
    assert_eq!(released.unwrap(), ReleaseOutcome::Released);
    assert_eq!(queue_of(&server), json!("default"));
}

#[tokio::test]
async fn without_a_secret_one_request_makes_a_run() {
    let server = Server::start();
    server.cluster().submit(&inline("1", "a")).await.unwrap();
    assert_eq!(server.requests(), ["post jobs"]);
    assert_eq!(
        server.object("jobs", "job-1-a").unwrap()["spec"]["suspend"],
        json!(false)
    );
}

#[rstest]
#[tokio::test]
async fn whatever_call_a_crash_falls_on_the_next_delivery_completes_the_run(
    #[values(0, 1, 2, 3)] calls: usize,
    #[values(true, false)] carried_out: bool,
) {
    let server = Server::start();
    let crash = if carried_out {
        Crash::Within(calls)
    } else {
        Crash::Before(calls)
    };
    let crashed = server.crashing(crash).submit(&objects("1", "a")).await;
    assert!(crashed.is_err() || (calls == 3 && !carried_out));
    let expected = if server.count("jobs") == 0 {
        Submitted::Created
    } else {
        Submitted::AlreadyThere
    };
    let again = server.cluster().submit(&objects("1", "a")).await.unwrap();
    assert_eq!(again, expected);
    assert_whole(&server, "job-1-a");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twenty_deliveries_to_two_replicas_make_one_job() {
    let server = Server::start();
    let created = Arc::new(AtomicUsize::new(0));
    let deliveries: Vec<_> = (0..20)
        .map(|_| {
            let (cluster, created) = (server.cluster(), Arc::clone(&created));
            tokio::spawn(async move {
                if cluster.submit(&objects("1", "a")).await.unwrap() == Submitted::Created {
                    created.fetch_add(1, Ordering::SeqCst);
                }
            })
        })
        .collect();
    for delivery in deliveries {
        delivery.await.unwrap();
    }
    assert_eq!(created.load(Ordering::SeqCst), 1);
    assert_whole(&server, "job-1-a");
}

#[tokio::test]
async fn a_finished_run_is_not_run_again() {
    let server = Server::start();
    server.cluster().submit(&objects("1", "a")).await.unwrap();
    server.put(
        "jobs",
        json!({"metadata": {"name": "job-1-a"},
        "status": {"conditions": [{"type": "Complete", "status": "True"}]}}),
    );
    let before = server.requests().len();
    assert_eq!(
        server.cluster().submit(&objects("1", "a")).await.unwrap(),
        Submitted::AlreadyThere
    );
    assert_eq!(server.requests()[before..], ["post jobs", "get jobs"]);
}

#[tokio::test]
async fn a_job_that_an_operator_suspended_is_left_alone() {
    let server = Server::start();
    server.cluster().submit(&objects("1", "a")).await.unwrap();
    server.put(
        "jobs",
        json!({"metadata": {"name": "job-1-a"}, "spec": {"suspend": true}}),
    );
    server.cluster().submit(&objects("1", "a")).await.unwrap();
    assert_eq!(
        server.object("jobs", "job-1-a").unwrap()["spec"]["suspend"],
        json!(true)
    );
}

#[tokio::test]
async fn the_secret_of_a_deleted_job_does_not_block_a_new_job() {
    let server = Server::start();
    server.cluster().submit(&objects("1", "a")).await.unwrap();
    let (left, secret) = server.job_data_of("job-1-a");
    server.remove("jobs", "job-1-a");
    // The garbage collector has not come yet.
    server.put("secrets", secret.unwrap());
    let again = server.cluster().submit(&objects("1", "a")).await.unwrap();
    assert_eq!(again, Submitted::Created);
    let (name, secret) = server.job_data_of("job-1-a");
    assert_ne!(name, left);
    assert!(secret.is_some());
    server.remove("secrets", &left);
    assert_whole(&server, "job-1-a");
}

/// A delivery gets 409, continues the Job, and the Job is deleted in between.
#[tokio::test]
async fn a_job_deleted_under_a_delivery_is_made_anew_with_job_data_of_its_own() {
    let server = Server::start();
    server
        .submit_and_crash(Crash::Before(1), &objects("1", "a"))
        .await;
    let (first, _) = server.job_data_of("job-1-a");
    let (inner, seen) = (Arc::clone(&server), first.clone());
    let patches = AtomicUsize::new(0);
    let delivery = server.faulty(move |line, _| {
        if line.starts_with("PATCH") && patches.fetch_add(1, Ordering::SeqCst) == 0 {
            let secret = inner.object("secrets", &seen).expect("it was stored");
            inner.remove("jobs", "job-1-a");
            // The garbage collector has not come yet.
            inner.put("secrets", secret);
        }
        None
    });
    let submitted = delivery.submit(&objects("1", "a")).await.unwrap();
    assert_eq!(submitted, Submitted::Created);
    let (name, secret) = server.job_data_of("job-1-a");
    assert_ne!(name, first);
    let job = server.object("jobs", "job-1-a").unwrap();
    let owner = &secret.unwrap()["metadata"]["ownerReferences"][0]["uid"];
    assert_eq!(*owner, job["metadata"]["uid"]);
    assert_never_reads_secrets(&server);
}

/// Whatever became of the Job before it.
#[tokio::test]
async fn no_two_jobs_name_the_same_job_data() {
    let server = Server::start();
    let names = Arc::new(std::sync::Mutex::new(Vec::new()));
    let (inner, seen) = (Arc::clone(&server), Arc::clone(&names));
    let cluster = server.faulty(move |line, number| {
        if line == "POST /apis/batch/v1/namespaces/runs/jobs" && number > 1 {
            seen.lock().unwrap().push(inner.job_data_of("job-1-a").0);
            inner.remove("jobs", "job-1-a");
        }
        None
    });
    for _ in 0..3 {
        let jobs = cluster.create_job(&objects("1", "a")).await.unwrap();
        assert!(job_data_secret(&jobs).is_some());
    }
    let (last, _) = server.job_data_of("job-1-a");
    let mut names = names.lock().unwrap().clone();
    names.push(last);
    names.sort();
    names.dedup();
    assert_eq!(names.len(), 3);
}

#[tokio::test]
async fn a_job_of_another_launcher_is_neither_taken_nor_removed() {
    let server = Server::start();
    server.put(
        "jobs",
        json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job-1-a"},
        "spec": {"template": {}}}),
    );
    let error = server
        .cluster()
        .submit(&objects("1", "a"))
        .await
        .unwrap_err();
    assert!(matches!(error, ClusterError::NameTaken { .. }), "{error}");
    assert!(!error.is_transient());
    assert!(server.object("jobs", "job-1-a").is_some());
}

/// As after a change of the mode of job data: the Job would wait for a Secret that no launcher creates.
#[tokio::test]
async fn a_job_cut_off_from_its_secret_is_made_anew_by_a_launcher_that_uses_none() {
    let server = Server::start();
    server
        .submit_and_crash(Crash::Before(1), &objects("1", "a"))
        .await;
    make_old(&server);
    let submitted = server.cluster().submit(&inline("1", "a")).await.unwrap();
    assert_eq!(submitted, Submitted::Created);
    let job = server.object("jobs", "job-1-a").unwrap();
    assert_eq!(job["spec"]["suspend"], json!(false));
    let executor = &job["spec"]["template"]["spec"]["containers"][0];
    assert!(executor["env"].is_null(), "{executor}");
    assert_eq!(server.count("secrets"), 0);
}

/// The run with another document, as the platform encodes it for another delivery.
fn of_document(text: &str) -> Manifest {
    let mut objects = objects("1", "a");
    let data = objects.secret.as_mut().unwrap().data.as_mut().unwrap();
    let text = text.as_bytes().to_vec();
    let digest = encoding::digest(&[&text]);
    data.insert("job-data".to_owned(), ByteString(text));
    let spec = objects.job.spec.as_mut().unwrap();
    let executor = &mut spec.template.spec.as_mut().unwrap().containers[0];
    executor.env.as_mut().unwrap().push(EnvVar {
        name: env::JOB_DATA_DIGEST.to_owned(),
        value: Some(digest),
        value_from: None,
    });
    objects
}

/// Its delivery has ended by now, or is slow.
fn make_old(server: &Server) {
    let then = server.now() - ABANDONED;
    server.put(
        "jobs",
        json!({"metadata": {"name": "job-1-a", "creationTimestamp": then.to_string()}}),
    );
}

/// The document in the Secret of the Job, which is the one that the Job accepts.
fn document_of(server: &Server) -> String {
    assert_whole(server, "job-1-a");
    let job: Job = serde_json::from_value(server.object("jobs", "job-1-a").unwrap()).unwrap();
    let secret: Secret = serde_json::from_value(server.job_data_of("job-1-a").1.unwrap()).unwrap();
    let stored = secret.data.unwrap().remove("job-data").unwrap().0;
    let accepted = pod::job_data_digest(job.spec.as_ref().unwrap().template.spec.as_ref().unwrap());
    assert_eq!(accepted, Some(&*encoding::digest(&[&stored])));
    String::from_utf8(stored).unwrap()
}

#[tokio::test]
async fn a_job_without_job_data_is_made_anew_for_another_document() {
    let server = Server::start();
    server
        .submit_and_crash(Crash::Before(1), &of_document("one"))
        .await;
    // Its delivery may be about to store the Secret.
    let early = server.cluster().submit(&of_document("two")).await;
    let early = early.unwrap_err();
    assert!(early.is_transient(), "{early}");
    assert_eq!((server.count("jobs"), server.count("secrets")), (1, 0));
    make_old(&server);
    let submitted = server.cluster().submit(&of_document("two")).await.unwrap();
    assert_eq!(submitted, Submitted::Created);
    assert_eq!(document_of(&server), "two");
}

/// The queue does not wait for the Secret.
#[tokio::test]
async fn a_job_that_its_queue_started_gets_the_job_data_that_a_crash_left_out() {
    let server = Server::start();
    let mut objects = of_document("one");
    let names = objects.job.metadata.labels.get_or_insert_default();
    names.insert(labels::KUEUE_QUEUE.to_owned(), "runs".to_owned());
    let crashing = server.crashing(Crash::Before(1));
    crashing.accept(&objects).await.unwrap_err();
    let started = json!({"metadata": {"name": "job-1-a"}, "spec": {"suspend": false}});
    server.put("jobs", started);
    let submitted = server.cluster().accept(&objects).await.unwrap();
    assert_eq!(submitted, Submitted::AlreadyThere);
    assert_eq!(document_of(&server), "one");
    let job = server.object("jobs", "job-1-a").unwrap();
    assert!(job["metadata"]["annotations"][annotations::STORED_AT].is_string());
}

/// During a look that takes long, the Job becomes old enough. Its delivery may have stored the Secret after that look.
#[tokio::test]
async fn a_look_for_job_data_does_not_count_if_the_job_was_young_before_it() {
    let server = Server::start();
    server
        .submit_and_crash(Crash::Before(1), &of_document("one"))
        .await;
    let inner = Arc::clone(&server);
    let other = server.faulty(move |line, _| {
        if line.starts_with("POST") && line.ends_with("/secrets") {
            inner.set_clock(SignedDuration::try_from(2 * ABANDONED).unwrap());
        }
        None
    });
    let submitted = other.submit(&of_document("two")).await.unwrap();
    assert_eq!(submitted, Submitted::Created);
    let requests = server.requests();
    let before = requests.split(|request| request == "patch jobs").next();
    let looks = before.unwrap().iter();
    let looks = looks.filter(|request| *request == "try to post secrets");
    assert_eq!(looks.count(), 2, "{requests:?}");
}

#[tokio::test]
async fn a_job_with_its_job_data_keeps_them_when_another_document_is_delivered() {
    let server = Server::start();
    server
        .submit_and_crash(Crash::Within(2), &of_document("one"))
        .await;
    let submitted = server.cluster().submit(&of_document("two")).await.unwrap();
    assert_eq!(submitted, Submitted::AlreadyThere);
    assert_eq!(document_of(&server), "one");
}

/// The slow delivery stores its Secret while the other one replaces the Job.
#[rstest]
#[tokio::test]
async fn a_slow_delivery_is_not_lost_to_another_document(
    #[values("PATCH", "DELETE")] overtaken: &'static str,
) {
    let server = Server::start();
    server
        .submit_and_crash(Crash::Before(1), &of_document("one"))
        .await;
    make_old(&server);
    let inner = Arc::clone(&server);
    let other = server.faulty(move |line, _| {
        if line.starts_with(overtaken) && inner.count("secrets") == 0 {
            let mut secret = serde_json::to_value(of_document("one").secret).unwrap();
            secret["metadata"]["name"] = json!(inner.job_data_of("job-1-a").0);
            let uid = &inner.object("jobs", "job-1-a").unwrap()["metadata"]["uid"];
            secret["metadata"]["ownerReferences"] =
                json!([{"apiVersion": "batch/v1", "kind": "Job", "name": "job-1-a", "uid": uid}]);
            inner.put("secrets", secret);
            inner.put(
                "jobs",
                json!({"metadata": {"name": "job-1-a", "annotations": {
                    "mayfly.dev/stored-at": "2026-01-01T00:00:00Z", "mayfly.dev/not-accepted": null}}}),
            );
        }
        None
    });
    let submitted = other.submit(&of_document("two")).await.unwrap();
    assert_eq!(submitted, Submitted::AlreadyThere);
    assert_eq!(document_of(&server), "one");
    let job = server.object("jobs", "job-1-a").unwrap();
    assert!(job["metadata"]["annotations"]["mayfly.dev/not-accepted"].is_null());
}

/// A person may delete its Job later, which is reported then.
#[tokio::test]
async fn a_job_that_was_to_be_replaced_and_is_accepted_after_all_says_so() {
    let server = Server::start();
    server
        .submit_and_crash(Crash::Before(1), &of_document("one"))
        .await;
    make_old(&server);
    // Reads the Job and the clock, looks for the Secret, marks the Job, and dies.
    server
        .submit_and_crash(Crash::Before(4), &of_document("two"))
        .await;
    let marked = || {
        let job = server.object("jobs", "job-1-a").unwrap();
        job["metadata"]["annotations"]["mayfly.dev/not-accepted"].clone()
    };
    assert_eq!(marked(), json!("true"));
    server.cluster().submit(&of_document("one")).await.unwrap();
    assert_eq!(document_of(&server), "one");
    assert_eq!(marked(), Value::Null);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twenty_deliveries_of_as_many_documents_make_one_job_with_one_of_them() {
    let server = Server::start();
    let deliveries: Vec<_> = (0..20)
        .map(|number| {
            let cluster = server.cluster();
            tokio::spawn(async move {
                let objects = of_document(&format!("document {number}"));
                // As the platform does.
                while let Err(error) = cluster.submit(&objects).await {
                    assert!(error.is_transient(), "{error}");
                }
            })
        })
        .collect();
    for delivery in deliveries {
        delivery.await.unwrap();
    }
    assert!(document_of(&server).starts_with("document "));
}

/// By a watcher that has not made the Job, and may not look at Secrets.
#[tokio::test]
async fn a_run_cut_between_its_secret_and_its_release_is_released() {
    let server = Server::start();
    server
        .submit_and_crash(Crash::Within(2), &objects("1", "a"))
        .await;
    assert!(server.job_data_of("job-1-a").1.is_some());
    let before = server.requests().len();
    assert_eq!(
        server
            .cluster()
            .release_held("job-1-a", true)
            .await
            .unwrap(),
        ReleaseOutcome::Released
    );
    assert_eq!(
        server.requests()[before..],
        ["get jobs", "try to post secrets", "patch jobs"]
    );
    assert_whole(&server, "job-1-a");
}

#[tokio::test]
async fn with_a_limit_the_release_is_left_to_the_watcher() {
    let server = Server::start();
    let cluster = server.cluster().with_max_in_flight(1);
    cluster.submit(&objects("1", "a")).await.unwrap();
    assert_eq!(server.requests(), ["post jobs", "post secrets"]);
    assert_eq!(
        cluster.release_held("job-1-a", false).await.unwrap(),
        ReleaseOutcome::Released
    );
    assert_whole(&server, "job-1-a");
}

#[tokio::test]
async fn a_job_without_job_data_is_removed_only_when_no_launcher_is_about_to_store_it() {
    let server = Server::start();
    server
        .submit_and_crash(Crash::Before(1), &objects("1", "a"))
        .await;
    let cluster = server.cluster();
    assert_eq!(
        cluster.release_held("job-1-a", false).await.unwrap(),
        ReleaseOutcome::Incomplete
    );
    assert_eq!(
        cluster.release_held("job-1-a", true).await.unwrap(),
        ReleaseOutcome::Removed
    );
    assert_eq!((server.count("jobs"), server.count("secrets")), (0, 0));
    assert_eq!(
        cluster.submit(&objects("1", "a")).await.unwrap(),
        Submitted::Created
    );
}

#[tokio::test]
async fn a_delivery_between_the_read_and_the_removal_keeps_its_run() {
    let server = Server::start();
    server
        .submit_and_crash(Crash::Before(1), &objects("1", "a"))
        .await;
    let inner = Arc::clone(&server);
    // While the reconciler deletes, the late delivery stores its Secret and writes to the Job.
    let reconciler = server.faulty(move |line, _| {
        if line.starts_with("DELETE") && inner.count("secrets") == 0 {
            let uid = inner.object("jobs", "job-1-a").unwrap()["metadata"]["uid"].clone();
            let mut secret = serde_json::to_value(objects("1", "a").secret.unwrap()).unwrap();
            secret["metadata"]["name"] = json!(inner.job_data_of("job-1-a").0);
            secret["metadata"]["ownerReferences"] =
                json!([{"apiVersion": "batch/v1", "kind": "Job", "name": "job-1-a", "uid": uid}]);
            inner.put("secrets", secret);
            inner.put(
                "jobs",
                json!({"metadata": {"name": "job-1-a",
                "annotations": {"mayfly.dev/stored-at": "2026-01-01T00:00:00Z"}}}),
            );
        }
        None
    });
    assert_eq!(
        reconciler.release_held("job-1-a", true).await.unwrap(),
        ReleaseOutcome::Incomplete
    );
    assert_eq!(
        reconciler.release_held("job-1-a", true).await.unwrap(),
        ReleaseOutcome::Released
    );
    assert_whole(&server, "job-1-a");
}

#[rstest]
// The Job controller says that it is suspended.
#[case::to_its_status(json!({"status": {"conditions": [{"type": "Suspended", "status": "True"}]}}), 0)]
#[case::its_release(json!({"spec": {"suspend": false},
    "metadata": {"annotations": {"mayfly.dev/released-at": "2026-01-01T00:00:00Z"}}}), 1)]
#[tokio::test]
async fn a_held_job_is_dismissed_whatever_is_written_to_it_but_its_release(
    #[case] written: Value,
    #[case] left: usize,
) {
    let server = Server::start();
    server.cluster().hold(&inline("1", "a")).await.unwrap();
    let (inner, once) = (Arc::clone(&server), Once::new());
    let cluster = server.faulty(move |line, _| {
        if line.starts_with("DELETE") {
            once.call_once(|| {
                let mut job = written.clone();
                job["metadata"]["name"] = json!("job-1-a");
                inner.put("jobs", job);
            });
        }
        None
    });
    cluster.dismiss("job-1-a").await.unwrap();
    assert_eq!(server.count("jobs"), left);
}

fn busy(code: StatusCode, retry_after: Option<&str>) -> Response<AnyBody> {
    let mut response = Response::builder().status(code);
    if let Some(seconds) = retry_after {
        response = response.header("Retry-After", seconds);
    }
    response
        .body(AnyBody::from("Too many requests, please try again later."))
        .unwrap()
}

#[tokio::test]
async fn a_busy_api_server_is_asked_again_within_one_call() {
    let server = Server::start();
    let cluster = server
        .faulty(|_, number| (number % 2 == 1).then(|| busy(StatusCode::SERVICE_UNAVAILABLE, None)));
    cluster.submit(&objects("1", "a")).await.unwrap();
    assert_whole(&server, "job-1-a");
}

#[tokio::test]
async fn a_long_retry_after_is_left_to_the_caller() {
    let server = Server::start();
    let cluster = server.faulty(|_, _| Some(busy(StatusCode::TOO_MANY_REQUESTS, Some("7"))));
    let error = cluster.submit(&objects("1", "a")).await.unwrap_err();
    assert!(error.is_transient());
    assert_eq!(error.retry_after(), Some(Duration::from_secs(7)));
}

#[rstest]
#[case::quota(
    403,
    "Forbidden",
    "jobs is forbidden: exceeded quota: jobs, used: 1",
    true
)]
#[case::rights(403, "Forbidden", "jobs.batch is forbidden: User cannot create", false)]
#[case::invalid(422, "Invalid", "spec.template: Required value", false)]
#[case::no_namespace(404, "NotFound", "namespaces \"runs\" not found", false)]
#[case::broken(500, "InternalError", "etcdserver: leader changed", true)]
#[tokio::test]
async fn refusals_are_classified_and_keep_the_message_of_the_api_server(
    #[case] code: u16,
    #[case] reason: &'static str,
    #[case] message: &'static str,
    #[case] transient: bool,
) {
    let server = Server::start();
    let code = StatusCode::from_u16(code).unwrap();
    let cluster = server.faulty(move |_, _| Some(refusal(code, reason, message)));
    let error = cluster.submit(&objects("1", "a")).await.unwrap_err();
    assert_eq!(error.is_transient(), transient);
    assert!(error.to_string().contains(message), "{error}");
}

#[rstest]
#[case::a_full_quota(
    403,
    "exceeded quota: secrets, requested: secrets=1",
    "raise the quota"
)]
#[case::a_webhook(
    400,
    "admission webhook \"w\" does not support dry run",
    "NoneOnDryRun"
)]
#[case::a_policy(403, "secrets is forbidden", "api-launcher check")]
#[tokio::test]
async fn job_data_that_cannot_be_looked_for_leads_to_advice(
    #[case] code: u16,
    #[case] message: &'static str,
    #[case] advice: &str,
) {
    let server = Server::start();
    // Its launcher died before the release.
    server
        .submit_and_crash(Crash::Within(2), &objects("1", "a"))
        .await;
    let cluster = server.faulty(move |line, _| {
        let is_trial = line.starts_with("POST") && line.ends_with("/secrets");
        is_trial.then(|| refusal(StatusCode::from_u16(code).unwrap(), "Refused", message))
    });
    let error = cluster.release_held("job-1-a", true).await.unwrap_err();
    let given = trial_advice(&error).unwrap_or_default();
    assert!(given.contains(advice), "{error}: {given}");
}

/// A policy or webhook of the cluster refuses the Secret of one run.
#[tokio::test]
async fn a_run_whose_job_data_is_refused_is_not_taken_for_accepted() {
    let server = Server::start();
    let inner = Arc::clone(&server);
    let cluster = server.faulty(move |line, _| {
        let is_secret = line.starts_with("POST") && line.ends_with("/secrets");
        if is_secret {
            // The Job controller has seen the Job.
            let conditions = json!([{"type": "Suspended", "status": "True"}]);
            let seen =
                json!({"metadata": {"name": "job-1-a"}, "status": {"conditions": conditions}});
            inner.put("jobs", seen);
        }
        let message = "admission webhook \"w\" denied the request";
        is_secret.then(|| refusal(StatusCode::FORBIDDEN, "Forbidden", message))
    });
    let error = cluster.accept(&objects("1", "a")).await.unwrap_err();
    assert!(error.concerns_one_run(), "{error}");
    assert_eq!(server.count("jobs"), 0);
    assert!(!cluster.has_run("1", "a").await.unwrap());
}

#[tokio::test]
async fn a_run_was_accepted_once_its_job_data_is_stored() {
    let server = Server::start();
    let cluster = server.cluster();
    let crashing = server.crashing(Crash::Before(1));
    crashing.accept(&objects("1", "a")).await.unwrap_err();
    // Its delivery may still store them.
    let unknown = cluster.has_run("1", "a").await.unwrap_err();
    assert!(unknown.is_transient(), "{unknown}");
    let created = cluster.now() - SignedDuration::try_from(ABANDONED).unwrap();
    let old = json!({"name": "job-1-a", "creationTimestamp": created.to_string()});
    server.put("jobs", json!({"metadata": old}));
    assert!(!cluster.has_run("1", "a").await.unwrap());
    cluster.hold(&objects("1", "a")).await.unwrap();
    assert!(cluster.has_run("1", "a").await.unwrap());
}

/// What `render` prints of a plan, and the same with a change.
fn printed(manifest: &Manifest, change: impl FnOnce(&mut Value)) -> Value {
    let mut list = manifest.of_attempt("0000000000000000").to_list();
    change(&mut list["items"]);
    list["items"].take()
}

/// The name of the Secret that a Job reads.
fn secret_of(server: &Server, name: &str) -> Option<String> {
    let job: Job = serde_json::from_value(server.object("jobs", name)?).unwrap();
    job_data_secret(&job).map(str::to_owned)
}

/// What a cluster has, as it was created. The server adds three fields of its own.
fn created(server: &Server, name: &str) -> Value {
    let secret = secret_of(server, name).and_then(|secret| server.object("secrets", &secret));
    let mut items: Vec<Value> = server
        .object("jobs", name)
        .into_iter()
        .chain(secret)
        .collect();
    for item in &mut items {
        let meta = item["metadata"].as_object_mut().unwrap();
        for own in ["uid", "creationTimestamp", "resourceVersion"] {
            meta.remove(own);
        }
    }
    items.into()
}

fn plan_manifest(mode: Mode) -> Manifest {
    let json = r#"{"type":"terraformPlan","organizationId":"o","workspaceId":"w","jobId":"1","stepId":"a",
        "environmentVariables":{"EPHEMERAL_CONFIG_ANNOTATIONS":"team=a","EPHEMERAL_CONFIG_LABELS":"cost=b"}}"#;
    let deployment = Deployment {
        job_data_mode: mode,
        ..Deployment::default()
    };
    manifest::build(&Document::from_json(json.into()).unwrap(), &deployment).unwrap()
}

/// The help of `render` and `docs/kubernetes-manifest.md` name each difference.
#[tokio::test]
async fn what_render_prints_is_created_but_for_the_differences_it_names() {
    // What `launch` creates. With a limit, the Job stays as it was created.
    let manifest = plan_manifest(Mode::Secret);
    let server = Server::start();
    let cluster = server.cluster().with_max_in_flight(1);
    cluster.submit(&manifest).await.unwrap();
    assert_eq!(server.requests(), ["post jobs", "post secrets"]);
    let name = name_of(&manifest.job.metadata).unwrap();
    let secret = secret_of(&server, name).unwrap();
    let uid = server.object("jobs", name).unwrap()["metadata"]["uid"].clone();
    let owner = json!([{"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": uid,
        "controller": true, "blockOwnerDeletion": false}]);
    let expected = printed(&manifest, |items| {
        items[1]["metadata"]["ownerReferences"] = owner;
        let zeros = items[1]["metadata"]["name"].as_str().unwrap().to_owned();
        assert_eq!(zeros.len(), secret.len());
        let text = items.to_string().replace(&zeros, &secret);
        *items = serde_json::from_str(&text).unwrap();
    });
    assert_eq!(created(&server, name), expected);

    // What `serve` creates, without a Secret and without a limit, in one request.
    let manifest = plan_manifest(Mode::Env);
    let server = Server::start();
    server.cluster().accept(&manifest).await.unwrap();
    assert_eq!(server.requests(), ["post jobs"]);
    let found = created(&server, name);
    let released = found[0]["metadata"]["annotations"][annotations::RELEASED_AT].clone();
    assert!(released.is_string(), "{found:#}");
    let expected = printed(&manifest, |items| {
        let job = &mut items[0];
        job["spec"]["suspend"] = json!(false);
        job["spec"]["ttlSecondsAfterFinished"] = json!(86_400);
        let noted = &mut job["metadata"]["annotations"];
        noted[annotations::RELEASED_AT] = released;
        noted[annotations::KEEP_SECONDS] = json!("600");
    });
    assert_eq!(found, expected);

    // With a queue, it is created outside of the queue.
    let manifest = queued(plan_manifest(Mode::Env));
    let server = Server::start();
    server.submit_and_crash(Crash::Within(1), &manifest).await;
    let expected = printed(&manifest, |items| {
        let meta = &mut items[0]["metadata"];
        meta["labels"][labels::KUEUE_QUEUE] = json!(labels::NO_QUEUE);
        meta["annotations"][annotations::QUEUE] = json!("team");
    });
    assert_eq!(created(&server, name), expected);
}
