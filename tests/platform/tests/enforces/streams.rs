//! Logs and heartbeats in Redis, as Java writes them.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_job_without_a_heartbeat_as_java_writes_it_fails() {
    let redis = RedisServer::start().unwrap();
    let builder = Platform::builder()
        .redis(&format!("redis://{}", redis.address()))
        .grace(Duration::from_millis(500))
        .silent_within(Duration::from_millis(100));
    let scene = Scene::of(builder).await;
    let mut client = redis.connect().unwrap();
    let mut beat = |key: &[u8]| {
        cmd("SET")
            .arg(key)
            .arg(b"1")
            .arg("EX")
            .arg(45)
            .exec(&mut client)
            .unwrap();
    };
    let (alive, plain) = (412, 413);
    beat(&java::encode(&format!("executor-job-heartbeat:{alive}")));
    beat(format!("executor-job-heartbeat:{plain}").as_bytes());
    let second = scene
        .platform
        .workspace(Workspace::new("https://git.example.test/b.git"));
    assert_eq!(scene.start(Flow::plan_apply()), alive);
    assert_eq!(
        scene
            .platform
            .start_job(NewJob::new(&second, Flow::plan_apply())),
        plain
    );
    scene.platform.until_job(plain, Status::Failed).await;
    scene
        .platform
        .until("the other was looked at", |records| {
            (records.job(alive).spared > 0).then_some(())
        })
        .await;
    assert_eq!(scene.platform.job(alive).status, Status::Queue);
    assert!(scene.platform.heartbeat(alive).await.is_some());
    scene.platform.look_back().await;
    assert_eq!(scene.broken(), [Rule::PlainRedis]);
    // What is left behind is found.
    scene.platform.cancel(alive).await;
    scene.platform.look_back().await;
    assert_eq!(scene.broken(), [Rule::PlainRedis, Rule::HeartbeatLeft]);
}

fn add(
    client: &mut redis::Connection,
    key: &[u8],
    fields: &[(&str, &str)],
    encode: fn(&str) -> Vec<u8>,
) {
    let mut add = cmd("XADD");
    add.arg(key).arg("*");
    for (name, value) in fields {
        add.arg(encode(name)).arg(encode(value));
    }
    add.exec(client).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn lines_before_the_job_is_in_the_queue_are_lost_and_noted() {
    let redis = RedisServer::start().unwrap();
    let (open, wait) = gate();
    let answer = move || {
        wait.lock().unwrap().recv().unwrap();
        accepted()
    };
    let builder = Platform::builder()
        .release(Release::Old)
        .redis(&format!("redis://{}", redis.address()));
    let scene = Scene::answering(builder, answer).await;
    let job = scene.start(Flow::plan_apply());
    scene
        .platform
        .until("the dispatch is open", |records| {
            records.open_posts.contains(&job).then_some(())
        })
        .await;
    let step = scene.platform.job(job).steps[0].id.clone();
    let mut client = redis.connect().unwrap();
    let (id, key) = (job.to_string(), java::encode(&job.to_string()));
    let line = |text| {
        [
            ("jobId", id.as_str()),
            ("stepId", step.as_str()),
            ("lineNumber", "1"),
            ("output", text),
        ]
    };
    add(&mut client, &key, &line("early"), java::encode);
    open.send(()).unwrap();
    scene.platform.until_job(job, Status::Queue).await;
    assert_eq!(scene.broken(), [Rule::BeforeQueue]);

    add(&mut client, &key, &line("now"), java::encode);
    // Neither the platform nor its readers see what is not in their encoding, or has not its fields.
    add(&mut client, &key, &line("plain"), |text| {
        text.as_bytes().to_vec()
    });
    add(&mut client, &key, &line("short")[..3], java::encode);
    let context = java::encode(&format!("{job}-context"));
    add(
        &mut client,
        &context,
        &[("output", "{\"phase\":\"plan\"}")],
        java::encode,
    );
    let lines: Vec<String> = scene
        .platform
        .streamed(job)
        .await
        .into_iter()
        .map(|entry| entry.output)
        .collect();
    assert_eq!(lines, ["early", "now"]);
    assert_eq!(
        scene.platform.structured(job).await,
        [json!({"phase": "plan"})]
    );
    scene.platform.look_back().await;
    assert_eq!(
        scene.broken(),
        [
            Rule::BeforeQueue,
            Rule::PlainRedis,
            Rule::LogEntry,
            Rule::StreamWithoutExpiry
        ]
    );
}

/// That is no mistake of an executor, which cannot know when the stream is deleted.
#[tokio::test(flavor = "multi_thread")]
async fn lines_before_the_late_deletion_of_a_newer_release_are_lost() {
    let redis = RedisServer::start().unwrap();
    let builder = Platform::builder().redis(&format!("redis://{}", redis.address()));
    let scene = Scene::of(builder).await;
    let held = scene.platform.hold_deletions().await;
    let job = scene.start(Flow::plan_apply());
    let in_queue = |records: &Records| (records.job(job).status == Status::Queue).then_some(());
    scene.platform.until("it is in the queue", in_queue).await;
    let step = scene.platform.job(job).steps[0].id.clone();
    let mut client = redis.connect().unwrap();
    let (id, key) = (job.to_string(), java::encode(&job.to_string()));
    let mut add_line = |text| {
        let fields = [
            ("jobId", id.as_str()),
            ("stepId", step.as_str()),
            ("lineNumber", "1"),
            ("output", text),
        ];
        add(&mut client, &key, &fields, java::encode);
    };
    add_line("early");
    drop(held);
    scene.platform.until_job(job, Status::Queue).await;
    add_line("now");
    let lines = scene.platform.streamed(job).await;
    let lines: Vec<_> = lines.iter().map(|entry| entry.output.as_str()).collect();
    assert_eq!(lines, ["now"]);
    assert_eq!(scene.broken(), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn lines_over_http_end_up_in_the_same_stream_and_not_after_the_end() {
    let redis = RedisServer::start().unwrap();
    for builder in [
        Platform::builder(),
        Platform::builder().redis(&format!("redis://{}", redis.address())),
    ] {
        let scene = Scene::of(builder).await;
        let job = scene.queued(Flow::plan_apply()).await;
        let groups = format!("/logs/{}/setup-consumer-groups", job.id);
        assert_eq!(
            scene.send("POST", &groups, JSON_API, &Value::Null).await,
            200
        );
        let step = &job.steps[0].id;
        let line = |text: &str| json!({"data": [{"jobId": job.id, "stepId": step, "lineNumber": 1, "output": text}]});
        assert_eq!(
            scene
                .send("POST", "/logs", JSON_API, &line("h\u{e9}\u{1f600}"))
                .await,
            200
        );
        let lines = scene.platform.streamed(job.id).await;
        assert_eq!(lines[0].output, "h\u{e9}\u{1f600}");
        scene.platform.assert_kept().await;
        scene
            .carry_out(job.id, json!({"status": "completed"}))
            .await;
        assert_eq!(
            scene.send("POST", "/logs", JSON_API, &line("late")).await,
            200
        );
        assert_eq!(scene.broken(), [Rule::LogAfterEnd]);
    }
}
