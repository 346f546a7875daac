//! The target `none`: a launcher that runs nothing itself, because agents take the runs of its pools.

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use http_service::Readiness;
use job_contract::Document;
use reporter::dispatch::{Acceptance, DispatchError, ResponseSent};

use super::DispatchTarget;

#[derive(Debug)]
pub(crate) struct NoTarget;

impl DispatchTarget for NoTarget {
    fn accept(
        &self,
        _job: Document,
        _response_sent: ResponseSent,
    ) -> BoxFuture<'_, Result<Acceptance, DispatchError>> {
        // The platform shows the reason to people.
        let reason = "this launcher has pools alone and no target of its own: add `/pools/` and the name of a pool to its URL";
        std::future::ready(Err(DispatchError::Invalid(reason.to_owned()))).boxed()
    }

    fn readiness(&self) -> BoxFuture<'_, Readiness> {
        std::future::ready(Readiness::Ready).boxed()
    }

    fn name(&self) -> &'static str {
        "none"
    }
}
