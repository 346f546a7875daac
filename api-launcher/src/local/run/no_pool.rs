//! Stands for `pool` in a build without hubs and agents.

#![expect(
    clippy::unused_self,
    clippy::unused_async,
    clippy::unnecessary_wraps,
    reason = "it has the interface of `pool`"
)]

use std::path::Path;

use job_contract::report::FinalReport;
use job_contract::{Document, Exit};
use platform::local::LocalPlatform;

use super::error::RunError;
use super::signals::Signals;
use super::view::View;
use crate::data::{DataDir, WorkFolder};
use crate::local::executor::Ended;

/// There is none.
#[derive(Debug)]
pub(crate) enum LocalPool {}

/// Why a run could not go through a pool of its own.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PoolError {
    #[error("this program was built without hubs and agents, which `--with-hub` needs")]
    NotBuilt,
}

impl LocalPool {
    pub(crate) async fn start(
        _data: &DataDir,
        _work: &WorkFolder,
        _executor: Option<&Path>,
        _view: &mut View,
        _signals: &mut Signals,
    ) -> Result<Self, RunError> {
        Err(PoolError::NotBuilt.into())
    }

    pub(crate) async fn run_step(
        &mut self,
        _job: &Document,
        _records: &LocalPlatform,
        _view: &mut View,
        _signals: &mut Signals,
    ) -> Result<(Ended, FinalReport), RunError> {
        match *self {}
    }

    pub(crate) async fn close(self, _signals: &mut Signals) {
        match self {}
    }
}

impl PoolError {
    pub(crate) const EXIT: Exit = Exit::BadConfiguration;

    pub(crate) const fn hint(&self) -> Option<&'static str> {
        Some("build it without `--no-default-features`")
    }
}
