//! The time now, as objects of Kubernetes write it.

use k8s_openapi::jiff::Timestamp;

/// As a `Time` has it: in whole seconds.
pub(crate) fn now() -> String {
    Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// As a `MicroTime` has it, with fractions.
pub(crate) fn micro_now() -> String {
    let now = Timestamp::now();
    now.strftime("%Y-%m-%dT%H:%M:%S%.6fZ").to_string()
}
