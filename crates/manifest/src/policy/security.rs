//! Finds settings that a policy forbids: in security contexts, and in the annotations that replace them.

use job_contract::env;

use super::super::error::quote;
use super::super::overrides::Overrides;
use super::super::pod_security::{Level, annotation_rule};
use super::{Policy, Refusals};

/// A setting of a security context that not every Pod Security Standard allows.
struct Loosening {
    variable: &'static str,
    setting: &'static str,
    /// The least strict level that forbids it.
    forbidden_from: Level,
}

impl Policy {
    pub(super) fn refuse_security(&self, requested: &Overrides, refusals: &mut Refusals) {
        self.refuse_security_keys(requested, refusals);
        self.refuse_security_annotations(requested, refusals);
        for loosening in loosenings(requested) {
            if self.pod_security >= loosening.forbidden_from {
                refusals.0.add(
                    loosening.variable,
                    format!(
                        "asks for {}, which the policy's `podSecurity: {}` forbids",
                        loosening.setting, self.pod_security
                    ),
                );
            }
        }
    }

    fn refuse_security_keys(&self, requested: &Overrides, refusals: &mut Refusals) {
        for (variable, keys) in [
            (env::EPHEMERAL_POD_SECURITY, requested.pod_security.keys()),
            (env::EPHEMERAL_SECURITY, requested.container_security.keys()),
        ] {
            refusals.names(
                variable,
                keys,
                &self.security_context_keys,
                "securityContextKeys",
            );
        }
    }

    fn refuse_security_annotations(&self, requested: &Overrides, refusals: &mut Refusals) {
        for (key, value) in &requested.pod_annotations {
            if let Some(rule) = annotation_rule(key, value, self.pod_security)
                && self.annotation_keys.allow(key)
            {
                refusals.0.add(
                    env::EPHEMERAL_POD_ANNOTATIONS,
                    format!(
                        "asks for {}, which {rule} by the policy's `podSecurity: {}`",
                        quote(key),
                        self.pod_security
                    ),
                );
            }
        }
    }
}

/// Returns the settings in a workspace's two security contexts that at least one level forbids.
fn loosenings(requested: &Overrides) -> impl Iterator<Item = Loosening> {
    let (pod, container) = (&requested.pod_security, &requested.container_security);
    let of_both = |variable, non_root, user, profile: &Option<String>| {
        let unconfined = profile.as_deref() == Some("Unconfined");
        [
            (
                variable,
                "runAsNonRoot=false",
                Level::Restricted,
                non_root == Some(false),
            ),
            (variable, "runAsUser=0", Level::Restricted, user == Some(0)),
            (
                variable,
                "seccompProfile=Unconfined",
                Level::Baseline,
                unconfined,
            ),
        ]
    };
    let of_pod = of_both(
        env::EPHEMERAL_POD_SECURITY,
        pod.run_as_non_root,
        pod.run_as_user,
        &pod.seccomp_profile,
    );
    let of_container = of_both(
        env::EPHEMERAL_SECURITY,
        container.run_as_non_root,
        container.run_as_user,
        &container.seccomp_profile,
    );
    let escalates = container.allow_privilege_escalation == Some(true);
    let privileged = container.privileged == Some(true);
    let of_container_alone = [
        (
            "allowPrivilegeEscalation=true",
            Level::Restricted,
            escalates,
        ),
        ("privileged=true", Level::Baseline, privileged),
    ]
    .map(|(setting, level, asked_for)| (env::EPHEMERAL_SECURITY, setting, level, asked_for));
    of_pod
        .into_iter()
        .chain(of_container_alone)
        .chain(of_container)
        .filter(|(.., asked_for)| *asked_for)
        .map(|(variable, setting, forbidden_from, _)| Loosening {
            variable,
            setting,
            forbidden_from,
        })
}
