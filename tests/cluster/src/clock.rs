//! The time now, as objects of Kubernetes and headers of responses write it.

use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use k8s_openapi::jiff::fmt::rfc2822::DateTimePrinter;

/// As a `Time` has it: in whole seconds.
pub(crate) fn now() -> String {
    Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// As a `MicroTime` has it, with fractions.
pub(crate) fn micro_now() -> String {
    let now = Timestamp::now();
    now.strftime("%Y-%m-%dT%H:%M:%S%.6fZ").to_string()
}

/// As the header `Date` has it, later by so much.
pub(crate) fn date(ahead: Duration) -> String {
    let now = Timestamp::now();
    let date = now.checked_add(ahead).unwrap_or(now);
    let printed = DateTimePrinter::new().timestamp_to_rfc9110_string(&date);
    printed.unwrap_or_default()
}
