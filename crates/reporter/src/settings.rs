//! The settings of the platform that the launcher reports to: its API, its Redis for heartbeats and live logs, and the store
//! of step outputs. Executors read the same names.

use std::path::Path;
use std::time::Duration;

use artifact_store::{RequestTiming, Store, StoreArgs, StoreError, StoreSettings};
use clap::Args;
use platform::heartbeat::HeartbeatError;
use platform::redis::{Redis, RedisArgs, RedisConfig};
use platform::terrakube::{Terrakube, TerrakubeArgs, TerrakubeConfig, TerrakubeError};
use runtime::setting::SettingError;

use super::TerrakubeReporter;

#[derive(Args, Clone, Debug, Default)]
pub struct PlatformArgs {
    #[command(flatten)]
    pub terrakube: TerrakubeArgs,

    #[command(flatten)]
    pub redis: RedisArgs,

    #[command(flatten)]
    pub store: StoreArgs,
}

/// The settings of the platform.
#[derive(Debug)]
pub struct PlatformSettings {
    terrakube: TerrakubeConfig,
    redis: Option<RedisConfig>,
    outputs: Option<StoreSettings>,
}

/// Why the reporter cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum PlatformSetupError {
    #[error(transparent)]
    Terrakube(#[from] TerrakubeError),
    #[error(transparent)]
    Heartbeat(#[from] HeartbeatError),
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl PlatformArgs {
    /// Returns `None` without an address of the platform's API. The other settings are not read then.
    pub fn resolve(
        &self,
        errors: &mut Vec<SettingError>,
        data_dir: Option<&Path>,
    ) -> Option<PlatformSettings> {
        let terrakube = match self.terrakube.resolve() {
            Ok(None) => return None,
            Ok(terrakube) => terrakube,
            Err(wrong) => {
                errors.extend(wrong);
                None
            }
        };
        // All settings are read before one of them ends this.
        let redis = self.redis.resolve().unwrap_or_else(|wrong| {
            errors.extend(wrong);
            None
        });
        let outputs = self.resolve_outputs(errors, data_dir);
        Some(PlatformSettings {
            terrakube: terrakube?,
            redis,
            outputs,
        })
    }

    /// A store on this machine is the platform's only if a setting names the shared folder.
    fn resolve_outputs(
        &self,
        errors: &mut Vec<SettingError>,
        data_dir: Option<&Path>,
    ) -> Option<StoreSettings> {
        if data_dir.is_none() && self.store.is_local() {
            return None;
        }
        let settings = self.store.resolve(data_dir.unwrap_or(Path::new("")));
        settings.map_err(|error| errors.extend(error.errors)).ok()
    }
}

impl PlatformSettings {
    /// The store of step outputs, if the platform reaches it.
    pub const fn outputs(&self) -> Option<&StoreSettings> {
        self.outputs.as_ref()
    }

    /// Creates the reporter. It sends no request yet.
    pub fn open(self) -> Result<TerrakubeReporter, PlatformSetupError> {
        // A store that fails must not delay other runs: outputs are changed one after the other.
        let timing = RequestTiming {
            retry_for: Duration::from_secs(30),
            ..RequestTiming::default()
        };
        let open = |settings| Store::open_with(settings, &timing);
        let outputs = self.outputs.as_ref().map(open).transpose()?;
        let redis = self.redis.map(Redis::new);
        let terrakube = Terrakube::new(self.terrakube, redis.clone())?;
        Ok(TerrakubeReporter::new(terrakube, outputs, redis)?)
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
        let mut errors = Vec::new();
        let settings = args(&[]).resolve(&mut errors, None).unwrap();
        assert!(errors.is_empty(), "{errors:?}");
        assert!(settings.redis.is_none() && settings.outputs.is_none());
        let nowhere = args(&[(env::API_URL, ""), (env::REDIS_PORT, "no port")]);
        assert!(nowhere.resolve(&mut errors, None).is_none());
        assert!(errors.is_empty(), "{errors:?}");
    }

    #[test]
    fn errors_of_all_its_parts_are_reported_at_once() {
        let wrong = args(&[
            (env::ENABLE_SECURITY, ""),
            (env::REDIS_HOSTNAME, "redis"),
            (env::REDIS_PORT, "no port"),
            (env::STATE_TYPE, "AwsTerraformStateImpl"),
            (env::AWS_REGION, "eu-central-1"),
            (env::AWS_ENABLE_ROLE_AUTH, "true"),
        ]);
        let mut errors = Vec::new();
        assert!(wrong.resolve(&mut errors, None).is_none());
        let names: Vec<_> = errors.iter().map(|error| error.variable.as_str()).collect();
        assert_eq!(
            names,
            [env::INTERNAL_SECRET, env::REDIS_PORT, env::AWS_BUCKET]
        );
    }
}
