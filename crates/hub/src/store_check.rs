//! Asks the artifact store of a hub which conditions it keeps, for a command that checks an installation.

use std::path::{Path, PathBuf};
use std::time::Duration;

use artifact_store::{
    KeptConditions, RequestTiming, ServedStore, StoreArgs, StoreConfigError, StoreError,
};
use clap::{Args, ValueHint};
use data_dir::DataDirArgs;
use job_contract::env;
use tokio::time::timeout;

use crate::artifacts::RETRY_FOR;

/// The longest time for all answers of the store.
const TIMEOUT: Duration = Duration::from_mins(1);

/// The store of a hub.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Hub")]
pub struct StoreCheckArgs {
    /// YAML file of the pools, if this launcher is a hub: its artifact store is asked whether it keeps conditions. The file is not
    /// read
    #[arg(long, value_name = "FILE", env = env::POOLS_FILE, value_hint = ValueHint::FilePath)]
    pub pools: Option<PathBuf>,

    #[command(flatten)]
    pub data: DataDirArgs,

    #[command(flatten)]
    pub store: StoreArgs,
}

/// Why it is not known which conditions a store keeps.
#[derive(Debug, thiserror::Error)]
pub enum StoreCheckError {
    #[error(transparent)]
    Settings(#[from] StoreConfigError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the artifact store did not answer all requests within a minute")]
    Slow,
}

impl StoreCheckError {
    /// The next step for the operator.
    pub fn hint(&self) -> String {
        let hint = match self {
            Self::Settings(error) => Some(error.hint()),
            Self::Store(error) => error.hint(),
            Self::Slow => None,
        };
        hint.unwrap_or_else(|| "check the artifact store and the network".to_owned())
    }
}

impl StoreCheckArgs {
    /// Asks the store which conditions it keeps; `None` if this is no hub, or one without a store.
    pub async fn ask(&self) -> Option<Result<KeptConditions, StoreCheckError>> {
        self.pools.as_ref()?;
        let folder = self.data.given();
        if folder.is_none() && self.store.is_local() {
            return None;
        }
        Some(self.ask_in(folder.unwrap_or(Path::new(""))).await)
    }

    async fn ask_in(&self, data_dir: &Path) -> Result<KeptConditions, StoreCheckError> {
        let settings = self.store.resolve(data_dir)?;
        let timing = RequestTiming {
            retry_for: RETRY_FOR,
            ..RequestTiming::default()
        };
        let store = ServedStore::open(&settings, &timing)?;
        let asked = timeout(TIMEOUT, store.ask_conditions()).await;
        Ok(asked.map_err(|_| StoreCheckError::Slow)??)
    }
}
