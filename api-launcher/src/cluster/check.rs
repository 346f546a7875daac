//! Pre-flight: would a run start here? Every answer that is no comes with a fix.

use std::collections::BTreeSet;

use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::Api;
use kube::api::{ListParams, PostParams};
use serde::Serialize;

use super::rights::{Need, Place, RIGHTS, Right};
use super::{Cluster, ClusterError};

/// What the deployment asks of the cluster.
#[derive(Clone, Debug, Default)]
pub struct Expectations {
    /// Job data travels in Secrets.
    pub job_data_in_secret: bool,
    /// Namespace of the launcher, when several replicas elect a watcher.
    pub election_namespace: Option<String>,
    /// Secrets that pods of runs name: environment, volumes, image pulls.
    pub secrets: BTreeSet<String>,
    /// Config maps likewise.
    pub config_maps: BTreeSet<String>,
    /// Image of the executor.
    pub image: String,
}

/// How one check came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CheckOutcome {
    Ok,
    Failed,
    /// Could not be found out, which is no fault by itself.
    Unknown,
}

/// One check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CheckResult {
    /// What was looked at.
    pub subject: String,
    pub outcome: CheckOutcome,
    /// What was found.
    pub finding: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
}

impl CheckResult {
    fn ok(subject: impl Into<String>, finding: impl Into<String>) -> Self {
        Self {
            subject: subject.into(),
            outcome: CheckOutcome::Ok,
            finding: finding.into(),
            fix: None,
        }
    }

    fn failed(
        subject: impl Into<String>,
        finding: impl Into<String>,
        fix: impl Into<String>,
    ) -> Self {
        Self {
            subject: subject.into(),
            outcome: CheckOutcome::Failed,
            finding: finding.into(),
            fix: Some(fix.into()),
        }
    }

    fn unknown(subject: impl Into<String>, error: &ClusterError) -> Self {
        Self {
            subject: subject.into(),
            outcome: CheckOutcome::Unknown,
            finding: error.to_string(),
            fix: None,
        }
    }
}

impl Cluster {
    /// Every check, in a fixed order.
    pub async fn check(&self, expected: &Expectations) -> Vec<CheckResult> {
        let mut results = vec![self.check_namespace().await];
        for right in RIGHTS {
            let namespace = match (right.need, &expected.election_namespace) {
                (Need::Election, None) => continue,
                (Need::JobDataInSecret, _) if !expected.job_data_in_secret => continue,
                (_, Some(namespace)) if right.place == Place::Launcher => namespace,
                _ => &self.namespace,
            };
            results.push(self.check_right(right, namespace).await);
        }
        for name in &expected.secrets {
            results.push(self.check_secret(name).await);
        }
        for name in &expected.config_maps {
            results.push(self.check_config_map(name).await);
        }
        results.push(check_image(&expected.image));
        results
    }

    async fn check_namespace(&self) -> CheckResult {
        let jobs = self.jobs();
        let params = ListParams::default().limit(1);
        let subject = format!("namespace {}", self.namespace);
        let fix = format!(
            "create the namespace `{}` and bind the launcher's Role in it",
            self.namespace
        );
        match self.ask("read the namespace", || jobs.list(&params)).await {
            // A list of nothing is also the answer for a namespace that does not exist.
            Ok(_) if self.is_missing().await => CheckResult::failed(subject, "not there", fix),
            Ok(_) => CheckResult::ok(subject, "readable"),
            Err(error @ ClusterError::NoAnswer { .. }) => CheckResult::failed(
                subject,
                error.to_string(),
                "check KUBECONFIG, or the API server's address and the network policies of the launcher",
            ),
            Err(error) => CheckResult::failed(subject, error.to_string(), fix),
        }
    }

    /// Whether creating a Job fails for want of the namespace. Nothing is created.
    async fn is_missing(&self) -> bool {
        let jobs = self.jobs();
        let params = PostParams {
            dry_run: true,
            ..PostParams::default()
        };
        // Whether the namespace is there is asked before whether the Job is any good.
        let mut job = Job::default();
        job.metadata.name = Some("mayfly-check".to_owned());
        let tried = self
            .ask("try the namespace", || jobs.create(&params, &job))
            .await;
        tried.is_err_and(|error| error.is_not_found())
    }

    async fn check_right(&self, right: &Right, namespace: &str) -> CheckResult {
        let what = what(right);
        let subject = format!("right to {} {what}", right.verb);
        let reviews: Api<SelfSubjectAccessReview> = Api::all(self.client.clone());
        let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        let review = SelfSubjectAccessReview {
            spec: SelfSubjectAccessReviewSpec {
                resource_attributes: Some(ResourceAttributes {
                    namespace: some(namespace),
                    verb: some(right.verb),
                    group: some(right.group),
                    resource: some(right.resource),
                    subresource: some(right.subresource),
                    ..ResourceAttributes::default()
                }),
                ..SelfSubjectAccessReviewSpec::default()
            },
            ..SelfSubjectAccessReview::default()
        };
        let params = PostParams::default();
        let answer = self
            .ask("ask for the launcher's rights", || {
                reviews.create(&params, &review)
            })
            .await;
        match answer {
            Ok(answer) if answer.status.as_ref().is_some_and(|status| status.allowed) => {
                CheckResult::ok(subject, format!("granted, to {}", right.purpose))
            }
            Ok(_) => CheckResult::failed(
                subject,
                format!("denied; the launcher needs it to {}", right.purpose),
                format!(
                    "grant `{}` on `{what}` in the namespace `{namespace}` (rbac/ has the Role)",
                    right.verb
                ),
            ),
            Err(error) => CheckResult::unknown(subject, &error),
        }
    }

    async fn check_secret(&self, name: &str) -> CheckResult {
        let api: Api<Secret> = self.secrets();
        let found = self
            .ask("look for the Secret", || api.get_metadata_opt(name))
            .await
            .map(|found| found.is_some());
        self.presence("Secret", name, found)
    }

    async fn check_config_map(&self, name: &str) -> CheckResult {
        // Asked first, so that a right that is not needed is not tried either.
        let reading = Right {
            verb: "get",
            group: "",
            resource: "configmaps",
            ..RIGHTS[0]
        };
        if self.check_right(&reading, &self.namespace).await.outcome != CheckOutcome::Ok {
            return untold("ConfigMap", name);
        }
        let api: Api<ConfigMap> = Api::namespaced(self.client.clone(), &self.namespace);
        let found = self
            .ask("look for the config map", || api.get_metadata_opt(name))
            .await
            .map(|found| found.is_some());
        self.presence("ConfigMap", name, found)
    }

    fn presence(&self, kind: &str, name: &str, found: Result<bool, ClusterError>) -> CheckResult {
        let subject = format!("{kind} {name}");
        match found {
            Ok(true) => CheckResult::ok(subject, "there"),
            Ok(false) => CheckResult::failed(
                subject,
                format!("not in the namespace `{}`", self.namespace),
                format!("create the {kind} `{name}` there, or take it out of the configuration"),
            ),
            Err(error) if error.is_forbidden() => untold(kind, name),
            Err(error) => CheckResult::unknown(subject, &error),
        }
    }
}

fn untold(kind: &str, name: &str) -> CheckResult {
    CheckResult {
        subject: format!("{kind} {name}"),
        outcome: CheckOutcome::Unknown,
        finding: "cannot be told without the right to read it, which runs do not need".to_owned(),
        fix: None,
    }
}

fn what(right: &Right) -> String {
    let mut what = right.resource.to_owned();
    for (mark, part) in [("/", right.subresource), (".", right.group)] {
        if !part.is_empty() {
            what.push_str(mark);
            what.push_str(part);
        }
    }
    what
}

/// The shape of an image reference, as container runtimes read it.
fn check_image(image: &str) -> CheckResult {
    let subject = format!("image {image}");
    match image_fault(image) {
        Some(fault) => CheckResult::failed(
            subject,
            fault,
            "set ExecutorEphemeralImage to `registry/repository:tag` or `…@sha256:digest`",
        ),
        None => CheckResult::ok(subject, "well-formed"),
    }
}

fn image_fault(image: &str) -> Option<String> {
    let (rest, digest) = match image.split_once('@') {
        Some((rest, digest)) => (rest, Some(digest)),
        None => (image, None),
    };
    if let Some(digest) = digest {
        let hex = digest.strip_prefix("sha256:").unwrap_or_default();
        if hex.len() != 64 || !hex.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Some(format!("`{digest}` is no sha256 digest"));
        }
    }
    let slash = rest.rfind('/').map_or(0, |at| at + 1);
    let (name, tag) = match rest[slash..].rfind(':') {
        Some(at) => (&rest[..slash + at], Some(&rest[slash + at + 1..])),
        None => (rest, None),
    };
    if let Some(tag) = tag {
        let fits = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-');
        let first = tag.bytes().next();
        if tag.len() > 128
            || !first.is_some_and(|b| b.is_ascii_alphanumeric() || b == b'_')
            || !tag.bytes().all(fits)
        {
            return Some(format!("`{tag}` is no tag"));
        }
    }
    let (host, path) = match name.split_once('/') {
        Some((host, path)) if host.contains(['.', ':']) || host == "localhost" => (host, path),
        _ => ("", name),
    };
    let in_host =
        |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b':' | b'[' | b']');
    let in_path = |b: u8| {
        b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'.' | b'_' | b'-' | b'/')
    };
    if !host.bytes().all(in_host) {
        return Some(format!("`{host}` is no registry"));
    }
    if path.is_empty() || !path.bytes().all(in_path) || path.split('/').any(str::is_empty) {
        return Some(format!(
            "`{path}` is no repository: lower-case letters, digits and `._-/` are allowed"
        ));
    }
    None
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("executor")]
    #[case("azbuilder/executor:2.33.0")]
    #[case("localhost:5000/a/b_c:x")]
    #[case("registry.example:443/mayfly/executor")]
    #[case("a@sha256:0000000000000000000000000000000000000000000000000000000000000000")]
    fn an_image_reference_is_accepted(#[case] image: &str) {
        assert_eq!(image_fault(image), None);
    }

    #[rstest]
    #[case("")]
    #[case("Executor:1")]
    #[case("a b")]
    #[case("registry.example/")]
    #[case("executor:")]
    #[case("executor:-x")]
    #[case("executor@sha256:12")]
    #[case("https://registry.example/executor")]
    fn what_no_runtime_would_pull_is_found(#[case] image: &str) {
        assert!(image_fault(image).is_some(), "{image}");
    }
}
