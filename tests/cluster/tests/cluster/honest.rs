//! What clients may expect of an API server. Always asked of the in-process server, and of the real one that
//! `MAYFLY_TEST_CLUSTER` names, so that the one in this process cannot drift into leniency.

use std::sync::Arc;
use std::time::Duration;

use futures_util::{AsyncBufReadExt as _, StreamExt as _};
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};
use test_cluster::{ADMIN, Cluster, Fault, Rule, Target};
use test_peers::skips::needed;

/// A server under test, with a namespace of its own.
#[derive(Clone)]
struct Subject {
    cluster: Arc<Cluster>,
    client: Client,
    namespace: String,
}

/// An answer as it came: code and body.
type Answer = (u16, Value);

impl Subject {
    async fn all() -> Vec<Self> {
        Self::on(Target::all()).await
    }

    /// Servers where nobody else acts on objects, for what controllers and kubelets would be faster with.
    async fn undisturbed() -> Vec<Self> {
        let mut targets = Target::all();
        targets.retain(|target| *target == Target::InProcess);
        Self::on(targets).await
    }

    async fn on(targets: Vec<Target>) -> Vec<Self> {
        let mut all = Vec::new();
        for target in targets {
            let parts = Cluster::builder().api_server_only().on(target);
            let cluster = Arc::new(parts.start().await.unwrap());
            all.push(Self {
                client: cluster.client(ADMIN).unwrap(),
                namespace: cluster.fresh_namespace("honest").await.unwrap(),
                cluster,
            });
        }
        all
    }

    /// The same server, asked by somebody else.
    fn asked_by(&self, identity: &str) -> Self {
        Self {
            client: self.cluster.client(identity).unwrap(),
            ..self.clone()
        }
    }

    fn path(&self, resource: &str) -> String {
        let root = match resource.split('/').next().unwrap_or("") {
            "jobs" => "/apis/batch/v1",
            "leases" => "/apis/coordination.k8s.io/v1",
            _ => "/api/v1",
        };
        format!("{root}/namespaces/{}/{resource}", self.namespace)
    }

    async fn send(
        &self,
        method: &str,
        path: &str,
        content_type: &str,
        body: Option<&Value>,
    ) -> Answer {
        let body = body.map(Value::to_string).unwrap_or_default();
        let request = axum::http::Request::builder()
            .method(method)
            .uri(path)
            .header("content-type", content_type);
        let response = self
            .client
            .send(request.body(Body::from(body.into_bytes())).unwrap())
            .await
            .unwrap();
        let code = response.status().as_u16();
        let bytes = response.into_body().collect_bytes().await.unwrap();
        (code, serde_json::from_slice(&bytes).unwrap_or(Value::Null))
    }

    async fn post(&self, path: &str, body: &Value) -> Answer {
        self.send("POST", path, "application/json", Some(body))
            .await
    }

    async fn create(&self, resource: &str, body: &Value) -> Answer {
        self.post(&self.path(resource), body).await
    }

    async fn get(&self, resource: &str) -> Answer {
        self.send("GET", &self.path(resource), "application/json", None)
            .await
    }

    async fn merge(&self, resource: &str, body: &Value) -> Answer {
        self.send(
            "PATCH",
            &self.path(resource),
            "application/merge-patch+json",
            Some(body),
        )
        .await
    }

    async fn delete(&self, resource: &str, options: &Value) -> Answer {
        self.send(
            "DELETE",
            &self.path(resource),
            "application/json",
            Some(options),
        )
        .await
    }

    /// The first `count` events of a watch.
    async fn watch(&self, resource: &str, query: &str, count: usize) -> Vec<Value> {
        let path = format!(
            "{}?watch=true&timeoutSeconds=10&{query}",
            self.path(resource)
        );
        let request = axum::http::Request::get(path).body(Vec::new()).unwrap();
        let lines = self.client.request_stream(request).await.unwrap().lines();
        let events = lines
            .take(count)
            .map(|line| serde_json::from_str(&line.unwrap()).unwrap())
            .collect::<Vec<_>>();
        tokio::time::timeout(Duration::from_secs(20), events)
            .await
            .unwrap()
    }
}

fn job(name: &str) -> Value {
    json!({
        "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name},
        "spec": {"suspend": true, "template": {"spec": {
            "restartPolicy": "Never", "containers": [{"name": "executor", "image": "example.com/executor:1"}],
        }}},
    })
}

fn with(mut object: Value, pointer: &str, value: Value) -> Value {
    let (parent, last) = pointer.rsplit_once('/').unwrap();
    object.pointer_mut(parent).unwrap()[last] = value;
    object
}

fn fields(answer: &Answer) -> Vec<&str> {
    let causes = answer.1["details"]["causes"]
        .as_array()
        .map_or(&[][..], Vec::as_slice);
    causes
        .iter()
        .filter_map(|cause| cause["field"].as_str())
        .collect()
}

const POD: &str = "/spec/template/spec";

#[tokio::test]
async fn a_created_job_has_identity_and_defaults() {
    for subject in Subject::all().await {
        let (code, created) = subject.create("jobs", &job("a")).await;
        assert_eq!(code, 201, "{created}");
        let uid = &created["metadata"]["uid"];
        assert_eq!(created["metadata"]["generation"], 1);
        assert!(created["metadata"]["creationTimestamp"].is_string());
        assert_eq!(created["spec"]["backoffLimit"], 6);
        assert_eq!(
            (
                &created["spec"]["completions"],
                &created["spec"]["parallelism"]
            ),
            (&json!(1), &json!(1))
        );
        assert_eq!(
            created["spec"]["podReplacementPolicy"],
            "TerminatingOrFailed"
        );
        assert_eq!(
            created["spec"]["selector"]["matchLabels"]["batch.kubernetes.io/controller-uid"],
            *uid
        );
        assert_eq!(
            created["spec"]["template"]["metadata"]["labels"]["job-name"],
            "a"
        );
        let pod = created.pointer(POD).unwrap();
        assert_eq!(
            (&pod["dnsPolicy"], &pod["terminationGracePeriodSeconds"]),
            (&json!("ClusterFirst"), &json!(30))
        );
        assert_eq!(pod["containers"][0]["imagePullPolicy"], "IfNotPresent");
        assert_eq!(
            pod["containers"][0]["terminationMessagePath"],
            "/dev/termination-log"
        );
    }
}

#[tokio::test]
async fn what_is_stored_has_one_form() {
    let container = json!({
        "name": "executor", "image": "example.com/executor:1", "envFrom": [], "command": [],
        "resources": {"limits": {"cpu": "0.5", "memory": "1024Mi"}, "requests": {"cpu": "100m", "memory": "0.5Gi"}},
    });
    let given = with(
        job("a"),
        "/spec/template/spec/containers",
        json!([container]),
    );
    let scratch = json!([{"name": "work", "emptyDir": {"sizeLimit": "2048Mi"}}]);
    let given = with(given, "/spec/template/spec/volumes", scratch);
    for subject in Subject::all().await {
        let (code, created) = subject.create("jobs", &given).await;
        assert_eq!(code, 201, "{created}");
        let pod = created.pointer(POD).unwrap();
        let container = &pod["containers"][0];
        assert_eq!(
            container["resources"],
            json!({"limits": {"cpu": "500m", "memory": "1Gi"}, "requests": {"cpu": "100m", "memory": "512Mi"}})
        );
        assert_eq!(pod["volumes"][0]["emptyDir"]["sizeLimit"], "2Gi");
        for absent in ["envFrom", "command"] {
            assert!(container.get(absent).is_none(), "{container}");
        }
        assert!(
            created["spec"].get("podFailurePolicy").is_none(),
            "{created}"
        );
    }
}

#[tokio::test]
async fn an_invalid_job_is_refused_with_the_path_of_each_field() {
    let policy = |rule: Value| json!({"rules": [rule]});
    let containers = |extra: Value| {
        let mut container = json!({"name": "executor", "image": "a:1"});
        container
            .as_object_mut()
            .unwrap()
            .extend(extra.as_object().unwrap().clone());
        json!([container])
    };
    let cases = [
        ("/metadata/name", json!("Not_A_Name"), "metadata.name"),
        (
            "/metadata/labels",
            json!({"a": "has space"}),
            "metadata.labels",
        ),
        (
            "/metadata/annotations",
            json!({"a b": ""}),
            "metadata.annotations",
        ),
        ("/spec/backoffLimit", json!(-1), "spec.backoffLimit"),
        (
            "/spec/activeDeadlineSeconds",
            json!(-1),
            "spec.activeDeadlineSeconds",
        ),
        (
            "/spec/template/spec/restartPolicy",
            json!("Always"),
            "spec.template.spec.restartPolicy",
        ),
        (
            "/spec/template/metadata",
            json!({"labels": {"a": "-"}}),
            "spec.template.labels",
        ),
        (
            "/spec/podFailurePolicy",
            policy(json!({"action": "FailJob", "onExitCodes": {"operator": "In", "values": [0]}})),
            "spec.podFailurePolicy.rules[0].onExitCodes.values[0]",
        ),
        (
            "/spec/podFailurePolicy",
            policy(
                json!({"action": "FailJob", "onExitCodes": {"operator": "In", "values": [1], "containerName": "b"}}),
            ),
            "spec.podFailurePolicy.rules[0].onExitCodes.containerName",
        ),
        (
            "/spec/template/spec/tolerations",
            json!([{"key": "a", "operator": "Exists", "value": "b"}]),
            "spec.template.spec.tolerations[0].operator",
        ),
        (
            "/spec/template/spec/containers",
            containers(json!({"volumeMounts": [{"name": "none", "mountPath": "/a"}]})),
            "spec.template.spec.containers[0].volumeMounts[0].name",
        ),
        (
            "/spec/template/spec/containers",
            containers(json!({"resources": {"limits": {"cpu": "1"}, "requests": {"cpu": "2"}}})),
            "spec.template.spec.containers[0].resources.requests",
        ),
        (
            "/spec/template/spec/containers",
            containers(json!({"env": [{"name": "A=B", "value": "c"}]})),
            "spec.template.spec.containers[0].env[0].name",
        ),
        (
            "/spec/template/spec/volumes",
            json!([{"name": "a", "emptyDir": {}}, {"name": "a", "emptyDir": {}}]),
            "spec.template.spec.volumes[1].name",
        ),
    ];
    for subject in Subject::all().await {
        for (pointer, value, field) in &cases {
            let answer = subject
                .create("jobs", &with(job("a"), pointer, value.clone()))
                .await;
            assert_eq!(
                (answer.0, &answer.1["reason"]),
                (422, &json!("Invalid")),
                "{pointer}: {}",
                answer.1
            );
            assert!(fields(&answer).contains(field), "{field}: {}", answer.1);
        }
        let long = subject.create("jobs", &job(&"a".repeat(64))).await;
        assert_eq!(
            (long.0, fields(&long).contains(&"spec.template.labels")),
            (422, true),
            "{}",
            long.1
        );
    }
}

#[tokio::test]
async fn what_cannot_be_decoded_is_a_bad_request() {
    for subject in Subject::all().await {
        for body in [
            json!({"apiVersion": "batch/v1", "kind": "Nonsense"}),
            with(job("a"), "/spec/backoffLimit", json!("many")),
            with(job("a"), "/apiVersion", json!("v1")),
            with(
                job("a"),
                "/spec/template/spec/containers",
                json!([{
                    "name": "a", "image": "a", "resources": {"limits": {"memory": "1GB"}},
                }]),
            ),
        ] {
            let (code, status) = subject.create("jobs", &body).await;
            assert_eq!(
                (code, &status["reason"]),
                (400, &json!("BadRequest")),
                "{status}"
            );
        }
        let path = subject.path("jobs");
        let (code, status) = subject
            .send("POST", &path, "text/plain", Some(&job("a")))
            .await;
        assert_eq!(
            (code, &status["reason"]),
            (415, &json!("UnsupportedMediaType")),
            "{status}"
        );
        let secret = json!({"metadata": {"name": "a"}, "data": {"a": "not base64!"}});
        assert_eq!(subject.create("secrets", &secret).await.0, 400);
        assert_eq!(
            subject
                .post("/apis/batch/v1/namespaces/none-such/jobs", &job("a"))
                .await
                .0,
            404
        );
    }
}

#[tokio::test]
async fn names_are_taken_once_and_versions_guard_updates() {
    for subject in Subject::all().await {
        let (_, created) = subject.create("jobs", &job("a")).await;
        let (code, status) = subject.create("jobs", &job("a")).await;
        assert_eq!((code, &status["reason"]), (409, &json!("AlreadyExists")));
        assert_eq!(status["message"], "jobs.batch \"a\" already exists");
        assert_eq!(
            status["details"],
            json!({"name": "a", "group": "batch", "kind": "jobs"})
        );
        let labelled = subject
            .merge("jobs/a", &json!({"metadata": {"labels": {"b": "c"}}}))
            .await;
        assert_eq!(labelled.0, 200);
        let stale = json!({"metadata": {"resourceVersion": created["metadata"]["resourceVersion"], "labels": {"b": "d"}}});
        let (code, status) = subject.merge("jobs/a", &stale).await;
        assert_eq!(
            (code, &status["reason"]),
            (409, &json!("Conflict")),
            "{status}"
        );
        let path = subject.path("jobs/a");
        let (code, _) = subject
            .send("PUT", &path, "application/json", Some(&created))
            .await;
        assert_eq!(code, 409);
        let (code, status) = subject.get("jobs/none").await;
        assert_eq!(
            (code, &status["message"]),
            (404, &json!("jobs.batch \"none\" not found"))
        );
    }
}

#[tokio::test]
async fn of_a_job_only_what_may_change_changes() {
    for subject in Subject::all().await {
        subject.create("jobs", &job("a")).await;
        let (code, released) = subject
            .merge("jobs/a", &json!({"spec": {"suspend": false}}))
            .await;
        assert_eq!(
            (code, &released["metadata"]["generation"]),
            (200, &json!(2)),
            "{released}"
        );
        let template = json!({"spec": {"template": {"spec": {"dnsPolicy": "None"}}}});
        let answer = subject.merge("jobs/a", &template).await;
        assert_eq!(
            (answer.0, fields(&answer).contains(&"spec.template")),
            (422, true),
            "{}",
            answer.1
        );
        let answer = subject
            .merge("jobs/a", &json!({"spec": {"completions": 2}}))
            .await;
        assert_eq!(
            (answer.0, fields(&answer)),
            (422, vec!["spec.completions"]),
            "{}",
            answer.1
        );
        // Status is no part of a plain update.
        let (_, patched) = subject
            .merge("jobs/a", &json!({"status": {"succeeded": 5}}))
            .await;
        assert!(patched["status"]["succeeded"].is_null(), "{patched}");
    }
}

#[tokio::test]
async fn of_a_job_only_what_fits_together_is_told() {
    let condition = |kind: &str| json!({"type": kind, "status": "True"});
    let (began, ended) = ("2026-01-01T00:00:01Z", "2026-01-01T00:00:02Z");
    let failed = json!([condition("FailureTarget"), condition("Failed")]);
    let complete = json!([condition("SuccessCriteriaMet"), condition("Complete")]);
    let cases = [
        (json!({"active": -1}), "status.active"),
        (json!({"active": 1, "ready": 2}), "status.ready"),
        (
            json!({"conditions": [condition("Failed")], "startTime": began}),
            "status.conditions",
        ),
        (
            json!({"conditions": [condition("Complete")], "startTime": began, "completionTime": ended}),
            "status.conditions",
        ),
        (json!({"conditions": failed}), "status.startTime"),
        (
            json!({"conditions": failed, "startTime": began, "active": 1}),
            "status.active",
        ),
        (
            json!({"conditions": failed, "startTime": began, "terminating": 1}),
            "status.terminating",
        ),
        (
            json!({"conditions": failed, "startTime": began, "uncountedTerminatedPods": {"failed": ["a"]}}),
            "status.uncountedTerminatedPods",
        ),
        (
            json!({"conditions": complete, "startTime": began}),
            "status.completionTime",
        ),
        (
            json!({"conditions": complete, "startTime": ended, "completionTime": began}),
            "status.completionTime",
        ),
        (
            json!({"startTime": began, "completionTime": ended}),
            "status.completionTime",
        ),
    ];
    for subject in Subject::undisturbed().await {
        let running = with(job("a"), "/spec/suspend", json!(false));
        subject.create("jobs", &running).await;
        for (status, field) in &cases {
            let told = json!({"status": status});
            let answer = subject.merge("jobs/a/status", &told).await;
            assert_eq!(
                (answer.0, fields(&answer).contains(field)),
                (422, true),
                "{field}: {}",
                answer.1
            );
        }
        let over = json!({"status": {"conditions": failed, "startTime": began, "failed": 1}});
        let (code, told) = subject.merge("jobs/a/status", &over).await;
        assert_eq!(code, 200, "{told}");
        for (status, field) in [
            (json!({"conditions": []}), "status.conditions"),
            (json!({"startTime": ended}), "status.startTime"),
            (json!({"failed": 0}), "status.failed"),
        ] {
            let answer = subject
                .merge("jobs/a/status", &json!({"status": status}))
                .await;
            assert_eq!(
                (answer.0, fields(&answer).contains(&field)),
                (422, true),
                "{}",
                answer.1
            );
        }
    }
}

#[tokio::test]
async fn each_patch_language_has_its_content_type() {
    for subject in Subject::all().await {
        subject
            .create(
                "configmaps",
                &json!({"metadata": {"name": "a"}, "data": {"a": "1"}}),
            )
            .await;
        let path = subject.path("configmaps/a");
        let operations = json!([{"op": "replace", "path": "/data/a", "value": "2"}]);
        let (code, patched) = subject
            .send(
                "PATCH",
                &path,
                "application/json-patch+json",
                Some(&operations),
            )
            .await;
        assert_eq!((code, &patched["data"]["a"]), (200, &json!("2")));
        let strategic = "application/strategic-merge-patch+json";
        let (code, patched) = subject
            .send(
                "PATCH",
                &path,
                strategic,
                Some(&json!({"data": {"b": "3"}})),
            )
            .await;
        assert_eq!(
            (code, &patched["data"]),
            (200, &json!({"a": "2", "b": "3"}))
        );
        assert_eq!(
            subject
                .send("PATCH", &path, "application/json", Some(&json!({})))
                .await
                .0,
            415
        );
        let apply = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "b"}, "data": {"a": "1"}});
        let path = subject.path("configmaps/b");
        let content_type = "application/apply-patch+yaml";
        assert_eq!(
            subject
                .send("PATCH", &path, content_type, Some(&apply))
                .await
                .0,
            422
        );
        let one = format!("{path}?fieldManager=one");
        assert_eq!(
            subject
                .send("PATCH", &one, content_type, Some(&apply))
                .await
                .0,
            201
        );
        let other = with(apply, "/data/a", json!("2"));
        let two = format!("{path}?fieldManager=two");
        let (code, status) = subject
            .send("PATCH", &two, content_type, Some(&other))
            .await;
        assert_eq!(
            (code, &status["details"]["causes"][0]["reason"]),
            (409, &json!("FieldManagerConflict"))
        );
        let (code, _) = subject
            .send(
                "PATCH",
                &format!("{two}&force=true"),
                content_type,
                Some(&other),
            )
            .await;
        assert_eq!(code, 200);
    }
}

#[tokio::test]
async fn lists_are_selected_and_paged() {
    for subject in Subject::all().await {
        for (name, colour) in [("a", "red"), ("b", "blue"), ("c", "red")] {
            let map = json!({"metadata": {"name": name, "labels": {"colour": colour}}});
            subject.create("configmaps", &map).await;
        }
        let names = |list: &Value| -> Vec<String> {
            let items = list["items"].as_array().unwrap();
            items
                .iter()
                .map(|item| item["metadata"]["name"].as_str().unwrap().to_owned())
                .collect()
        };
        for (query, expected) in [
            ("labelSelector=colour%3Dred", vec!["a", "c"]),
            ("labelSelector=colour+in+(blue,green)", vec!["b"]),
            ("labelSelector=colour,colour!%3Dred", vec!["b"]),
            ("fieldSelector=metadata.name%3Dc", vec!["c"]),
        ] {
            let (code, list) = subject.get(&format!("configmaps?{query}")).await;
            assert_eq!(
                (code, &list["kind"]),
                (200, &json!("ConfigMapList")),
                "{list}"
            );
            assert_eq!(names(&list), expected, "{query}");
        }
        let (_, page) = subject.get("configmaps?limit=2&labelSelector=colour").await;
        assert_eq!(names(&page), ["a", "b"]);
        subject
            .create(
                "configmaps",
                &json!({"metadata": {"name": "d", "labels": {"colour": "red"}}}),
            )
            .await;
        let token = page["metadata"]["continue"].as_str().unwrap();
        let (_, rest) = subject
            .get(&format!(
                "configmaps?limit=2&labelSelector=colour&continue={token}"
            ))
            .await;
        assert_eq!(names(&rest), ["c"], "a list is of one version");
        assert_eq!(
            subject.get("configmaps?fieldSelector=data.a%3Db").await.0,
            400
        );
    }
}

#[tokio::test]
async fn a_watch_tells_what_enters_and_leaves_a_selector() {
    for subject in Subject::all().await {
        let (_, list) = subject.get("configmaps").await;
        let from = list["metadata"]["resourceVersion"]
            .as_str()
            .unwrap()
            .to_owned();
        subject
            .create("configmaps", &json!({"metadata": {"name": "a"}}))
            .await;
        subject
            .merge("configmaps/a", &json!({"metadata": {"labels": {"x": "y"}}}))
            .await;
        subject
            .merge("configmaps/a", &json!({"data": {"k": "v"}}))
            .await;
        subject
            .merge(
                "configmaps/a",
                &json!({"metadata": {"labels": {"x": null}}}),
            )
            .await;
        let query = format!("labelSelector=x&resourceVersion={from}");
        let events = subject.watch("configmaps", &query, 3).await;
        let kinds: Vec<&str> = events
            .iter()
            .filter_map(|event| event["type"].as_str())
            .collect();
        assert_eq!(kinds, ["ADDED", "MODIFIED", "DELETED"]);
        let query = "sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true&fieldSelector=metadata.name%3Da";
        let events = subject.watch("configmaps", query, 2).await;
        // An etcd before 3.4.25 and 3.5.8 cannot say how far it is.
        if events[0]["object"]["message"]
            .as_str()
            .is_some_and(|message| message.contains("RequestWatchProgress is disabled"))
        {
            continue;
        }
        assert_eq!(events[0]["type"], "ADDED");
        assert_eq!(
            events[1]["object"]["metadata"]["annotations"]["k8s.io/initial-events-end"],
            "true"
        );
    }
}

#[tokio::test]
async fn a_watch_from_a_forgotten_version_has_expired() {
    for subject in Subject::undisturbed().await {
        subject
            .create("configmaps", &json!({"metadata": {"name": "a"}}))
            .await;
        subject.cluster.compact();
        subject
            .create("configmaps", &json!({"metadata": {"name": "b"}}))
            .await;
        let events = subject.watch("configmaps", "resourceVersion=1", 1).await;
        assert_eq!(
            (&events[0]["type"], &events[0]["object"]["code"]),
            (&json!("ERROR"), &json!(410))
        );
    }
}

#[tokio::test]
async fn deletion_waits_for_finalizers_and_heeds_preconditions() {
    for subject in Subject::all().await {
        let map = json!({"metadata": {"name": "a", "finalizers": ["example.com/wait"]}});
        subject.create("configmaps", &map).await;
        let wrong = json!({"preconditions": {"uid": "other"}});
        assert_eq!(subject.delete("configmaps/a", &wrong).await.0, 409);
        assert_eq!(subject.delete("configmaps/a", &json!({})).await.0, 200);
        let (code, waiting) = subject.get("configmaps/a").await;
        assert_eq!(
            (code, waiting["metadata"]["deletionTimestamp"].is_string()),
            (200, true)
        );
        subject
            .merge("configmaps/a", &json!({"metadata": {"finalizers": null}}))
            .await;
        assert_eq!(subject.get("configmaps/a").await.0, 404);
        let (_, job) = subject.create("jobs", &job("a")).await;
        let (code, deleted) = subject
            .delete("jobs/a", &json!({"propagationPolicy": "Background"}))
            .await;
        assert_eq!(
            (code, &deleted["details"]["uid"]),
            (200, &job["metadata"]["uid"])
        );
        assert_eq!(deleted["status"], "Success");
    }
}

fn pod(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {"restartPolicy": "Never", "containers": [{"name": "executor", "image": "example.com/executor:1"}]},
    })
}

#[tokio::test]
async fn a_pod_is_admitted_bound_once_and_gone_when_its_node_says_so() {
    for subject in Subject::undisturbed().await {
        let nobody = with(pod("a"), "/spec/serviceAccountName", json!("none"));
        let (code, refused) = subject.create("pods", &nobody).await;
        let why = "pods \"a\" is forbidden: error looking up service account";
        let message = refused["message"].as_str().unwrap();
        assert_eq!((code, message.starts_with(why)), (403, true), "{message}");

        let (code, created) = subject.create("pods", &pod("a")).await;
        assert_eq!(code, 201, "{created}");
        assert_eq!(created["spec"]["serviceAccountName"], "default");
        assert_eq!(
            (
                &created["spec"]["priority"],
                &created["spec"]["preemptionPolicy"]
            ),
            (&json!(0), &json!("PreemptLowerPriority"))
        );
        let tolerations = created["spec"]["tolerations"].as_array().unwrap();
        let keys: Vec<&str> = tolerations
            .iter()
            .filter_map(|toleration| toleration["key"].as_str())
            .collect();
        assert_eq!(
            keys,
            [
                "node.kubernetes.io/not-ready",
                "node.kubernetes.io/unreachable"
            ]
        );
        assert_eq!(
            (&created["status"]["phase"], &created["status"]["qosClass"]),
            (&json!("Pending"), &json!("BestEffort"))
        );
        // Nothing but a few fields may change.
        let image = json!([{"name": "other", "image": "example.com/executor:1"}]);
        let patch = json!({"spec": {"containers": image}});
        assert_eq!(subject.merge("pods/a", &patch).await.0, 422);

        // Without a node it goes at once.
        assert_eq!(subject.delete("pods/a", &json!({})).await.0, 200);
        assert_eq!(subject.get("pods/a").await.0, 404);

        let limits = json!({"requests": {"cpu": "100m"}, "limits": {"memory": "1Gi"}});
        let burstable = with(pod("a"), "/spec/containers/0/resources", limits);
        let (_, created) = subject.create("pods", &burstable).await;
        assert_eq!(created["status"]["qosClass"], "Burstable");
        assert_eq!(
            created["spec"]["containers"][0]["resources"]["requests"]["memory"],
            "1Gi"
        );
        let binding = json!({
            "apiVersion": "v1", "kind": "Binding", "metadata": {"name": "a"},
            "target": {"apiVersion": "v1", "kind": "Node", "name": "node-1"},
        });
        assert_eq!(subject.create("pods/a/binding", &binding).await.0, 201);
        let (code, status) = subject.create("pods/a/binding", &binding).await;
        assert_eq!((code, &status["reason"]), (409, &json!("Conflict")));
        let (_, bound) = subject.get("pods/a").await;
        assert_eq!(bound["spec"]["nodeName"], "node-1");
        let scheduled = &bound["status"]["conditions"][0];
        assert_eq!(
            (&scheduled["type"], &scheduled["status"]),
            (&json!("PodScheduled"), &json!("True"))
        );

        let (code, going) = subject.delete("pods/a", &json!({})).await;
        assert_eq!(code, 200);
        assert_eq!(going["metadata"]["deletionGracePeriodSeconds"], 30);
        assert!(going["metadata"]["deletionTimestamp"].is_string());
        assert_eq!(subject.get("pods/a").await.0, 200);
        let now = json!({"gracePeriodSeconds": 0});
        assert_eq!(subject.delete("pods/a", &now).await.0, 200);
        assert_eq!(subject.get("pods/a").await.0, 404);
    }
}

#[tokio::test]
async fn owners_stay_for_their_dependents_where_that_is_asked() {
    for subject in Subject::undisturbed().await {
        for (policy, finalizer) in [("Foreground", "foregroundDeletion"), ("Orphan", "orphan")] {
            let name = policy.to_lowercase();
            let path = format!("jobs/{name}");
            subject.create("jobs", &job(&name)).await;
            let options = json!({"propagationPolicy": policy});
            let (code, going) = subject.delete(&path, &options).await;
            assert_eq!(
                (code, &going["metadata"]["finalizers"]),
                (200, &json!([finalizer])),
                "{going}"
            );
            let uid = &going["metadata"]["uid"];
            let collected = json!({"metadata": {"uid": uid, "finalizers": []}});
            assert_eq!(subject.merge(&path, &collected).await.0, 200);
            assert_eq!(subject.get(&path).await.0, 404);
        }
        let unknown = json!({"propagationPolicy": "Sideways"});
        subject.create("jobs", &job("a")).await;
        assert_eq!(subject.delete("jobs/a", &unknown).await.0, 422);
    }
}

#[tokio::test]
async fn a_lease_is_renewed_only_by_who_knows_it() {
    for subject in Subject::all().await {
        let lease = json!({
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "a"},
            "spec": {"holderIdentity": "one", "leaseDurationSeconds": 15, "renewTime": "2026-01-01T00:00:00.000000Z"},
        });
        let (code, first) = subject.create("leases", &lease).await;
        assert_eq!((code, &first["spec"]), (201, &lease["spec"]));
        let path = subject.path("leases/a");
        let put = |body: Value| {
            let (subject, path) = (&subject, &path);
            async move {
                let answer = subject.send("PUT", path, "application/json", Some(&body));
                answer.await
            }
        };
        let renewed = with(first.clone(), "/spec/holderIdentity", json!("two"));
        assert_eq!(put(renewed.clone()).await.0, 200);
        assert_eq!(put(renewed).await.0, 409);
        let blind = with(lease.clone(), "/spec/holderIdentity", json!("three"));
        let answer = put(blind).await;
        assert_eq!(
            (answer.0, fields(&answer)),
            (422, vec!["metadata.resourceVersion"])
        );
        let never = with(first, "/spec/leaseDurationSeconds", json!(0));
        let never = with(never, "/metadata/resourceVersion", json!(""));
        assert_eq!(put(never).await.0, 422);
    }
}

#[tokio::test]
async fn an_object_is_shown_in_the_form_that_is_asked_for() {
    for subject in Subject::all().await {
        let secret =
            json!({"metadata": {"generateName": "a-"}, "stringData": {"a": "b"}, "unknown": 1});
        let (code, created) = subject.create("secrets", &secret).await;
        assert_eq!((code, &created["unknown"]), (201, &Value::Null));
        let name = created["metadata"]["name"].as_str().unwrap();
        assert_eq!((name.len(), &name[..2]), (7, "a-"));
        let (code, _) = subject
            .create("secrets?dryRun=All", &json!({"metadata": {"name": "b"}}))
            .await;
        assert_eq!((code, subject.get("secrets/b").await.0), (201, 404));
        for (path, kind) in [
            (format!("secrets/{name}"), "PartialObjectMetadata"),
            ("secrets".to_owned(), "PartialObjectMetadataList"),
        ] {
            let accept = format!("application/json;as={kind};g=meta.k8s.io;v=v1");
            let request = axum::http::Request::get(subject.path(&path)).header("accept", accept);
            let request = request.body(Body::empty()).unwrap();
            let response = subject.client.send(request).await.unwrap();
            let bytes = response.into_body().collect_bytes().await.unwrap();
            let shown: Value = serde_json::from_slice(&bytes).unwrap();
            assert_eq!(shown["kind"], kind, "{shown}");
            assert!(!shown.to_string().contains("Yg=="), "{shown}");
        }
        let path = subject.path("secrets");
        let (code, status) = subject
            .send(
                "GET",
                &format!("{path}?watch=true&resourceVersionMatch=Exact"),
                "",
                None,
            )
            .await;
        assert_eq!(
            (code, &status["reason"]),
            (422, &json!("Invalid")),
            "{status}"
        );
        let (code, status) = subject
            .send("GET", "/apis/batch/v1/nonsense", "", None)
            .await;
        assert_eq!(
            (code, &status["reason"]),
            (404, &json!("NotFound")),
            "{status}"
        );
        let (code, status) = subject.send("PATCH", &path, "", None).await;
        assert_eq!(
            (code, &status["reason"]),
            (405, &json!("MethodNotAllowed")),
            "{status}"
        );
    }
}

#[tokio::test]
async fn a_secret_has_a_size_and_may_be_immutable() {
    for subject in Subject::all().await {
        let large = "A".repeat(1_500_000);
        let answer = subject
            .create(
                "secrets",
                &json!({"metadata": {"name": "a"}, "data": {"a": large}}),
            )
            .await;
        assert_eq!((answer.0, fields(&answer)), (422, vec!["data"]));
        let secret =
            json!({"metadata": {"name": "a"}, "immutable": true, "stringData": {"a": "b"}});
        let (code, created) = subject.create("secrets", &secret).await;
        assert_eq!(
            (code, &created["data"]["a"], &created["type"]),
            (201, &json!("Yg=="), &json!("Opaque"))
        );
        assert_eq!(
            subject
                .merge("secrets/a", &json!({"data": {"a": "Yw=="}}))
                .await
                .0,
            422
        );
        let huge = json!({"metadata": {"name": "b"}, "data": {"a": "A".repeat(3_200_000)}});
        assert_eq!(subject.create("secrets", &huge).await.0, 413);
    }
}

#[tokio::test]
async fn kubectl_finds_its_way() {
    let kubectl = which::which("kubectl").map_err(|error| format!("kubectl: {error}"));
    let Some(kubectl) = needed(kubectl) else {
        return;
    };
    for subject in Subject::all().await {
        subject.create("jobs", &job("a")).await;
        let config = subject.cluster.kubeconfig_file(ADMIN, &subject.namespace);
        let config = config.unwrap();
        let run = |args: &[&str]| {
            let output = std::process::Command::new(&kubectl)
                .env("KUBECONFIG", &config)
                .env("HOME", config.parent().unwrap())
                .args(args)
                .output()
                .unwrap();
            format!(
                "{}{}",
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr)
            )
        };
        assert_eq!(run(&["get", "jobs", "-o", "name"]).trim(), "job.batch/a");
        assert_eq!(
            run(&["delete", "job", "a", "--wait=false"]).trim(),
            "job.batch \"a\" deleted"
        );
        assert!(run(&["get", "jobs"]).starts_with("No resources found"));
    }
}

#[tokio::test]
async fn an_identity_may_do_what_it_was_granted_and_nothing_else() {
    for subject in Subject::all().await {
        let strings = |list: &[&str]| {
            list.iter()
                .map(|text| (*text).to_owned())
                .collect::<Vec<_>>()
        };
        let rule = Rule {
            api_groups: strings(&["batch"]),
            resources: strings(&["jobs"]),
            verbs: strings(&["create", "get"]),
            ..Default::default()
        };
        let (cluster, namespace) = (&subject.cluster, &subject.namespace);
        let rules = std::slice::from_ref(&rule);
        cluster.grant("launcher", namespace, rules).await.unwrap();
        let launcher = subject.asked_by("launcher");
        assert_eq!(launcher.create("jobs", &job("a")).await.0, 201);
        let (code, status) = launcher.delete("jobs/a", &json!({})).await;
        assert_eq!((code, &status["reason"]), (403, &json!("Forbidden")));
        let expected = format!(
            "jobs.batch \"a\" is forbidden: User \"launcher\" cannot delete resource \"jobs\" in API group \"batch\" \
             in the namespace \"{namespace}\"",
        );
        assert_eq!(status["message"], json!(expected));
        for (verb, allowed) in [("get", true), ("list", false)] {
            let asked =
                json!({"namespace": namespace, "verb": verb, "group": "batch", "resource": "jobs"});
            let review = json!({"spec": {"resourceAttributes": asked}});
            let path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
            assert_eq!(
                launcher.post(path, &review).await.1["status"]["allowed"],
                json!(allowed)
            );
        }
        let recorded = cluster.recorded().of("launcher");
        assert_eq!(recorded.denied().len(), 1);
        assert_eq!(recorded.unused(rules), ["get jobs.batch"]);
        cluster.revoke("launcher").await.unwrap();
        assert_eq!(launcher.get("jobs/a").await.0, 403);
        assert_eq!(subject.get("jobs/a").await.0, 200);
    }
}

#[tokio::test]
async fn ordered_faults_happen_once_each() {
    for subject in Subject::all().await {
        let faults = subject.cluster.faults();
        // The client itself comes again after such an answer.
        faults.next(1, "list", "jobs", Fault::TooManyRequests(1));
        assert_eq!(subject.get("jobs").await.0, 200);
        let recorded = subject.cluster.recorded();
        let lists = recorded
            .requests()
            .iter()
            .filter(|request| request.right() == "list jobs.batch");
        assert_eq!(
            lists.map(|request| request.status).collect::<Vec<_>>(),
            [429, 200]
        );
        faults.next(1, "create", "jobs", Fault::QuotaExceeded);
        let (code, status) = subject.create("jobs", &job("a")).await;
        assert_eq!(code, 403);
        assert!(
            status["message"]
                .as_str()
                .unwrap()
                .contains("exceeded quota")
        );
        assert!(subject.cluster.recorded().denied().is_empty());
        for (fault, stored) in [(Fault::DropBefore, 404), (Fault::DropAfter, 200)] {
            faults.next(1, "create", "jobs", fault);
            let request = axum::http::Request::post(subject.path("jobs"))
                .body(Body::from(job("a").to_string().into_bytes()));
            assert!(subject.client.send(request.unwrap()).await.is_err());
            assert_eq!(subject.get("jobs/a").await.0, stored);
        }
        assert_eq!(subject.create("jobs", &job("a")).await.0, 409);
    }
}
