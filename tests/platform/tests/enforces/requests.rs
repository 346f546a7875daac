//! Which requests are accepted, and with which tokens.

use super::*;

#[tokio::test(flavor = "multi_thread")]
#[expect(clippy::too_many_lines, reason = "a table")]
async fn requests_the_platform_does_not_take_are_refused() {
    let scene = Scene::new().await;
    let job = scene.queued(Flow::plan_apply()).await;
    let path = scene.job_path(job.id);
    let step = format!("{path}/step/{}", job.steps[0].id);
    let history = format!(
        "/api/v1/organization/{}/workspace/{}/history",
        scene.platform.organization(),
        scene.workspace
    );
    let (context, unknown) = (format!("/context/v1/{}", job.id), "/context/v1/9999");
    let document = |kind: &str, id: &str, attributes: Value| json!({"data": {"type": kind, "id": id, "attributes": attributes}});
    let id = job.id.to_string();
    let of_job = |attributes: Value| document("job", &id, attributes);
    let of_step = |attributes: Value| document("step", &job.steps[0].id, attributes);
    let long = |length: usize| json!("x".repeat(length));
    let running = of_job(json!({"status": "running"}));
    let line = json!({"data": [{"jobId": id, "stepId": "s", "lineNumber": 1, "output": "x"}]});
    let too_wide = json!({"type": "history", "attributes": {"jobReference": long(37)}});
    let unsupported = [
        ("PATCH", path.as_str(), JSON, running.clone()),
        (
            "PATCH",
            &path,
            "application/vnd.api+json; charset=utf-8",
            running,
        ),
        ("POST", &context, JSON_API, json!({})),
        ("POST", "/logs", JSON, json!({"data": []})),
    ];
    let malformed = [
        (
            "PATCH",
            path.as_str(),
            JSON_API,
            json!({"status": "running"}),
        ),
        ("PATCH", &path, JSON_API, document("job", "1", json!({}))),
        ("PATCH", &path, JSON_API, of_job(json!({"status": "done"}))),
        (
            "PATCH",
            &path,
            JSON_API,
            of_job(json!({"planChanges": "true"})),
        ),
        ("POST", &context, JSON, json!([])),
    ];
    let wide = [
        (
            "PATCH",
            path.as_str(),
            JSON_API,
            of_job(json!({"commitId": long(65)})),
        ),
        (
            "PATCH",
            &path,
            JSON_API,
            of_job(json!({"terraformPlan": long(1025)})),
        ),
        (
            "PATCH",
            &step,
            JSON_API,
            of_step(json!({"name": long(129)})),
        ),
        (
            "PATCH",
            &step,
            JSON_API,
            of_step(json!({"output": long(1025)})),
        ),
        ("POST", &history, JSON_API, json!({"data": too_wide})),
    ];
    let strange = of_job(json!({"state": "running"}));
    for (expected, rule, requests) in [
        (415, Some(Rule::MediaType), &unsupported[..]),
        (400, Some(Rule::BadDocument), &malformed[..]),
        (400, Some(Rule::TooWide), &wide[..]),
        (
            400,
            Some(Rule::UnknownAttribute),
            &[("PATCH", path.as_str(), JSON_API, strange)][..],
        ),
        (
            400,
            Some(Rule::LogEntry),
            &[("POST", "/logs", JSON_API, line)][..],
        ),
        (404, None, &[("POST", unknown, JSON, json!({}))][..]),
    ] {
        for (method, path, media_type, body) in requests {
            let before = scene.platform.ledger().violations.len();
            assert_eq!(
                scene.send(method, path, media_type, body).await,
                expected,
                "{path} {body}"
            );
            let noted: Vec<Rule> = scene.platform.ledger().violations[before..]
                .iter()
                .map(|found| found.rule)
                .collect();
            assert_eq!(noted, rule.into_iter().collect::<Vec<_>>(), "{path} {body}");
        }
    }
    let picky = scene
        .request("GET", &path)
        .header("accept", "application/json");
    assert_eq!(status(picky).await, 406);
    let unchanged = scene.platform.job(job.id);
    assert_eq!(
        (unchanged.status, &unchanged.steps),
        (Status::Queue, &job.steps)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_decide_who_may_do_what() {
    let scene = Scene::new().await;
    let job = scene.queued(Flow::plan_apply()).await;
    let content = scene.platform.upload(b"archive".to_vec());
    let url = format!("{}{}", scene.platform.url(), scene.job_path(job.id));
    let person = token(&json!({"iss": "Terrakube"}));
    let stale = token(&json!({"exp": 1_767_225_660}));
    let dispatch = scene.platform.dispatch_token();
    for bad in [&stale, &dispatch, &"x".to_owned()] {
        let request = scene.client.get(&url).bearer_auth(bad);
        assert_eq!(status(request).await, 401, "{bad}");
    }
    assert_eq!(status(scene.client.get(&url)).await, 401);
    assert_eq!(scene.broken(), [Rule::Token]);
    assert_eq!(
        status(scene.client.get(&url).bearer_auth(&person)).await,
        200
    );
    let patch = scene
        .client
        .patch(&url)
        .bearer_auth(&person)
        .header("content-type", JSON_API);
    assert_eq!(status(patch).await, 403);
    assert_eq!(status(scene.client.get(&content)).await, 401);
    let fetched = scene
        .client
        .get(&content)
        .bearer_auth(token(&json!({})))
        .send()
        .await
        .unwrap();
    assert_eq!(fetched.bytes().await.unwrap(), "archive");
    let issuers: Vec<_> = scene
        .platform
        .ledger()
        .of("GET", "terraformContent")
        .iter()
        .map(|request| request.issuer.clone())
        .collect();
    assert_eq!(issuers, [None, Some("TerrakubeInternal".to_owned())]);

    assert!(!scene.broken().contains(&Rule::TokenLifetime));
    let made = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_secs();
    let long = token(&json!({"exp": made + 30 * 24 * 3600}));
    assert_eq!(status(scene.client.get(&url).bearer_auth(long)).await, 200);
    assert!(scene.broken().contains(&Rule::TokenLifetime));
}

/// The tokens that newer releases know, and what these may do with a job, its context and uploaded content.
#[tokio::test(flavor = "multi_thread")]
async fn newer_releases_classify_internal_tokens() {
    let executor = json!({});
    let old = json!({"sub": "TerrakubeInternal (TOKEN)"});
    let registry = json!({"sub": "TerrakubeInternal (REGISTRY)"});
    for (release, class, job_status, context_status, content_status) in [
        (Release::Newest, "executor", 200, 200, 200),
        (Release::Newest, "step", 200, 200, 403),
        (Release::Newest, "step of another job", 403, 403, 403),
        (
            Release::Newest,
            "step of another organization",
            403,
            200,
            403,
        ),
        (Release::Newest, "workspace alone", 403, 200, 403),
        (Release::Newest, "old", 403, 200, 403),
        (Release::Newest, "registry", 403, 200, 403),
        (Release::Old, "old", 200, 200, 200),
        (Release::Old, "executor", 200, 200, 200),
        (Release::Old, "step", 200, 200, 200),
    ] {
        let scene = Scene::of(Platform::builder().release(release)).await;
        let job = scene.queued(Flow::plan_apply()).await.id;
        let content = scene.platform.upload(b"archive".to_vec());
        let of_step = |job: &str, organization: &str| json!({"workspaceId": scene.workspace, "jobId": job, "organizationId": organization});
        let (id, organization) = (job.to_string(), scene.platform.organization());
        let claims = match class {
            "executor" => executor.clone(),
            "old" => old.clone(),
            "registry" => registry.clone(),
            "step" => of_step(&id, &organization),
            "step of another job" => of_step("9999", &organization),
            "step of another organization" => of_step(&id, "another"),
            _ => json!({"workspaceId": scene.workspace}),
        };
        let bearer = token(&claims);
        let base = scene.platform.url();
        for (url, expected) in [
            (format!("{base}{}", scene.job_path(job)), job_status),
            (format!("{base}/context/v1/{job}"), context_status),
            (content, content_status),
        ] {
            let request = scene.client.get(&url).bearer_auth(&bearer);
            assert_eq!(status(request).await, expected, "{release:?} {class} {url}");
        }
        let change =
            json!({"data": {"type": "job", "id": id, "attributes": {"status": "running"}}});
        let patch = scene
            .client
            .patch(format!("{base}{}", scene.job_path(job)))
            .bearer_auth(&bearer)
            .header("content-type", JSON_API)
            .body(change.to_string());
        let expected = if job_status == 200 { 204 } else { job_status };
        assert_eq!(status(patch).await, expected, "{release:?} {class}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_context_is_kept_while_its_job_may_still_end_well() {
    let pending = r#"{"structuredOutputStatus":{"state":"PENDING"}}"#;
    for (release, none, unknown) in [(Release::Old, "{}", 200), (Release::Newest, pending, 404)] {
        let scene = Scene::of(Platform::builder().release(release)).await;
        let job = scene.queued(Flow::plan_apply()).await.id;
        let path = format!("/context/v1/{job}");
        let get = || async {
            scene
                .request("GET", &path)
                .send()
                .await
                .unwrap()
                .text()
                .await
                .unwrap()
        };
        assert_eq!(get().await, none);
        assert_eq!(
            status(scene.request("GET", "/context/v1/9999")).await,
            unknown
        );
        let post = |document: Value| {
            let path = path.clone();
            let scene = &scene;
            async move {
                scene
                    .send("POST", &path, "application/json", &document)
                    .await
            }
        };
        assert_eq!(post(json!({"mine": 1})).await, 200);
        assert_eq!(get().await, "{\"mine\":1}");
        scene.platform.assert_kept().await;
        assert_eq!(post(json!({"other": 1})).await, 200);
        assert_eq!(scene.broken(), [Rule::ContextLost]);
        scene.platform.cancel(job).await;
        assert_eq!(post(json!({"other": 1, "late": 1})).await, 409);
        assert_eq!(get().await, "{\"other\":1}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn published_states_can_be_looked_for_by_their_jobs() {
    let scene = Scene::new().await;
    let path = format!(
        "/api/v1/organization/{}/workspace/{}/history",
        scene.platform.organization(),
        scene.workspace
    );
    for (job, output) in [("412", "first"), ("413", "second"), ("412", "third")] {
        let attributes = json!({"jobReference": job, "output": output});
        let document = json!({"data": {"type": "history", "attributes": attributes}});
        assert_eq!(scene.send("POST", &path, JSON_API, &document).await, 201);
    }
    let url = format!("{}{path}", scene.platform.url());
    let get = |name: &str, filter: &str| {
        let url = reqwest::Url::parse_with_params(&url, [(name, filter)]).unwrap();
        scene.client.get(url).bearer_auth(token(&json!({})))
    };
    let found = get("filter[history]", "jobReference=='412'").send().await;
    let found: Value = serde_json::from_str(&found.unwrap().text().await.unwrap()).unwrap();
    let found = found["data"].as_array().unwrap().iter();
    let outputs: Vec<_> = found
        .map(|record| record["attributes"]["output"].as_str().unwrap())
        .collect();
    assert_eq!(outputs, ["first", "third"]);

    assert_eq!(status(scene.client.get(&url)).await, 401);
    for (name, filter) in [
        ("filter[history]", "jobReference=412"),
        ("filter[history]", "job=='412'"),
        ("filter[job]", "jobReference=='412'"),
        ("jobReference", "412"),
    ] {
        assert_eq!(status(get(name, filter)).await, 400, "{name} {filter}");
    }
}
