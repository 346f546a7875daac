//! A job while its dispatch is open, and dispatches that the platform does not send.

use super::*;

/// Newer releases lock nothing, and write back what they had read before.
#[tokio::test(flavor = "multi_thread")]
async fn a_change_during_a_dispatch_of_a_newer_release_is_lost_and_noted() {
    let (open, wait) = gate();
    let answer = move || {
        wait.lock().unwrap().recv().unwrap();
        accepted()
    };
    let scene = Scene::answering(Platform::builder(), answer).await;
    let job = scene.start(Flow::plan_apply());
    scene
        .platform
        .until("the dispatch is open", |records| {
            records.open_posts.contains(&job).then_some(())
        })
        .await;
    let running = json!({"status": "running", "commitId": "9f1c"});
    assert_eq!(scene.patch_job(job, running).await, 204);
    assert_eq!(scene.platform.job(job).status, Status::Running);
    open.send(()).unwrap();
    let after = scene.platform.until_job(job, Status::Queue).await;
    assert_eq!(after.commit_id, None);
    assert!(scene.broken().contains(&Rule::DuringDispatch));
}

#[tokio::test(flavor = "multi_thread")]
async fn executors_in_private_networks_are_refused_unless_that_is_allowed() {
    let builder = || Platform::builder().blocking_private_networks();
    let scene = Scene::of(builder()).await;
    let job = scene.start(Flow::plan_apply());
    let failed = scene.platform.until_job(job, Status::Failed).await;
    let name = &failed.steps[0].name;
    assert!(
        name.starts_with("Error sending to executor: ") && name.contains("agent URL blocked: "),
        "{name}"
    );
    let older = Scene::of(builder().release(Release::Old)).await;
    older.queued(Flow::plan_apply()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_of_a_workspace_with_an_agent_are_sent_there() {
    let scene = Scene::new().await;
    let agent = Server::start(|_| accepted()).unwrap();
    let workspace = scene.platform.workspace(Workspace {
        agent: Some(format!("{}/pools/own", agent.url())),
        ..Workspace::new("https://git.example.test/a.git")
    });
    let new = NewJob::new(&workspace, Flow::plan_apply());
    let job = scene.platform.start_job(new);
    scene.platform.until_job(job, Status::Queue).await;
    let sent = agent.requests();
    assert_eq!(sent[0].path, "/pools/own/api/v1/terraform-rs");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_during_the_dispatch_waits_for_its_end_and_is_noted() {
    let (open, wait) = gate();
    let answer = move || {
        wait.lock().unwrap().recv().unwrap();
        accepted()
    };
    let builder = Platform::builder().release(Release::Old);
    let scene = Arc::new(Scene::answering(builder, answer).await);
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
