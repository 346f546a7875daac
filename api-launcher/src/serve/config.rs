//! The options of `api-launcher serve`. The parts of the service define their own options beside what they
//! configure; this module composes them. It finds every error before it reports any.

use std::net::SocketAddr;
use std::time::Duration;

use clap::Args;
use cluster::settings::KubernetesArgs;
use data_dir::DataDirArgs;
use http_service::diagnostics::TelemetryArgs;
use hub::settings::{HubArgs, HubSettings};
use job_contract::{Records, env};
use reporter::settings::PlatformArgs;
use runtime::setting::{ReadSetting as _, Setting, SettingError, SettingValue, choice};

use crate::dispatch::route::Routing;
use crate::dispatch::route::settings::RoutingArgs;
use crate::http::settings::{HttpArgs, HttpSettings};
use crate::kubernetes::dispatch_target::settings::KubernetesSettings;
use crate::serve::machine::settings::{MachineArgs, MachineSettings};

/// Less than the 30 s Kubernetes gives a pod by default.
const SHUTDOWN_SECONDS: u64 = 25;
/// About as long as every node of a cluster takes to learn that an endpoint is gone.
const DRAIN_SECONDS: u64 = 10;

/// Accept dispatches from Terrakube over HTTP and run them.
///
/// Serves `POST /api/v1/terraform-rs`, the address Terrakube gives its jobs to: path included in
/// `AzBuilderExecutorUrl`, while Terrakube adds the path to an agent's URL and to `TERRAKUBE_DEFAULT_EXECUTOR`. A
/// dispatch is answered 202 as soon as it is safe on disk, and runs once however often it is delivered. Health is at
/// /actuator/health, metrics are at /metrics, or on the port of --health-listen.
///
/// Requests must carry the platform's token, signed with the secret in the environment variable `InternalSecret`, or in the file
/// that `InternalSecretFile` names.
#[derive(Args, Clone, Debug, Default)]
#[command(after_help = EXAMPLES)]
pub struct ServeArgs {
    #[command(flatten)]
    pub http: HttpArgs,

    /// Where accepted steps run: `kubernetes`, as Jobs, `process`, as executors on this machine, or `none`, with the agents
    /// of pools alone [default: kubernetes]
    #[arg(long, value_name = "TARGET", env = env::TARGET)]
    pub target: Option<Setting<TargetName>>,

    #[command(flatten)]
    pub data: DataDirArgs,

    /// Seconds after SIGTERM in which dispatches are still accepted although the launcher is not ready, so that the
    /// endpoints can be updated.
    /// If it is not set, it is at most half of --shutdown-seconds, and 0 on target `process` [default: 10]
    #[arg(long, value_name = "SECONDS", env = env::DRAIN_SECONDS)]
    pub drain_seconds: Option<Setting<u64>>,

    /// How long stopping may take in all, in seconds [default: 25]
    #[arg(long, value_name = "SECONDS", env = env::SHUTDOWN_SECONDS)]
    pub shutdown_seconds: Option<Setting<u64>>,

    #[command(flatten)]
    pub machine: MachineArgs,

    #[command(flatten)]
    pub routing: RoutingArgs,

    #[command(flatten)]
    pub platform: PlatformArgs,

    #[command(flatten)]
    pub telemetry: TelemetryArgs,

    #[command(flatten)]
    pub kubernetes: KubernetesArgs,

    #[command(flatten)]
    pub hub: HubArgs,
}

const EXAMPLES: &str = "\
Examples:
  InternalSecret=… api-launcher serve --data-dir /var/lib/mayfly
  api-launcher serve --target process --allow-unauthenticated         to try it out
  MAYFLY_ROUTE=flag MAYFLY_PERSISTENT_EXECUTOR_URL=http://executor:8090/api/v1/terraform-rs \\
      InternalSecret=… api-launcher serve

Secrets are given by the environment and are no options, because every user of a machine can read command lines:
InternalSecret, TerrakubeRedisPassword, TerrakubeRedisSentinelPassword, MAYFLY_POOL_STORE, MAYFLY_JOB_TOKEN_KEYS and the keys
of the artifact store.

SIGTERM ends readiness, stops accepting after the endpoints had time to be updated, finishes open requests, and keeps
what is queued for the next start; a second SIGTERM ends the process at once.";

#[derive(Debug)]
pub(crate) enum TargetSettings {
    Kubernetes(Box<KubernetesSettings>),
    Process(Box<MachineSettings>),
    None,
}

/// Where accepted steps run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetName {
    Kubernetes,
    Process,
    /// This launcher runs nothing itself.
    None,
}

impl SettingValue for TargetName {
    fn parse(text: &str) -> Result<Self, String> {
        let words = [
            ("kubernetes", Self::Kubernetes),
            ("process", Self::Process),
            ("none", Self::None),
        ];
        choice(text, &words)
    }
}

#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) http: HttpSettings,
    pub(crate) target: TargetSettings,
    pub(crate) hub: Option<Box<HubSettings>>,
    /// A file of pools has tokens that show the status page.
    pub(crate) has_pools_file: bool,
    pub(crate) routing: Routing,
    /// How long the service accepts dispatches after SIGTERM.
    pub(crate) drain: Duration,
    /// How long stopping may take, the drain included.
    pub(crate) shutdown: Duration,
}

impl ServeArgs {
    /// Returns the settings, or everything that is invalid. `secret` is the text of `InternalSecret`.
    pub(crate) fn resolve(&self, secret: Option<&str>) -> Result<Settings, Vec<SettingError>> {
        let errors = &mut Vec::new();
        let target = self.target.read(errors);
        let target = target.unwrap_or(TargetName::Kubernetes);
        let http = self.http.resolve(errors, secret);
        if let (TargetName::Process, SocketAddr::V6(address)) = (target, http.listen)
            && address.scope_id() != 0
        {
            let text =
                format!("is `{address}`, but target `process` needs an address without a zone");
            errors.push(SettingError::new(env::LISTEN, text));
        }
        let (drain, shutdown) = self.resolve_stopping(errors, target);
        let target = match target {
            TargetName::Kubernetes => {
                KubernetesSettings::resolve(&self.kubernetes, errors, &self.data, &self.platform)
                    .map(|settings| TargetSettings::Kubernetes(Box::new(settings)))
            }
            TargetName::Process => self
                .machine
                .resolve(errors, &self.data, self.platform.terrakube.is_set())
                .map(|settings| TargetSettings::Process(Box::new(settings))),
            TargetName::None => {
                if self.hub.pools.is_none() {
                    let text = format!("is not set, but {} is `none`", env::TARGET);
                    errors.push(SettingError::new(env::POOLS_FILE, text));
                }
                Some(TargetSettings::None)
            }
        };
        // The target `kubernetes` says what is wrong with it.
        let records = self.kubernetes.deployment.records.get();
        let shared = records.is_some_and(|setting| setting.0 == Some(Records::Shared));
        let own = match &target {
            Some(TargetSettings::Process(machine)) => Some(machine.pool.clone()),
            _ => None,
        };
        let hub = self
            .hub
            .resolve(errors, &self.data, &self.platform, shared, own);
        let routing = self.routing.resolve(errors);
        match (target, routing) {
            (Some(target), Some(routing)) if errors.is_empty() => Ok(Settings {
                http,
                target,
                hub: hub.map(Box::new),
                has_pools_file: self.hub.pools.is_some(),
                routing,
                drain,
                shutdown,
            }),
            _ => Err(without_repetitions(errors)),
        }
    }

    /// How long dispatches are still accepted, and how long stopping may take in all.
    fn resolve_stopping(
        &self,
        errors: &mut Vec<SettingError>,
        target: TargetName,
    ) -> (Duration, Duration) {
        let drain = self.drain_seconds.read(errors);
        let all = self.shutdown_seconds.read(errors);
        let all = all.unwrap_or(SHUTDOWN_SECONDS);
        if let Some(drain) = drain.filter(|drain| *drain > 0 && *drain >= all) {
            let text = format!(
                "is `{drain}`, which leaves open requests no time: {} is {all}",
                env::SHUTDOWN_SECONDS
            );
            errors.push(SettingError::new(env::DRAIN_SECONDS, text));
        }
        let drain = drain.unwrap_or(match target {
            TargetName::Kubernetes | TargetName::None => DRAIN_SECONDS.min(all / 2),
            // No other launcher serves from its data directory.
            TargetName::Process => 0,
        });
        (Duration::from_secs(drain), Duration::from_secs(all))
    }
}

/// Target and hub both read the settings of the platform, so they report the same errors.
fn without_repetitions(errors: &[SettingError]) -> Vec<SettingError> {
    let mut distinct: Vec<SettingError> = Vec::new();
    for error in errors {
        if !distinct.contains(error) {
            distinct.push(error.clone());
        }
    }
    distinct
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use runtime::setting::from_variables;

    const SECRET: &str = "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=";

    #[rstest]
    #[case("1", true)]
    #[case("1000", true)]
    #[case("1001", false)]
    #[case("99999999999", false)]
    fn a_machine_runs_as_many_executors_as_its_hub_has_connections_for(
        #[case] concurrency: &str,
        #[case] is_possible: bool,
    ) {
        let args: ServeArgs =
            from_variables(&[(env::TARGET, "process"), (env::CONCURRENCY, concurrency)]);
        let settings = args.resolve(Some(SECRET));
        assert_eq!(settings.is_ok(), is_possible);
        if let Err(errors) = settings {
            assert_eq!(errors[0].variable, env::CONCURRENCY);
            assert!(errors[0].text.contains("from 1 to 1000"), "{}", errors[0]);
        }
    }

    #[test]
    fn a_secret_is_all_it_needs() {
        let settings = ServeArgs::default().resolve(Some(SECRET)).unwrap();
        assert_eq!(settings.http.listen.to_string(), "0.0.0.0:8090");
        assert!(settings.http.secret.is_some());
        assert!(matches!(settings.routing, Routing::All));
    }

    #[test]
    fn all_errors_are_reported_at_once_with_their_names() {
        let args: ServeArgs = from_variables(&[
            (env::LISTEN, "nowhere"),
            (env::HEALTH_LISTEN, "8091"),
            (env::TARGET, "process"),
            (env::SHUTDOWN_SECONDS, "soon"),
            (env::CONCURRENCY, "0"),
            (env::RUNS_ON_STOP, "explode"),
            (env::EXECUTOR, "/etc/passwd"),
            (env::ROUTE, "flag"),
            (env::PERSISTENT_EXECUTOR_URL, "ftp://executor"),
        ]);
        let errors = args.resolve(Some("hunter2")).unwrap_err();
        let mut names: Vec<_> = errors.iter().map(|error| error.variable.as_str()).collect();
        names.sort_unstable();
        assert_eq!(
            names,
            [
                "InternalSecret",
                "MAYFLY_CONCURRENCY",
                "MAYFLY_EXECUTOR",
                "MAYFLY_HEALTH_LISTEN",
                "MAYFLY_LISTEN",
                "MAYFLY_PERSISTENT_EXECUTOR_URL",
                "MAYFLY_RUNS_ON_STOP",
                "MAYFLY_SHUTDOWN_SECONDS",
            ]
        );
        let all: String = errors.iter().map(ToString::to_string).collect();
        assert!(!all.contains("hunter2"), "{all}");
    }

    #[rstest]
    #[case("true", None, "127.0.0.1:8090")]
    #[case("true", Some("[::1]:0"), "[::1]:0")]
    #[case("everywhere", None, "0.0.0.0:8090")]
    #[case("everywhere", Some("10.0.0.1:80"), "10.0.0.1:80")]
    fn without_a_secret_it_listens_on_the_configured_address(
        #[case] open: &str,
        #[case] listen: Option<&str>,
        #[case] expected: &str,
    ) {
        let args: ServeArgs = from_variables(&[
            (env::ALLOW_UNAUTHENTICATED, open),
            (env::LISTEN, listen.unwrap_or_default()),
        ]);
        let settings = args.resolve(None).unwrap();
        assert_eq!(settings.http.listen.to_string(), expected);
        assert!(settings.http.secret.is_none());
    }

    #[test]
    fn without_a_secret_other_machines_are_kept_out_unless_forced() {
        let args: ServeArgs = from_variables(&[
            (env::ALLOW_UNAUTHENTICATED, "true"),
            (env::LISTEN, "0.0.0.0:8090"),
        ]);
        let errors = args.resolve(None).unwrap_err();
        assert_eq!(errors[0].variable, "MAYFLY_ALLOW_UNAUTHENTICATED");
    }

    #[test]
    fn a_target_brings_its_own_settings_and_errors() {
        let args = |target| -> ServeArgs {
            from_variables(&[(env::TARGET, target), (env::IMAGE_PULL_POLICY, "Sometimes")])
        };
        let errors = args("moon").resolve(Some(SECRET)).unwrap_err();
        let names: Vec<_> = errors.iter().map(|p| p.variable.as_str()).collect();
        assert_eq!(names, ["MAYFLY_TARGET", "MAYFLY_IMAGE_PULL_POLICY"]);
        let settings = args("process").resolve(Some(SECRET)).unwrap();
        assert!(matches!(settings.target, TargetSettings::Process(_)));
    }

    #[rstest]
    #[case("kubernetes", None, None, 10, 25)]
    #[case("kubernetes", None, Some("12"), 6, 12)]
    #[case("kubernetes", Some("20"), Some("60"), 20, 60)]
    #[case("kubernetes", Some("0"), Some("0"), 0, 0)]
    #[case("process", None, None, 0, 25)]
    fn who_has_others_beside_it_drains_before_it_stops(
        #[case] target: &str,
        #[case] drain: Option<&str>,
        #[case] shutdown: Option<&str>,
        #[case] drains: u64,
        #[case] stops: u64,
    ) {
        let args: ServeArgs = from_variables(&[
            (env::TARGET, target),
            (env::DRAIN_SECONDS, drain.unwrap_or_default()),
            (env::SHUTDOWN_SECONDS, shutdown.unwrap_or_default()),
        ]);
        let settings = args.resolve(Some(SECRET)).unwrap();
        assert_eq!(settings.drain, Duration::from_secs(drains));
        assert_eq!(settings.shutdown, Duration::from_secs(stops));
    }

    #[test]
    fn a_drain_that_leaves_no_time_for_open_requests_is_refused() {
        let args: ServeArgs = from_variables(&[(env::DRAIN_SECONDS, "25")]);
        let errors = args.resolve(Some(SECRET)).unwrap_err();
        assert_eq!(errors[0].variable, "MAYFLY_DRAIN_SECONDS");
        assert!(
            errors[0].text.contains("MAYFLY_SHUTDOWN_SECONDS is 25"),
            "{}",
            errors[0]
        );
    }

    #[test]
    fn an_address_with_a_zone_is_refused_where_the_launcher_is_its_own_client() {
        let args = |target| -> ServeArgs {
            from_variables(&[(env::TARGET, target), (env::LISTEN, "[fe80::1%1]:0")])
        };
        let errors = args("process").resolve(Some(SECRET)).unwrap_err();
        assert_eq!(errors[0].variable, "MAYFLY_LISTEN");
        assert!(args("kubernetes").resolve(Some(SECRET)).is_ok());
    }

    #[test]
    fn a_launcher_without_a_target_needs_pools() {
        let args: ServeArgs = from_variables(&[(env::TARGET, "none")]);
        let errors = args.resolve(Some(SECRET)).unwrap_err();
        assert_eq!(errors[0].variable, "MAYFLY_POOLS_FILE");
    }

    #[test]
    fn a_problem_that_target_and_hub_have_is_told_once() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("pools.yaml");
        std::fs::write(&file, "pools: {eu: {organizations: [a]}}").unwrap();
        let mut args: ServeArgs = from_variables(&[
            (env::TARGET, "process"),
            (env::API_URL, "http://api:8080"),
            (env::INTERNAL_SECRET, SECRET),
        ]);
        args.hub.pools = Some(file);
        let errors = args.resolve(Some(SECRET)).unwrap_err();
        let names: Vec<_> = errors.iter().map(|p| p.variable.as_str()).collect();
        assert_eq!(names, ["TerrakubeApiUrl"]);
    }

    #[test]
    fn routing_by_flag_needs_a_persistent_executor() {
        let args: ServeArgs = from_variables(&[(env::ROUTE, "flag")]);
        let errors = args.resolve(Some(SECRET)).unwrap_err();
        assert_eq!(errors[0].variable, "MAYFLY_PERSISTENT_EXECUTOR_URL");
    }
}
