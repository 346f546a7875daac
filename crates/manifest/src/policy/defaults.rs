//! The patterns of the default policy.

/// Annotations that a workspace may set. Its own, and those of schedulers, autoscalers and monitors, are harmless.
/// Others can weaken the sandbox, change the network, or add containers, code or identities to the pod. Those belong to
/// Kubernetes, container runtimes, network plug-ins and injectors. Of each such family, only the annotations that are
/// known to be harmless are allowed.
pub(super) const ANNOTATIONS: &[&str] = &[
    "*",
    // Kubernetes, and projects under its domains.
    "!*kubernetes.io/*",
    "!*k8s.io/*",
    "app.kubernetes.io/*",
    "cluster-autoscaler.kubernetes.io/*",
    "controller.kubernetes.io/*",
    "descheduler.alpha.kubernetes.io/*",
    "kubectl.kubernetes.io/*",
    "kubernetes.io/change-cause",
    "kubernetes.io/description",
    "kueue.x-k8s.io/*",
    "scheduling.k8s.io/*",
    // Container runtimes.
    "!*containerd.io*",
    "!*cri-o.io*",
    "!dev.gvisor.*",
    "!io.containerd.*",
    "!io.katacontainers.*",
    "!io.kubernetes.*",
    "!org.systemd.*",
    "!run.oci.*",
    // Network plug-ins.
    "!*cilium.io/*",
    "!*cncf.io/*",
    "!*ovn.org/*",
    "!*projectcalico.org/*",
    "!cni.*",
    "!networking.gke.io/*",
    "!vpc.amazonaws.com/*",
    // Injectors of containers, code and secrets, and annotations that give a pod an identity.
    "!*dapr.io/*",
    "!*dynatrace.com/*",
    "!*istio.io/*",
    "!*kuma.io/*",
    "!*linkerd.io/*",
    "!*opentelemetry.io/*",
    "!admission.datadoghq.com/*",
    "!consul.hashicorp.com/*",
    "!iam.amazonaws.com/*",
    "!vault.hashicorp.com/*",
    "linkerd.io/inject",
    "sidecar.istio.io/inject",
];

/// Folders in which a workspace may mount. They are for data. Hidden folders of the home directory contain settings of
/// git, ssh and cloud libraries, which the executor uses too.
pub(super) const MOUNT_PATHS: &[&str] = &[
    "/cache*",
    "/config*",
    "/data*",
    "/etc/opentofu*",
    "/etc/terraform*",
    "/etc/tofu*",
    "/home/cnb",
    "!/home/cnb/.*",
    "/home/cnb/.terraform*",
    "/home/mayfly",
    "!/home/mayfly/.*",
    "/home/mayfly/.terraform*",
    "/mnt",
    "/opt",
    "/plugin*",
    "/shared*",
    "/srv",
    "/terraform*",
    "/tf*",
    "/tmp",
    "/tofu*",
    "/var/cache",
    "/var/lib/terraform*",
    "/var/opt",
    "/var/tmp",
];
