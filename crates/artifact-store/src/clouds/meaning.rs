//! What an error of the client means.

use job_contract::chain;

use crate::error::element;

/// Error codes for wrong credentials, independent of the HTTP status.
const CREDENTIAL_CODES: &[&str] = &[
    "AccessDenied",
    "AuthenticationFailed",
    "AuthorizationFailure",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "InvalidToken",
    "SignatureDoesNotMatch",
];

/// Error codes for a missing bucket.
const BUCKET_CODES: &[&str] = &["NoSuchBucket", "ContainerNotFound"];

/// Error codes of a conflict: a condition is not true.
const CONFLICT_CODES: &[&str] = &[
    "BlobAlreadyExists",
    "ConditionalRequestConflict",
    "PreconditionFailed",
];

/// The parts of an upload are gone.
const UPLOAD_CODES: &[&str] = &["NoSuchUpload"];

/// The beginning of the error codes for a lease of somebody else.
const LEASE: &str = "Lease";

/// The kind of an error of the client.
pub(crate) enum Meaning {
    Refused,
    NoBucket,
    Missing,
    /// Somebody else has locked the object.
    Locked,
    /// The condition of the request is not true.
    Changed,
    Unavailable,
}

pub(crate) fn meaning(error: &object_store::Error) -> Meaning {
    use object_store::Error as E;
    let text = chain(error);
    let code = element(&text, "Code").unwrap_or_default();
    let said = |codes: &[&str]| codes.contains(&code);
    match error {
        E::PermissionDenied { .. } | E::Unauthenticated { .. } => Meaning::Refused,
        _ if said(CREDENTIAL_CODES) => Meaning::Refused,
        _ if said(BUCKET_CODES) => Meaning::NoBucket,
        E::NotFound { .. } if said(UPLOAD_CODES) => Meaning::Unavailable,
        E::NotFound { .. } => Meaning::Missing,
        E::Precondition { .. } if code.starts_with(LEASE) => Meaning::Locked,
        E::Precondition { .. } => Meaning::Changed,
        E::AlreadyExists { .. } if said(CONFLICT_CODES) => Meaning::Changed,
        _ => Meaning::Unavailable,
    }
}
