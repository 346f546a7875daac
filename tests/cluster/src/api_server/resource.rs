//! The kinds this server serves, as a table.
//!
//! Knows names and what may be done with them; nothing of objects.

/// What may be done with most kinds.
pub(crate) const ALL_VERBS: &[&str] = &[
    "create",
    "delete",
    "deletecollection",
    "get",
    "list",
    "patch",
    "update",
    "watch",
];

/// One served kind.
#[derive(Debug)]
pub(crate) struct ResourceType {
    pub(crate) group: &'static str,
    pub(crate) version: &'static str,
    pub(crate) plural: &'static str,
    pub(crate) singular: &'static str,
    pub(crate) kind: &'static str,
    pub(crate) namespaced: bool,
    pub(crate) short: &'static [&'static str],
    pub(crate) subresources: &'static [(&'static str, &'static [&'static str])],
    pub(crate) verbs: &'static [&'static str],
}

const STATUS: (&str, &[&str]) = ("status", &["get", "patch", "update"]);

const BASE: ResourceType = ResourceType {
    group: "",
    version: "v1",
    plural: "",
    singular: "",
    kind: "",
    namespaced: true,
    short: &[],
    subresources: &[],
    verbs: ALL_VERBS,
};

/// Everything served.
pub(crate) static RESOURCES: &[ResourceType] = &[
    ResourceType {
        plural: "pods",
        singular: "pod",
        kind: "Pod",
        short: &["po"],
        subresources: &[
            STATUS,
            ("log", &["get"]),
            ("binding", &["create"]),
            ("eviction", &["create"]),
        ],
        ..BASE
    },
    ResourceType {
        plural: "secrets",
        singular: "secret",
        kind: "Secret",
        ..BASE
    },
    ResourceType {
        plural: "configmaps",
        singular: "configmap",
        kind: "ConfigMap",
        short: &["cm"],
        ..BASE
    },
    ResourceType {
        plural: "events",
        singular: "event",
        kind: "Event",
        short: &["ev"],
        ..BASE
    },
    ResourceType {
        plural: "persistentvolumeclaims",
        singular: "persistentvolumeclaim",
        kind: "PersistentVolumeClaim",
        short: &["pvc"],
        subresources: &[STATUS],
        ..BASE
    },
    ResourceType {
        plural: "serviceaccounts",
        singular: "serviceaccount",
        kind: "ServiceAccount",
        short: &["sa"],
        ..BASE
    },
    ResourceType {
        plural: "namespaces",
        singular: "namespace",
        kind: "Namespace",
        namespaced: false,
        short: &["ns"],
        subresources: &[STATUS],
        ..BASE
    },
    ResourceType {
        group: "batch",
        plural: "jobs",
        singular: "job",
        kind: "Job",
        subresources: &[STATUS],
        ..BASE
    },
    ResourceType {
        group: "coordination.k8s.io",
        plural: "leases",
        singular: "lease",
        kind: "Lease",
        ..BASE
    },
    ResourceType {
        group: "events.k8s.io",
        plural: "events",
        singular: "event",
        kind: "Event",
        short: &["ev"],
        ..BASE
    },
    ResourceType {
        group: "rbac.authorization.k8s.io",
        plural: "roles",
        singular: "role",
        kind: "Role",
        ..BASE
    },
    ResourceType {
        group: "rbac.authorization.k8s.io",
        plural: "rolebindings",
        singular: "rolebinding",
        kind: "RoleBinding",
        ..BASE
    },
    ResourceType {
        group: "authorization.k8s.io",
        plural: "selfsubjectaccessreviews",
        singular: "selfsubjectaccessreview",
        kind: "SelfSubjectAccessReview",
        namespaced: false,
        verbs: &["create"],
        ..BASE
    },
    kept("", "Service", "services", "service"),
    kept("", "ResourceQuota", "resourcequotas", "resourcequota"),
    kept("apps", "Deployment", "deployments", "deployment"),
    kept(
        "networking.k8s.io",
        "NetworkPolicy",
        "networkpolicies",
        "networkpolicy",
    ),
    kept(
        "policy",
        "PodDisruptionBudget",
        "poddisruptionbudgets",
        "poddisruptionbudget",
    ),
    kept(
        "monitoring.coreos.com",
        "ServiceMonitor",
        "servicemonitors",
        "servicemonitor",
    ),
    kept(
        "monitoring.coreos.com",
        "PodMonitor",
        "podmonitors",
        "podmonitor",
    ),
    kept(
        "monitoring.coreos.com",
        "PrometheusRule",
        "prometheusrules",
        "prometheusrule",
    ),
    ResourceType {
        namespaced: false,
        ..kept(
            "",
            "PersistentVolume",
            "persistentvolumes",
            "persistentvolume",
        )
    },
    ResourceType {
        namespaced: false,
        ..kept(
            "admissionregistration.k8s.io",
            "ValidatingAdmissionPolicy",
            "validatingadmissionpolicies",
            "validatingadmissionpolicy",
        )
    },
    ResourceType {
        namespaced: false,
        ..kept(
            "admissionregistration.k8s.io",
            "ValidatingAdmissionPolicyBinding",
            "validatingadmissionpolicybindings",
            "validatingadmissionpolicybinding",
        )
    },
];

/// A kind that is kept and served, so that an installation goes through; nothing comes of its objects.
const fn kept(
    group: &'static str,
    kind: &'static str,
    plural: &'static str,
    singular: &'static str,
) -> ResourceType {
    ResourceType {
        group,
        plural,
        singular,
        kind,
        ..BASE
    }
}

impl ResourceType {
    pub(crate) fn find(group: &str, version: &str, plural: &str) -> Option<&'static Self> {
        RESOURCES
            .iter()
            .find(|r| r.group == group && r.version == version && r.plural == plural)
    }

    /// `batch/v1`, `v1`.
    pub(crate) fn api_version(&self) -> String {
        if self.group.is_empty() {
            self.version.to_owned()
        } else {
            format!("{}/{}", self.group, self.version)
        }
    }

    /// `jobs.batch`, `pods`.
    pub(crate) fn qualified(&self) -> String {
        if self.group.is_empty() {
            self.plural.to_owned()
        } else {
            format!("{}.{}", self.plural, self.group)
        }
    }

    /// Under which name objects are kept: events of both groups are the same objects.
    pub(crate) fn bucket(&self) -> (&'static str, &'static str) {
        if self.plural == "events" {
            ("", "events")
        } else {
            (self.group, self.plural)
        }
    }

    pub(crate) fn verbs_of(&self, subresource: &str) -> Option<&'static [&'static str]> {
        if subresource.is_empty() {
            return Some(self.verbs);
        }
        self.subresources
            .iter()
            .find(|(name, _)| *name == subresource)
            .map(|(_, verbs)| *verbs)
    }

    pub(crate) fn has_status(&self) -> bool {
        self.verbs_of("status").is_some()
    }

    /// Whether a change of `spec` counts as a new generation.
    pub(crate) fn has_generation(&self) -> bool {
        matches!(self.kind, "Job" | "Pod")
    }
}
