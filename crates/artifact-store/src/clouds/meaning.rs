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

/// The kind of an error of the client.
pub(crate) enum Meaning {
    Refused,
    NoBucket,
    Missing,
    /// Somebody else has locked or changed the object.
    Locked,
    Unavailable,
}

pub(crate) fn meaning(error: &object_store::Error) -> Meaning {
    use object_store::Error as E;
    let text = chain(error);
    let said = |codes: &[&str]| {
        let code = element(&text, "Code");
        code.is_some_and(|code| codes.contains(&code))
    };
    match error {
        E::PermissionDenied { .. } | E::Unauthenticated { .. } => Meaning::Refused,
        _ if said(CREDENTIAL_CODES) => Meaning::Refused,
        _ if said(BUCKET_CODES) => Meaning::NoBucket,
        E::NotFound { .. } => Meaning::Missing,
        E::Precondition { .. } => Meaning::Locked,
        _ => Meaning::Unavailable,
    }
}
