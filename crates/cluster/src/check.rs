//! Checks whether a run would start here. Each finding says how to fix it. Also the cheaper requests for the readiness of a
//! launcher.

use std::collections::BTreeSet;

use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
};
use k8s_openapi::api::batch::v1::Job;
use kube::Api;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind, ListParams, PostParams};
use manifest::image;
use manifest::references::References;
use serde::Serialize;

use super::rights::{LEASE, Need, RIGHTS, Right};
use super::{Cluster, ClusterError};

/// The requirements of the deployment.
#[derive(Clone, Debug)]
pub struct Expectations {
    pub rights: Vec<&'static Right<'static>>,
    /// Job data travels in Secrets.
    pub job_data_in_secret: bool,
    /// The objects that pods of runs refer to.
    pub references: References,
}

/// The result of one check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CheckOutcome {
    Ok,
    Failed,
    /// The check could not be made. This alone is no fault.
    Unknown,
}

/// One check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CheckResult {
    /// What was checked.
    pub subject: String,
    pub outcome: CheckOutcome,
    /// What was found.
    pub finding: String,
    /// How to fix it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
}

impl CheckResult {
    pub fn ok(subject: impl Into<String>, finding: impl Into<String>) -> Self {
        Self::new(subject, CheckOutcome::Ok, finding)
    }

    pub fn failed(
        subject: impl Into<String>,
        finding: impl Into<String>,
        fix: impl Into<String>,
    ) -> Self {
        Self {
            fix: Some(fix.into()),
            ..Self::new(subject, CheckOutcome::Failed, finding)
        }
    }

    fn unknown(subject: impl Into<String>, error: &ClusterError) -> Self {
        Self::new(subject, CheckOutcome::Unknown, error.to_string())
    }

    fn new(subject: impl Into<String>, outcome: CheckOutcome, finding: impl Into<String>) -> Self {
        Self {
            subject: subject.into(),
            outcome,
            finding: finding.into(),
            fix: None,
        }
    }
}

impl Cluster {
    /// Every check, in a fixed order.
    pub async fn check(&self, expected: &Expectations) -> Vec<CheckResult> {
        let mut results = vec![self.check_namespace().await];
        for right in &expected.rights {
            if right.need == Need::JobDataInSecret && !expected.job_data_in_secret {
                continue;
            }
            let name = right.lease_only.then_some(LEASE);
            results.push(self.check_right(right, name, &self.namespace).await);
        }
        let refers = &expected.references;
        let (priorities, runtimes) = (&refers.priority_classes, &refers.runtime_classes);
        for (group, name, names) in [
            ("", "Secret", &refers.secrets),
            ("", "ConfigMap", &refers.config_maps),
            ("", "ServiceAccount", &refers.service_accounts),
            ("", "PersistentVolumeClaim", &refers.claims),
            ("scheduling.k8s.io", "PriorityClass", priorities),
            ("node.k8s.io", "RuntimeClass", runtimes),
        ] {
            let kind = ApiResource::from_gvk(&GroupVersionKind::gvk(group, "v1", name));
            // The two kinds of classes are for the whole cluster.
            let namespace = group.is_empty().then_some(self.namespace.as_str());
            self.check_all(&kind, namespace, names, &mut results).await;
        }
        results.extend(refers.images.iter().map(|image| check_image(image)));
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
        match self
            .request_with_retries("read the namespace", || jobs.list(&params))
            .await
        {
            // An empty list is also the response for a namespace that does not exist.
            Ok(_) if self.is_missing().await => CheckResult::failed(subject, "not there", fix),
            Ok(_) => CheckResult::ok(subject, "readable"),
            Err(error @ ClusterError::NoAnswer { .. }) => CheckResult::failed(
                subject,
                error.to_string(),
                "check KUBECONFIG, or the API server's address and the network policies of the launcher",
            ),
            Err(ClusterError::Credential { source, .. }) => {
                CheckResult::failed(subject, job_contract::chain(&source), source.hint())
            }
            Err(error) => CheckResult::failed(subject, error.to_string(), fix),
        }
    }

    /// Whether the API server refuses a Job because the namespace is missing. Nothing is created.
    async fn is_missing(&self) -> bool {
        let tried = self.try_to_create().await;
        tried.is_err_and(|error| error.is_not_found())
    }

    /// Sends an invalid Job to the API server. The API server checks the right and the namespace before it checks the
    /// Job. Nothing is created.
    pub(super) async fn try_to_create(&self) -> Result<(), ClusterError> {
        let jobs = self.jobs();
        let params = PostParams {
            dry_run: true,
            ..PostParams::default()
        };
        let mut job = Job::default();
        job.metadata.name = Some("mayfly-check".to_owned());
        self.request_with_retries("try to create a Job", || jobs.create(&params, &job))
            .await
            .map(drop)
    }

    /// Whether the launcher has the right, for every object or for the named one.
    async fn check_right(
        &self,
        right: &Right<'_>,
        name: Option<&str>,
        namespace: &str,
    ) -> CheckResult {
        let what = match name {
            Some(name) => format!("{} {name}", what(right)),
            None => what(right),
        };
        let subject = format!("right to {} {what}", right.verb);
        let reviews: Api<SelfSubjectAccessReview> = Api::all(self.client.clone());
        let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        let review = SelfSubjectAccessReview {
            spec: SelfSubjectAccessReviewSpec {
                resource_attributes: Some(ResourceAttributes {
                    namespace: some(namespace),
                    name: name.map(str::to_owned),
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
            .request_with_retries("ask for the launcher's rights", || {
                reviews.create(&params, &review)
            })
            .await;
        match answer {
            Ok(answer) if answer.status.as_ref().is_some_and(|status| status.allowed) => {
                CheckResult::ok(subject, format!("granted, to {}", right.purpose))
            }
            Ok(_) if right.need == Need::MissingClaim => CheckResult::ok(
                subject,
                format!("denied; it is not needed, but would {}", right.purpose),
            ),
            Ok(_) => CheckResult::failed(
                subject,
                format!("denied; the launcher needs it to {}", right.purpose),
                fix(right, &what, namespace),
            ),
            Err(error) => CheckResult::unknown(subject, &error),
        }
    }

    /// Objects of a kind runs do not read, so that the launcher's Role need not let it either. Without a `namespace`, they are
    /// for the whole cluster.
    async fn check_all(
        &self,
        kind: &ApiResource,
        namespace: Option<&str>,
        names: &BTreeSet<String>,
        results: &mut Vec<CheckResult>,
    ) {
        if names.is_empty() {
            return;
        }
        // Asked first, so that a right that is not needed is not tried either.
        let (group, resource) = (kind.group.as_str(), kind.plural.as_str());
        let reading = Right {
            verb: "get",
            group,
            resource,
            ..RIGHTS[0]
        };
        let place = namespace.unwrap_or_default();
        let may = self.check_right(&reading, None, place).await.outcome == CheckOutcome::Ok;
        let client = self.client.clone();
        let api: Api<DynamicObject> = match namespace {
            Some(namespace) => Api::namespaced_with(client, namespace, kind),
            None => Api::all_with(client, kind),
        };
        for name in names {
            if !may {
                results.push(not_checked(&kind.kind, name, namespace));
                continue;
            }
            let found = self
                .request_with_retries("look for what runs refer to", || api.get_metadata_opt(name))
                .await
                .map(|found| found.is_some());
            results.push(presence(&kind.kind, name, namespace, found));
        }
    }
}

impl Cluster {
    /// Reads a Job that need not exist. This is the cheapest request that needs the API server, the namespace and the right
    /// to read runs.
    pub async fn check_access(&self) -> Result<(), ClusterError> {
        let jobs = self.jobs();
        self.request_with_retries("reach the namespace of runs", || {
            jobs.get_opt("mayfly-readiness")
        })
        .await
        .map(drop)
    }

    /// Checks that the namespace exists and that the launcher may create Jobs in it. What the API server says of the Job
    /// itself does not matter. Nothing is created.
    pub async fn check_creation(&self) -> Result<(), ClusterError> {
        match self.try_to_create().await {
            Err(error) if !error.is_transient() && !error.concerns_every_run() => Ok(()),
            tried => tried,
        }
    }
}

fn presence(
    kind: &str,
    name: &str,
    namespace: Option<&str>,
    found: Result<bool, ClusterError>,
) -> CheckResult {
    let subject = format!("{kind} {name}");
    let place = namespace.map_or_else(
        || "the cluster".to_owned(),
        |namespace| format!("the namespace `{namespace}`"),
    );
    match found {
        Ok(true) => CheckResult::ok(subject, "there"),
        Ok(false) => CheckResult::failed(
            subject,
            format!("not in {place}"),
            format!("create the {kind} `{name}` there, or take it out of the configuration"),
        ),
        Err(error) if error.is_forbidden() => not_checked(kind, name, namespace),
        Err(error) => CheckResult::unknown(subject, &error),
    }
}

fn not_checked(kind: &str, name: &str, namespace: Option<&str>) -> CheckResult {
    let place = namespace.map_or_else(String::new, |namespace| format!(" -n {namespace}"));
    CheckResult {
        subject: format!("{kind} {name}"),
        outcome: CheckOutcome::Unknown,
        finding: "unknown without the right to read it, which runs do not need".to_owned(),
        fix: Some(format!(
            "look with an account that may: `kubectl get{place} {} {name}`",
            kind.to_lowercase()
        )),
    }
}

fn fix(right: &Right<'_>, what: &str, namespace: &str) -> String {
    let alone = if right.need == Need::Election {
        ", or run a single replica, which watches without it"
    } else {
        ""
    };
    format!(
        "grant `{}` on `{what}` in the namespace `{namespace}` (rbac/ has the Role){alone}",
        right.verb
    )
}

fn what(right: &Right<'_>) -> String {
    let mut what = right.resource.to_owned();
    for (mark, part) in [("/", right.subresource), (".", right.group)] {
        if !part.is_empty() {
            what.push_str(mark);
            what.push_str(part);
        }
    }
    what
}

/// Checks the syntax of an image reference, as container runtimes parse it. Only a registry can show whether the image
/// exists, and only with the pull secret. So no registry is asked.
fn check_image(image: &str) -> CheckResult {
    let subject = format!("image {image}");
    match image::check(image) {
        Err(fault) => CheckResult::failed(
            subject,
            fault,
            "set ExecutorEphemeralImage, or the image in the pod template, to `registry/repository:tag` or `…@sha256:digest`",
        ),
        Ok(()) => CheckResult {
            subject,
            outcome: CheckOutcome::Unknown,
            finding: "the reference can be read; not checked: whether the registry has it, and lets nodes pull it"
                .to_owned(),
            fix: Some(format!("ask the registry: `skopeo inspect docker://{image}`")),
        },
    }
}
