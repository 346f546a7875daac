//! Dispatches: order, locks, answers.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn the_default_template_carried_out_by_the_book_breaks_nothing() {
    let scene = Scene::new().await;
    let job = scene.start(Flow::plan_approve_apply());
    let plan =
        json!({"status": "pending", "planChanges": true, "terraformPlan": "x", "output": ""});
    scene.carry_out(job, plan).await;
    scene.platform.until_job(job, Status::WaitingApproval).await;
    scene.platform.approve(job).await;
    for _ in ["approval", "terraformApply"] {
        scene
            .carry_out(job, json!({"status": "pending", "planChanges": true}))
            .await;
    }
    let job = scene.platform.until_job(job, Status::Completed).await;
    assert_eq!(job.step_statuses(), [Status::Completed; 3]);
    let types: Vec<Value> = scene
        .dispatched
        .lock()
        .unwrap()
        .iter()
        .map(|data| data["type"].clone())
        .collect();
    assert_eq!(types, ["terraformPlan", "approval", "terraformApply"]);
    scene.platform.assert_kept().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_during_the_dispatch_waits_for_its_end_and_is_noted() {
    let (open, wait) = gate();
    let answer = move |_| {
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

#[tokio::test(flavor = "multi_thread")]
async fn a_dispatch_without_an_answer_is_repeated_with_the_same_step() {
    let (open, wait) = gate();
    let answer = move |number| {
        if number == 1 {
            wait.lock().unwrap().recv().unwrap();
        }
        accepted()
    };
    let builder = Platform::builder().answer_within(Duration::from_millis(300));
    let scene = Scene::answering(builder, answer).await;
    let job = scene.queued(Flow::plan_apply()).await;
    open.send(()).unwrap();
    assert!(job.posts >= 2);
    let dispatched = scene.dispatched.lock().unwrap().clone();
    assert_eq!(dispatched[0], dispatched[1]);
    assert_eq!(dispatched[0]["stepId"], job.steps[0].id);
    scene.platform.assert_kept().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_executor_that_is_busy_holds_up_everybody_until_it_says_that_it_is_not() {
    let redis = RedisServer::start().unwrap();
    let busy = Arc::new(Mutex::new(true));
    let is_busy = Arc::clone(&busy);
    let answer = move |_| {
        if *is_busy.lock().unwrap() {
            Response::new(503, "")
        } else {
            accepted()
        }
    };
    // Longer than this test may take: only the message can wake it.
    let builder = Platform::builder()
        .redis(&format!("redis://{}", redis.address()))
        .retry(Duration::from_mins(10));
    let scene = Scene::answering(builder, answer).await;
    let first = scene.start(Flow::plan_apply());
    scene
        .platform
        .until("it was tried", |records| {
            let tried = records.job(first).posts == 1 && records.open_posts.is_empty();
            tried.then_some(())
        })
        .await;
    let other = scene
        .platform
        .workspace(Workspace::new("https://git.example.test/b.git"));
    let second = scene
        .platform
        .start_job(NewJob::new(&other, Flow::plan_apply()));
    assert_eq!(scene.platform.job(first).status, Status::Pending);
    *busy.lock().unwrap() = false;
    let mut redis = redis.connect().unwrap();
    // The platform may still be on its way to the channel, or lose the connection a message came on.
    let woken = async {
        while scene.platform.job(first).status == Status::Pending {
            let publish = cmd("PUBLISH")
                .arg("terrakube:executor-available")
                .arg("x")
                .query::<u32>(&mut redis);
            publish.unwrap();
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let limit = Duration::from_mins(1);
    tokio::time::timeout(limit, woken)
        .await
        .expect("it is woken");
    scene.platform.until_job(first, Status::Queue).await;
    scene.platform.until_job(second, Status::Queue).await;
    let order: Vec<u32> = scene
        .platform
        .records()
        .transitions
        .iter()
        .map(|change| change.job)
        .collect();
    assert_eq!(order, [first, second]);
}

#[tokio::test(flavor = "multi_thread")]
async fn any_other_answer_fails_the_job() {
    let scene = Scene::answering(Platform::builder(), |_| Response::new(200, "{}")).await;
    let job = scene.start(Flow::plan_apply());
    let job = scene.platform.until_job(job, Status::Failed).await;
    assert_eq!(job.step_statuses(), [Status::Failed; 2]);
    assert!(
        job.steps[0].name.contains("200 OK"),
        "{}",
        job.steps[0].name
    );
}
