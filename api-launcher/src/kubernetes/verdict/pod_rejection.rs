//! Why the API server rejects a pod that the Job controller wants to create.

/// Why the Job controller could not create the pod.
pub(super) enum PodRejection<'a> {
    Quota(&'a str),
    /// An object the pod names is not there: its service account.
    MissingObject(&'a str),
    Admission(&'a str),
}

/// Takes the API server's words out of a `FailedCreate` event. Only an exceeded quota passes by itself.
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

/// Whether these words say that an object which the pod names does not exist. Nothing changes until it is created.
pub(super) fn names_missing_object(words: &str) -> bool {
    const KINDS: [&str; 4] = [
        "configmap",
        "secret",
        "persistentvolumeclaim",
        "serviceaccount",
    ];
    // These name an object that is there, and a key or a volume that is not.
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
