//! Why the API server rejects a pod that the Job controller wants to create.

/// Why the Job controller could not create the pod.
pub(super) enum PodRejection<'a> {
    Quota(&'a str),
    /// An object that the pod names is missing: its service account.
    MissingObject(&'a str),
    Admission(&'a str),
}

/// Extracts the API server's message from a `FailedCreate` event. Only an exceeded quota is temporary.
pub(super) fn pod_rejection(message: &str) -> PodRejection<'_> {
    let text = message
        .trim()
        .strip_prefix("Error creating: ")
        .unwrap_or(message)
        .trim();
    match text.find("exceeded quota") {
        Some(at) => PodRejection::Quota(&text[at..]),
        None if names_missing_object(text) => PodRejection::MissingObject(text),
        None => PodRejection::Admission(text),
    }
}

/// Whether this message reports a missing object that the pod names. Nothing changes until the object is created.
pub(super) fn names_missing_object(words: &str) -> bool {
    const KINDS: [&str; 4] = [
        "configmap",
        "secret",
        "persistentvolumeclaim",
        "serviceaccount",
    ];
    // These messages are about an existing object, and a missing key or volume.
    const OTHERS: [&str; 3] = [
        "references non-existent config key",
        "references non-existent secret key",
        "bound to non-existent persistentvolume",
    ];
    let is_missing = |(at, kind): (usize, &str)| {
        let rest = &words[at + kind.len()..];
        let rest = rest.strip_prefix('s').unwrap_or(rest);
        let name = rest
            .strip_prefix(" \"")
            .and_then(|rest| rest.split_once('"'));
        name.is_some_and(|(_, rest)| rest.starts_with(" not found"))
    };
    KINDS
        .iter()
        .any(|kind| words.match_indices(kind).any(is_missing))
        || OTHERS.iter().any(|other| words.contains(other))
}
