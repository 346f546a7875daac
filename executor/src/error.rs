//! Whose fault a failure is, and how a panic is kept from taking
//! the rest of the run with it.

use std::any::Any;
use std::future::Future;
use std::panic::AssertUnwindSafe;

use futures_util::FutureExt as _;
use job_contract::Exit;

/// Whose fault a failure is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The run asks for something that does not exist or cannot be.
    User,
    /// Something around us does not work; trying again may help.
    Infrastructure,
    /// We are wrong.
    Defect,
}

impl ErrorKind {
    /// The exit code of a step that failed this way before it was claimed.
    pub const fn exit(self) -> Exit {
        match self {
            Self::User => Exit::BadJobData,
            Self::Infrastructure => Exit::Infrastructure,
            Self::Defect => Exit::Defect,
        }
    }
}

/// Turns a panic into an error: what must happen afterwards still does.
pub async fn caught<T>(work: impl Future<Output = T>) -> Result<T, Box<dyn Any + Send>> {
    AssertUnwindSafe(work).catch_unwind().await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_is_an_error() {
        assert!(
            caught(async { panic!("on purpose") })
                .await
                .map(|(): ()| ())
                .is_err()
        );
        assert_eq!(caught(async { 7 }).await.unwrap(), 7);
    }
}
