//! The admission policy, in force in a real API server.

use integration_tests::{Repository, job};
use kube::Client;
use serde_json::{Value, json};
use test_chart::{Document, Release, values_files};
use test_peers::skips::needed;
use test_peers::wait;

use super::dry_run::DryRun;
use super::{makers_of_jobs, rendered};

/// A release whose policy is in force.
struct Policed {
    server: DryRun,
    documents: Vec<Document>,
}

impl Policed {
    /// Puts it in force in the namespace of a dry run alone; nothing where the test is skipped.
    async fn start(release: Release) -> Option<Self> {
        let server = DryRun::start().await?;
        let documents = release.on(&server.version).documents();
        let stable = documents
            .iter()
            .any(|document| document.text_at("/apiVersion") == "admissionregistration.k8s.io/v1");
        needed(
            stable
                .then_some(())
                .ok_or("this Kubernetes has no stable admission policies"),
        )?;
        let only = json!({"matchLabels": {"kubernetes.io/metadata.name": server.namespace}});
        for document in &documents {
            let mut object = document.value.clone();
            match document.kind() {
                "ValidatingAdmissionPolicy" => {}
                "ValidatingAdmissionPolicyBinding" => {
                    object["spec"]["policyName"] = server.namespace.as_str().into();
                    object["spec"]["matchResources"] = json!({"namespaceSelector": only});
                }
                _ => continue,
            }
            object["metadata"] = json!({"name": server.namespace, "labels": server.labels});
            server.make(&object).await.unwrap();
        }
        Some(Self { server, documents })
    }

    fn makers_of_jobs(&self) -> impl Iterator<Item = &Document> {
        makers_of_jobs(&self.documents)
    }

    /// A client that acts as the launcher of a Deployment, or as the agent of a `StatefulSet`. The policy is in force when this returns.
    async fn launcher(&self, deployment: &Document, job: &Value) -> Client {
        let account = deployment.text_at("/spec/template/spec/serviceAccountName");
        let user = format!("system:serviceaccount:{}:{account}", deployment.namespace());
        let client = self.server.client_of(&user).await;
        let mut refused = job.clone();
        refused["metadata"]["labels"] = of_another();
        let is_refused = async || self.server.takes_from(&client, &refused).await.is_err();
        wait::until("the policy has an effect", is_refused).await;
        // The policy is for launchers alone.
        assert_eq!(self.server.takes(&refused).await, Ok(()));
        client
    }

    /// The Job of a step, as the launcher of a Deployment makes it.
    fn job(&self, deployment: &Document, step: &job_contract::JobData) -> Value {
        let mut objects = rendered(&self.documents, deployment, step).into_iter();
        objects.find(|object| object["kind"] == "Job").unwrap()
    }
}

/// Labels of a Job that no launcher makes. A Job without labels gets those of its pods.
fn of_another() -> Value {
    json!({"app.kubernetes.io/managed-by": "another"})
}

#[tokio::test(flavor = "multi_thread")]
async fn the_admission_policy_lets_the_launchers_own_jobs_pass() {
    let repository = Repository::fixture();
    let plan = job::plan(&repository);
    let mut unusual = plan.clone();
    // A name of the Job that had to be hashed.
    unusual.step_id = format!("{}End", "Step.".repeat(12));
    let steps = [
        plan.clone(),
        job::apply_after(&plan),
        job::scripts(&repository, vec![job::bash(1, "true")]),
        unusual,
    ];
    let mut seen = 0;
    for (name, file) in values_files() {
        let release = Release::new().with(&file);
        // A hub alone makes no Job.
        if makers_of_jobs(&release.documents()).next().is_none() {
            continue;
        }
        let release = release.set(json!({"admissionPolicy": {"enabled": true}}));
        let Some(policed) = Policed::start(release).await else {
            return;
        };
        for deployment in policed.makers_of_jobs() {
            let client = policed
                .launcher(deployment, &policed.job(deployment, &plan))
                .await;
            for step in &steps {
                let job = policed.job(deployment, step);
                let taken = policed.server.takes_from(&client, &job).await;
                assert_eq!(taken, Ok(()), "{name}: {job:#}");
                seen += 1;
            }
        }
    }
    assert!(seen >= 3 * steps.len(), "{seen}");
}

#[tokio::test(flavor = "multi_thread")]
#[allow(clippy::too_many_lines, reason = "each case is a line of one table")]
async fn the_admission_policy_refuses_what_no_run_needs() {
    let (_, file) = values_files()
        .into_iter()
        .find(|(name, _)| name == "default")
        .unwrap();
    let release = Release::new().with(&file);
    let release =
        release.set(json!({"admissionPolicy": {"enabled": true, "secretNames": ["known"]}}));
    let Some(policed) = Policed::start(release).await else {
        return;
    };
    let deployment = policed.makers_of_jobs().next().unwrap();
    let job = policed.job(deployment, &job::plan(&Repository::fixture()));
    let client = policed.launcher(deployment, &job).await;
    let taken = async |job: Value| policed.server.takes_from(&client, &job).await;
    assert_eq!(taken(job.clone()).await, Ok(()));

    let own = job["metadata"]["name"].as_str().unwrap();
    let spec = "/spec/template/spec";
    let executor = format!("{spec}/containers/0");
    let (environment, volume) = (
        "the environment takes a Secret that is not among admissionPolicy.secretNames",
        "a volume takes a Secret that is not among admissionPolicy.secretNames",
    );
    let pull = "images are pulled with a Secret that is not among admissionPolicy.secretNames";
    let of_environment = |name: &str| json!([{"secretRef": {"name": name}}]);
    let variable = |name: &str| json!([{"name": "A", "valueFrom": {"secretKeyRef": {"name": name, "key": "a"}}}]);
    let mounted = |name: &str| json!([{"name": "v", "secret": {"secretName": name}}]);
    let projected =
        |name: &str| json!([{"name": "v", "projected": {"sources": [{"secret": {"name": name}}]}}]);
    let csi = |name: &str| json!([{"name": "v", "csi": {"driver": "d", "nodePublishSecretRef": {"name": name}}}]);
    let pulled = |name: &str| json!([{"name": name}]);
    let mut bad = vec![
        (
            "/metadata/labels".to_owned(),
            of_another(),
            "launcher and agent make runs, and nothing else",
        ),
        (
            format!("{spec}/serviceAccountName"),
            json!("default"),
            "the account is not among admissionPolicy.serviceAccounts",
        ),
        (
            format!("{spec}/hostNetwork"),
            json!(true),
            "a run shares nothing with its node",
        ),
        (
            format!("{spec}/volumes"),
            json!([{"name": "v", "hostPath": {"path": "/"}}]),
            "a volume is of a kind that no run needs",
        ),
        (
            format!("{spec}/volumes"),
            json!([{"name": "v", "rbd": {"monitors": ["m"], "image": "i", "secretRef": {"name": "s"}}}]),
            "a volume is of a kind that no run needs",
        ),
        (format!("{spec}/imagePullSecrets"), json!([{}]), pull),
        (
            format!("{executor}/image"),
            json!("registry.example.com/mayfly-executor:1"),
            "an image is not among admissionPolicy.imagePrefixes",
        ),
    ];
    let others = [
        "terrakube-api-secrets".to_owned(),
        // As the Job, and as another Job's; with too little of an attempt, with too much, with what is none.
        own.to_owned(),
        "job-412-another-0123456789abcdef".to_owned(),
        format!("{own}-0123456789abcde"),
        format!("{own}-0123456789abcdef0"),
        format!("{own}-0123456789abcdeg"),
        format!("{own}-more-0123456789abcdef"),
    ];
    for name in &others {
        bad.push((
            format!("{executor}/envFrom"),
            of_environment(name),
            environment,
        ));
        bad.push((format!("{executor}/env"), variable(name), environment));
        bad.push((format!("{spec}/volumes"), mounted(name), volume));
        bad.push((format!("{spec}/volumes"), projected(name), volume));
        bad.push((format!("{spec}/volumes"), csi(name), volume));
        bad.push((format!("{spec}/imagePullSecrets"), pulled(name), pull));
    }
    let put = |at: &str, value: &Value| {
        let (parent, key) = at.rsplit_once('/').unwrap();
        let mut job = job.clone();
        let fixture = &mut job.pointer_mut(parent).unwrap()[key];
        match (key, fixture.as_array_mut(), value) {
            // What mounts the others is still there.
            ("volumes", Some(volumes), Value::Array(more)) => volumes.extend(more.iter().cloned()),
            _ => *fixture = value.clone(),
        }
        job
    };
    for (at, value, why) in &bad {
        let error = taken(put(at, value)).await.expect_err(at);
        assert!(error.contains(why), "{at}: {value}: {error}");
    }
    let mine = format!("{own}-0123456789abcdef");
    // It holds job data, which is no use for pulling an image or mounting a volume.
    for (at, value, why) in [
        (format!("{spec}/volumes"), csi(&mine), volume),
        (format!("{spec}/imagePullSecrets"), pulled(&mine), pull),
    ] {
        let error = taken(put(&at, &value)).await.expect_err(&at);
        assert!(error.contains(why), "{at}: {error}");
    }
    for (at, value) in [
        (format!("{spec}/volumes"), csi("known")),
        (format!("{spec}/imagePullSecrets"), pulled("known")),
        (format!("{executor}/envFrom"), of_environment(&mine)),
        (format!("{executor}/env"), variable(&mine)),
        (format!("{spec}/volumes"), mounted(&mine)),
        (format!("{spec}/volumes"), projected(&mine)),
    ] {
        assert_eq!(taken(put(&at, &value)).await, Ok(()), "{at}");
    }
}
