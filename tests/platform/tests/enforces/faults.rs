//! The platform away, and requests that go wrong by order.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_platform_that_is_away_refuses_connections_and_comes_back_as_it_was() {
    let scene = Scene::new().await;
    let job = scene.queued(Flow::plan_apply()).await.id;
    scene.platform.go_down().await;
    for _ in 0..3 {
        let refused = scene
            .request("GET", &scene.job_path(job))
            .send()
            .await
            .unwrap_err();
        assert!(refused.is_connect(), "{refused:?}");
    }
    scene.platform.come_up().await;
    assert_eq!(
        status(scene.request("GET", &scene.job_path(job))).await,
        200
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn ordered_faults_hit_what_they_were_ordered_for() {
    let scene = Scene::new().await;
    let job = scene.queued(Flow::plan_apply()).await.id;
    let path = scene.job_path(job);
    scene
        .platform
        .fault(Fault::once("PATCH", "/job/", Effect::Status(502)));
    scene
        .platform
        .fault(Fault::once("PATCH", "/job/", Effect::DropBefore));
    scene
        .platform
        .fault(Fault::once("PATCH", "/job/", Effect::DropAfter));
    assert_eq!(status(scene.request("GET", &path)).await, 200);
    let running = json!({"data": {"type": "job", "id": job.to_string(), "attributes": {"status": "running"}}});
    let send = || {
        scene
            .request("PATCH", &path)
            .header("content-type", JSON_API)
            .body(running.to_string())
    };
    assert_eq!(status(send()).await, 502);
    // A client may repeat a request whose connection it was given back, so that each gets its own.
    for expected in [Status::Queue, Status::Running] {
        assert!(
            send()
                .version(reqwest::Version::HTTP_11)
                .send()
                .await
                .is_err()
        );
        assert_eq!(scene.platform.job(job).status, expected);
    }
    assert_eq!(status(send()).await, 204);
    scene.platform.fault(Fault::always(
        "GET",
        "/job/",
        Effect::Slow(Duration::from_millis(50)),
    ));
    let began = std::time::Instant::now();
    assert_eq!(status(scene.request("GET", &path)).await, 200);
    assert!(began.elapsed() >= Duration::from_millis(50));
    scene.platform.clear_faults();
    scene.platform.assert_kept().await;
}
