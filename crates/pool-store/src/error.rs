//! Errors of the store: why it refused an operation, or why an operation failed.

use std::path::PathBuf;

use pool_protocol::problem::Code;

/// Why the state machine or a limit refuses a request. Each refusal has a stable code of the protocol.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("the instance belongs to another pool")]
    InstancePoolMismatch,
    #[error("the instance is not registered, or was removed: register again")]
    InstanceUnknown,
    #[error(
        "the name is in use by an instance of another installation that is online: choose another name, or stop that one. The log of the hub names it"
    )]
    InstanceNameTaken,
    #[error("the task does not exist")]
    TaskNotFound,
    #[error("the lease ended before the task was accepted")]
    LeaseExpired,
    #[error("a later lease, or another holder, has the task")]
    LeaseSuperseded,
    #[error("the task was not accepted under this lease")]
    LeaseNotAccepted,
    #[error("the task is accepted, and cannot be declined any more")]
    LeaseAccepted,
    #[error("the task is over")]
    TaskAlreadyTerminal,
    #[error("the task was cancelled before it was accepted")]
    TaskCancelled,
    #[error("too many calls of the pool wait for the store: try again later")]
    StoreBusy,
    /// A value is too long, or a list has too many entries.
    #[error("{0}")]
    RequestInvalid(String),
}

impl Refusal {
    /// Returns the code of the protocol for this refusal. Clients decide by it.
    pub const fn code(&self) -> Code {
        match self {
            Self::InstancePoolMismatch => Code::InstancePoolMismatch,
            Self::InstanceUnknown => Code::InstanceUnknown,
            Self::InstanceNameTaken => Code::InstanceNameTaken,
            Self::TaskNotFound => Code::TaskNotFound,
            Self::LeaseExpired => Code::LeaseExpired,
            Self::LeaseSuperseded => Code::LeaseSuperseded,
            Self::LeaseNotAccepted => Code::LeaseNotAccepted,
            Self::LeaseAccepted => Code::LeaseAccepted,
            Self::TaskAlreadyTerminal => Code::TaskAlreadyTerminal,
            Self::TaskCancelled => Code::TaskCancelled,
            Self::StoreBusy => Code::RateLimited,
            Self::RequestInvalid(_) => Code::RequestInvalid,
        }
    }
}

/// Why an operation failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// For example a full disk, or a database that does not respond. The operation may or may not be stored, so repeat it.
    #[error("the store cannot be used now: {0}")]
    Unavailable(#[source] Box<dyn std::error::Error + Send + Sync>),
}

impl Error {
    /// Returns the code of the protocol for this error. Clients decide by it.
    pub const fn code(&self) -> Code {
        match self {
            Self::Refused(refusal) => refusal.code(),
            Self::Unavailable(_) => Code::StoreUnavailable,
        }
    }
}

impl From<sqlx::Error> for Error {
    fn from(error: sqlx::Error) -> Self {
        Self::Unavailable(Box::new(error))
    }
}

/// Why a store cannot be opened. No message contains the password of a database URL.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("the URL of the store must begin with `sqlite:` or `postgres:`")]
    Url,
    #[error(
        "another process uses the store: it holds the lock on `{0}`. Stop it, or use PostgreSQL for several hubs"
    )]
    InUse(PathBuf),
    #[error(
        "the store is on a network file system ({kind}) at `{folder}`, on which SQLite may lose data: use a local volume, or PostgreSQL"
    )]
    NetworkFileSystem { folder: PathBuf, kind: &'static str },
    #[error("cannot use `{path}` for the store: {source}")]
    File {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("cannot open the database of the store: {0}")]
    Database(#[source] sqlx::Error),
    #[error("cannot bring the tables of the store up to date: {0}")]
    Migration(#[source] sqlx::migrate::MigrateError),
}
