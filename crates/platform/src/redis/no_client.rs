//! In the place of `client` and `config`, in a build without a client of Redis: there is no Redis, and no settings of one.

use std::future::Ready;
use std::time::Duration;

use job_contract::build::needs;
use job_contract::env;
use runtime::setting::{ReadSetting as _, SettingError};

use super::{Appended, RedisArgs, Retention, StoredEntry, StreamEntry, Taken};

#[derive(Clone, Debug)]
enum Never {}

#[derive(Clone, Debug)]
pub struct RedisConfig(Never);

#[derive(Debug, thiserror::Error)]
pub enum RedisError {}

#[derive(Clone, Debug)]
pub struct Redis(Never);

type Answer<T> = Ready<Result<T, RedisError>>;

impl RedisArgs {
    /// `None` if there is no Redis.
    pub fn resolve(&self) -> Result<Option<RedisConfig>, Vec<SettingError>> {
        let settings = [
            (self.redis_hostname.is_set(), env::REDIS_HOSTNAME),
            (self.redis_cluster_nodes.is_set(), env::REDIS_CLUSTER_NODES),
            (
                self.redis_sentinel_nodes.is_set(),
                env::REDIS_SENTINEL_NODES,
            ),
            (
                self.redis_sentinel_master.is_set(),
                env::REDIS_SENTINEL_MASTER,
            ),
        ];
        match settings.into_iter().find(|(is_set, _)| *is_set) {
            Some((_, name)) => Err(vec![SettingError::new(name, needs("a client of Redis"))]),
            None => Ok(None),
        }
    }
}

/// The methods that this crate calls.
impl Redis {
    pub fn new(config: RedisConfig) -> Self {
        Self(config.0)
    }

    #[must_use]
    pub fn separate(&self) -> Self {
        self.clone()
    }

    pub fn address(&self) -> String {
        match self.0 {}
    }

    pub fn append(&self, _: &[u8], _: &[StreamEntry], _: Retention) -> Answer<Vec<String>> {
        match self.0 {}
    }

    pub fn append_after(&self, _: &[u8], _: Option<&str>, _: &[StreamEntry]) -> Answer<Appended> {
        match self.0 {}
    }

    pub fn replace(&self, _: &[u8], _: &[String], _: &[StreamEntry]) -> Answer<Option<String>> {
        match self.0 {}
    }

    pub fn has_entry(&self, _: &[u8], _: &str) -> Answer<bool> {
        match self.0 {}
    }

    pub fn create_group(&self, _: &[u8], _: &str) -> Answer<()> {
        match self.0 {}
    }

    pub fn last_id(&self, _: &[u8]) -> Answer<Option<String>> {
        match self.0 {}
    }

    pub fn entries_after(&self, _: &[u8], _: Option<&str>, _: usize) -> Answer<Vec<StoredEntry>> {
        match self.0 {}
    }

    pub fn set(&self, _: &[u8], _: &[u8], _: Duration) -> Answer<()> {
        match self.0 {}
    }

    pub fn take(&self, _: &[u8], _: &[u8], _: Duration) -> Answer<Taken> {
        match self.0 {}
    }

    pub fn get(&self, _: &[u8]) -> Answer<Option<Vec<u8>>> {
        match self.0 {}
    }

    pub fn delete(&self, _: &[u8]) -> Answer<()> {
        match self.0 {}
    }

    pub fn publish(&self, _: &str, _: &[u8]) -> Answer<()> {
        match self.0 {}
    }
}
