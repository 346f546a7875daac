//! The options of what uses a cluster: a launcher with target `kubernetes`, and an agent.

use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use job_contract::{Records, env};
use manifest::Deployment;
use manifest::fill::FillTemplate;
use manifest::job_data::Mode;
use runtime::setting::{ReadSetting as _, Setting, SettingError, SettingValue, unexpected};
use verdict::Timeouts;

use crate::job_settings::DeploymentArgs;
use crate::watch::{HistoryLimits, WatchSettings};

#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Target `kubernetes`")]
pub struct KubernetesArgs {
    /// How many released Jobs may be unfinished at a time; the rest wait suspended, oldest first; 0 means no limit
    /// [default: 0]
    #[arg(long, value_name = "N", env = env::MAX_JOBS_IN_FLIGHT)]
    pub max_jobs_in_flight: Option<Setting<usize>>,

    /// How many Jobs that completed are kept, beside their time to live, or `all` [default: 10]
    #[arg(long, value_name = "N", env = env::HISTORY_SUCCEEDED)]
    pub history_succeeded: Option<Setting<HistoryLimit>>,

    /// How many Jobs that failed are kept, beside their time to live, or `all` [default: 10]
    #[arg(long, value_name = "N", env = env::HISTORY_FAILED)]
    pub history_failed: Option<Setting<HistoryLimit>>,

    /// A run without a node is given up after this time [default: 900]
    #[arg(long, value_name = "SECONDS", env = env::UNSCHEDULABLE_SECONDS)]
    pub unschedulable_seconds: Option<Setting<u64>>,

    /// A run without its image or its configuration is given up after this time [default: 30]
    #[arg(long, value_name = "SECONDS", env = env::CONTAINER_ERROR_SECONDS)]
    pub container_error_seconds: Option<Setting<u64>>,

    /// A run with a node whose executor has not started is given up after this time [default: 300]
    #[arg(long, value_name = "SECONDS", env = env::START_SECONDS)]
    pub start_seconds: Option<Setting<u64>>,

    #[command(flatten)]
    pub deployment: DeploymentArgs,
}

/// How a launcher or an agent uses the cluster.
#[derive(Clone, Debug, Default)]
pub struct ClusterSettings {
    /// 0: no limit.
    pub max_in_flight: usize,
    pub watch: WatchSettings,
}

impl ClusterSettings {
    /// Has the watcher make the Jobs that fill the store of this deployment, if it has one. `None` if none can be made.
    pub fn fill_for(
        &mut self,
        deployment: &Deployment,
        errors: &mut Vec<SettingError>,
    ) -> Option<()> {
        let template = FillTemplate::of(deployment);
        let template = template.map_err(|wrong| errors.extend(wrong.errors)).ok()?;
        self.watch.fill = template.map(Arc::new);
        Some(())
    }
}

/// A number of Jobs, or `all`.
#[derive(Clone, Copy, Debug)]
pub struct HistoryLimit(Option<usize>);

impl SettingValue for HistoryLimit {
    fn parse(text: &str) -> Result<Self, String> {
        if text.eq_ignore_ascii_case("all") {
            return Ok(Self(None));
        }
        let number = text.parse().map(|number| Self(Some(number)));
        number.map_err(|_| unexpected(text, "a number or `all`"))
    }
}

impl KubernetesArgs {
    /// Returns the settings of an agent. Its executors have a lease of a hub and no secret of the platform.
    pub fn resolve_leased(
        &self,
        hub: Option<&str>,
        errors: &mut Vec<SettingError>,
    ) -> Option<(Deployment, ClusterSettings)> {
        let mut cluster = self.resolve_cluster(errors);
        let mut deployment = self
            .deployment
            .resolve(hub)
            .map_err(|wrong| errors.extend(wrong))
            .ok()?;
        if self.deployment.env_secrets.is_none() {
            deployment.env_secrets.clear();
        }
        // The hub keeps the claims.
        deployment.records = Some(Records::Platform);
        deployment.leased = true;
        errors.extend(manifest::deployment_errors(&deployment));
        if deployment.job_data_mode == Mode::Env {
            let text = "is `env`, but the token of a lease has to be in a Secret";
            errors.push(SettingError::new(env::JOB_DATA_MODE, text));
        }
        cluster.fill_for(&deployment, errors)?;
        Some((deployment, cluster))
    }

    /// Returns how the cluster is used.
    pub fn resolve_cluster(&self, errors: &mut Vec<SettingError>) -> ClusterSettings {
        let default = ClusterSettings::default();
        let (timeouts, history) = (default.watch.timeouts.clone(), default.watch.history);
        let mut seconds = |setting: &Option<Setting<u64>>, default| {
            let seconds = setting.read(errors);
            seconds.map_or(default, Duration::from_secs)
        };
        let timeouts = Timeouts {
            unschedulable: seconds(&self.unschedulable_seconds, timeouts.unschedulable),
            container_error: seconds(&self.container_error_seconds, timeouts.container_error),
            start: seconds(&self.start_seconds, timeouts.start),
            ..timeouts
        };
        let mut limit = |setting: &Option<Setting<HistoryLimit>>, default| {
            let limit = setting.read(errors);
            limit.map_or(default, |HistoryLimit(limit)| limit)
        };
        let history = HistoryLimits {
            successful: limit(&self.history_succeeded, history.successful),
            failed: limit(&self.history_failed, history.failed),
        };
        let max_in_flight = self.max_jobs_in_flight.read(errors);
        ClusterSettings {
            max_in_flight: max_in_flight.unwrap_or(default.max_in_flight),
            watch: WatchSettings {
                timeouts,
                history,
                ..default.watch
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use runtime::setting::from_variables;

    use super::*;

    #[test]
    fn without_options_the_defaults_apply() {
        let mut errors = Vec::new();
        let watching = KubernetesArgs::default().resolve_cluster(&mut errors);
        assert!(errors.is_empty());
        assert_eq!(watching.max_in_flight, 0);
        assert_eq!(watching.watch.timeouts, Timeouts::default());
        let history = watching.watch.history;
        assert_eq!((history.successful, history.failed), (Some(10), Some(10)));
    }

    #[test]
    fn options_replace_the_defaults() {
        let mut errors = Vec::new();
        let args: KubernetesArgs = from_variables(&[
            (env::MAX_JOBS_IN_FLIGHT, "7"),
            (env::HISTORY_SUCCEEDED, "0"),
            (env::HISTORY_FAILED, "50"),
            (env::UNSCHEDULABLE_SECONDS, "3"),
            (env::CONTAINER_ERROR_SECONDS, "4"),
            (env::START_SECONDS, "5"),
        ]);
        let watching = args.resolve_cluster(&mut errors);
        assert!(errors.is_empty(), "{errors:?}");
        assert_eq!(watching.max_in_flight, 7);
        let timeouts = watching.watch.timeouts;
        let seconds = [
            timeouts.unschedulable,
            timeouts.container_error,
            timeouts.start,
        ]
        .map(|time| time.as_secs());
        assert_eq!(seconds, [3, 4, 5]);
        let history = watching.watch.history;
        assert_eq!((history.successful, history.failed), (Some(0), Some(50)));
    }

    #[test]
    fn every_ended_job_can_be_kept_for_its_time_to_live() {
        let mut errors = Vec::new();
        let args: KubernetesArgs = from_variables(&[
            (env::HISTORY_SUCCEEDED, "all"),
            (env::HISTORY_FAILED, "ALL"),
        ]);
        assert_eq!(
            args.resolve_cluster(&mut errors).watch.history,
            HistoryLimits::NONE
        );
        assert!(errors.is_empty(), "{errors:?}");
    }

    #[test]
    fn every_error_names_its_variable() {
        let mut errors = Vec::new();
        let args: KubernetesArgs = from_variables(&[
            (env::MAX_JOBS_IN_FLIGHT, "-1"),
            (env::HISTORY_SUCCEEDED, "few"),
            (env::START_SECONDS, "5m"),
        ]);
        args.resolve_cluster(&mut errors);
        let mut names: Vec<&str> = errors.iter().map(|error| error.variable.as_str()).collect();
        names.sort_unstable();
        assert_eq!(
            names,
            [
                "MAYFLY_HISTORY_SUCCEEDED",
                "MAYFLY_MAX_JOBS_IN_FLIGHT",
                "MAYFLY_START_SECONDS",
            ]
        );
    }
}
