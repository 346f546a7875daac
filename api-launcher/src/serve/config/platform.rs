//! Which platform the launcher speaks to for its runs, and what else it reaches there: Redis for heartbeats and live logs,
//! the store for reasons in a step's output. All of it under the names the executors of the same deployment read.

use std::path::Path;
use std::time::Duration;

use super::{Problem, Reader};
use crate::dispatch::reporter::PlatformReporter;
use artifact_store::{Limits, Store, StoreArgs, StoreError, StoreSettings};
use clap::Args;
use platform::heartbeat::HeartbeatError;
use platform::redis::{Redis, RedisArgs, RedisConfig};
use platform::terrakube::{Terrakube, TerrakubeArgs, TerrakubeConfig, TerrakubeError};
use runtime::setting::SettingProblem;

#[derive(Args, Clone, Debug, Default)]
pub struct PlatformArgs {
    #[command(flatten)]
    pub terrakube: TerrakubeArgs,

    #[command(flatten)]
    pub redis: RedisArgs,

    #[command(flatten)]
    pub store: StoreArgs,
}

/// What [`PlatformArgs`] come to.
#[derive(Debug)]
pub(crate) struct PlatformSettings {
    terrakube: TerrakubeConfig,
    redis: Option<RedisConfig>,
    outputs: Option<StoreSettings>,
}

/// Why the platform cannot be spoken to.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PlatformSetupError {
    #[error(transparent)]
    Terrakube(#[from] TerrakubeError),
    #[error(transparent)]
    Heartbeat(#[from] HeartbeatError),
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl From<&SettingProblem> for Problem {
    fn from(problem: &SettingProblem) -> Self {
        Self {
            variable: problem.variable.clone(),
            text: problem.text.clone(),
        }
    }
}

impl PlatformArgs {
    /// `None` without an address of the platform's API: then nothing else here is looked at.
    pub(super) fn resolve(
        &self,
        reader: &mut Reader,
        data_dir: Option<&Path>,
    ) -> Option<PlatformSettings> {
        let terrakube = match self.terrakube.resolve() {
            Ok(terrakube) => terrakube?,
            Err(problems) => {
                reader.problems.extend(problems.iter().map(Problem::from));
                // The others are told as well.
                self.resolve_redis(reader);
                self.resolve_outputs(reader, data_dir);
                return None;
            }
        };
        Some(PlatformSettings {
            terrakube,
            redis: self.resolve_redis(reader),
            outputs: self.resolve_outputs(reader, data_dir),
        })
    }

    fn resolve_redis(&self, reader: &mut Reader) -> Option<RedisConfig> {
        self.redis.resolve().unwrap_or_else(|problems| {
            reader.problems.extend(problems.iter().map(Problem::from));
            None
        })
    }

    /// A store on this machine is the platform's only where somebody says which folder they share.
    fn resolve_outputs(
        &self,
        reader: &mut Reader,
        data_dir: Option<&Path>,
    ) -> Option<StoreSettings> {
        if data_dir.is_none() && self.store.is_local() {
            return None;
        }
        match self.store.resolve(data_dir.unwrap_or(Path::new(""))) {
            Ok(settings) => Some(settings),
            Err(error) => {
                let problems = error.problems.iter();
                reader.problems.extend(problems.map(Problem::from));
                None
            }
        }
    }
}

impl PlatformSettings {
    /// Nothing is asked of anybody yet.
    pub(crate) fn open(self) -> Result<PlatformReporter, PlatformSetupError> {
        // A store that fails must not delay other runs: outputs are changed one after the other.
        let limits = Limits {
            retry_for: Duration::from_secs(30),
            ..Limits::default()
        };
        let open = |settings| Store::open_with(settings, &limits);
        let outputs = self.outputs.as_ref().map(open).transpose()?;
        let redis = self.redis.map(Redis::new);
        let terrakube = Terrakube::new(self.terrakube, redis.clone())?;
        Ok(PlatformReporter::terrakube(terrakube, outputs, redis)?)
    }
}

#[cfg(test)]
mod tests {
    use job_contract::env;
    use runtime::setting::from_variables;

    use super::*;

    const USUAL: &[(&str, &str)] = &[
        (env::API_URL, "http://api:8080"),
        (env::PUBLIC_API_URL, "https://terrakube.example.test"),
        (env::ENABLE_SECURITY, "false"),
    ];

    fn args(more: &[(&str, &str)]) -> PlatformArgs {
        from_variables(&[USUAL, more].concat())
    }

    #[test]
    fn an_address_is_all_it_needs_and_without_one_nothing_is_read() {
        let mut reader = Reader::default();
        let settings = args(&[]).resolve(&mut reader, None).unwrap();
        assert!(reader.problems.is_empty(), "{:?}", reader.problems);
        assert!(settings.redis.is_none() && settings.outputs.is_none());
        let nowhere = args(&[(env::API_URL, ""), (env::REDIS_PORT, "no port")]);
        assert!(nowhere.resolve(&mut reader, None).is_none());
        assert!(reader.problems.is_empty(), "{:?}", reader.problems);
    }

    #[test]
    fn problems_of_all_its_parts_are_told_at_once() {
        let wrong = args(&[
            (env::ENABLE_SECURITY, ""),
            (env::REDIS_HOSTNAME, "redis"),
            (env::REDIS_PORT, "no port"),
            (env::STATE_TYPE, "AwsTerraformStateImpl"),
            (env::AWS_REGION, "eu-central-1"),
            (env::AWS_ENABLE_ROLE_AUTH, "true"),
        ]);
        let mut reader = Reader::default();
        assert!(wrong.resolve(&mut reader, None).is_none());
        let names: Vec<_> = reader
            .problems
            .iter()
            .map(|problem| problem.variable.as_str())
            .collect();
        assert_eq!(
            names,
            [env::INTERNAL_SECRET, env::REDIS_PORT, env::AWS_BUCKET]
        );
    }
}
