//! The lock on a job while its dispatch is open.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_change_during_the_dispatch_waits_for_its_end_and_is_noted() {
    let (open, wait) = gate();
    let answer = move || {
        wait.lock().unwrap().recv().unwrap();
        accepted()
    };
    let scene = Arc::new(Scene::answering(Platform::builder(), answer).await);
    let job = scene.start(Flow::plan_apply());
    scene
        .platform
        .until("the dispatch is open", |records| {
            records.open_posts.contains(&job).then_some(())
        })
        .await;
    let seen = scene
        .request("GET", &scene.job_path(job))
        .send()
        .await
        .unwrap();
    let seen: Value = serde_json::from_str(&seen.text().await.unwrap()).unwrap();
    assert_eq!(seen["data"]["attributes"]["status"], "pending");

    let patch = Arc::clone(&scene);
    let patch =
        tokio::spawn(async move { patch.patch_job(job, json!({"status": "running"})).await });
    scene
        .platform
        .until_asked("the change has come", |ledger| {
            (!ledger.of("PATCH", "/job/").is_empty()).then_some(())
        })
        .await;
    open.send(()).unwrap();
    assert_eq!(patch.await.unwrap(), 204);
    let now: Vec<Status> = scene
        .platform
        .records()
        .transitions
        .iter()
        .map(|change| change.to)
        .collect();
    assert_eq!(now, [Status::Queue, Status::Running]);
    assert_eq!(scene.broken(), [Rule::DuringDispatch]);
    let during: Vec<bool> = scene
        .platform
        .ledger()
        .requests
        .iter()
        .map(|request| request.during_dispatch)
        .collect();
    assert_eq!(during, [true, true]);
}
