//! The requests that executors make, and why one is refused.

use pool_store::Refusal;

/// A request that executors make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    ReadJob,
    ChangeJob,
    ChangeStep,
    /// The states that the job has published.
    ReadHistory,
    AddHistory,
    SetUpLog,
    AddLines,
    ReadContext,
    WriteContext,
    /// The archive of a run that was started from a command line.
    ReadContent,
    /// The releases of OpenTofu.
    ReadReleases,
    /// The hosts of the platform's registry of modules and providers.
    ReadHosts,
    /// A document of this registry.
    ReadRegistry,
    /// The archive of a module.
    ReadModule,
    /// The live view of an operation.
    ShowChanges,
    /// What a script asks the platform's API.
    OfScript,
}

/// Why the relay refuses a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RelayRefusal {
    #[error("the relay does not pass this request: {0}")]
    Request(&'static str),
    #[error("the relay does not pass this document: {0}")]
    Body(&'static str),
    /// Executors then send the log in smaller pieces.
    #[error("the body has more than {0} bytes")]
    TooLarge(usize),
    #[error(
        "the context of the job has more than {0} bytes, and a hub without a platform stores no more: \
         let scripts write less into it"
    )]
    ContextTooLarge(usize),
    #[error("the hub has too many bodies in progress for this task or its pool: try again")]
    Busy,
    #[error("the body cannot be read: {0}")]
    Unread(&'static str),
    #[error(transparent)]
    State(Refusal),
}

/// Ids need no other characters. So nothing is decoded, here or behind.
pub(crate) fn is_plain(part: &str) -> bool {
    let known = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    !part.is_empty() && part.bytes().all(known) && !part.bytes().all(|byte| byte == b'.')
}
