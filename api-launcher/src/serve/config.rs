//! The options of `api-launcher serve` and what they come to. All problems are found before any is reported,
//! each named by its variable.

mod platform;
mod watching;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueHint};
use job_contract::env;
use runtime::setting::present;
use runtime::telemetry::LogFormat;
use tracing_subscriber::EnvFilter;
use url::Url;

use crate::config::{Deployment, DeploymentArgs};
use crate::dispatch::process::{ProcessSettings, RunsOnStop};
use crate::dispatch::route::{Fallback, Flag, Routing};
use crate::http::InternalSecret;
use crate::run::data::DataDir;
use crate::run::executor::Program;
use crate::settings::{InvalidSetting, SettingsReader};

pub use self::platform::PlatformArgs;
pub(crate) use self::platform::{PlatformSettings, PlatformSetupError};
pub use self::watching::WatchArgs;
pub(crate) use self::watching::Watching;

/// Port of a stock executor.
const PORT: u16 = 8090;
/// Less than the 30 s Kubernetes gives a pod by default.
const SHUTDOWN_SECONDS: u64 = 25;
/// About as long as every node of a cluster takes to learn that an endpoint is gone.
const DRAIN_SECONDS: u64 = 10;

/// Accept dispatches from Terrakube over HTTP and run them.
///
/// Serves `POST /api/v1/terraform-rs`, the address Terrakube gives its jobs to: path included in
/// `AzBuilderExecutorUrl`, while Terrakube adds the path to an agent's URL and to `TERRAKUBE_DEFAULT_EXECUTOR`. A
/// dispatch is answered 202 as soon as it is safe on disk, and runs once however often it is delivered. Health is at
/// /actuator/health, metrics are at /metrics.
///
/// Requests must carry the platform's token, signed with the secret in the environment variable `InternalSecret`.
#[derive(Args, Clone, Debug, Default)]
#[command(after_help = EXAMPLES)]
pub struct ServeArgs {
    /// Address to listen on; port 0 takes a free one, which the first line of the log tells
    /// [default: 0.0.0.0:8090, without authentication 127.0.0.1:8090]
    #[arg(long, value_name = "ADDRESS:PORT", env = env::LISTEN)]
    pub listen: Option<String>,

    /// Where accepted steps run: `kubernetes`, as Jobs, or `process`, as executors on this machine
    /// [default: kubernetes]
    #[arg(long, value_name = "TARGET", env = env::TARGET)]
    pub target: Option<String>,

    /// Accept dispatches without a token: `true` on a loopback address only, `everywhere` on any address
    /// [default: false]
    #[arg(long, value_name = "WHERE", env = env::ALLOW_UNAUTHENTICATED, num_args = 0..=1, default_missing_value = "true")]
    pub allow_unauthenticated: Option<String>,

    /// After SIGTERM, how long dispatches are still accepted while readiness says no, in seconds, for the endpoints to follow.
    /// Unset, it is at most half of --shutdown-seconds, and 0 on target `process` [default: 10]
    #[arg(long, value_name = "SECONDS", env = env::DRAIN_SECONDS)]
    pub drain_seconds: Option<String>,

    /// How long stopping may take in all, in seconds [default: 25]
    #[arg(long, value_name = "SECONDS", env = env::SHUTDOWN_SECONDS)]
    pub shutdown_seconds: Option<String>,

    #[command(flatten)]
    pub process: ProcessArgs,

    #[command(flatten)]
    pub routing: RoutingArgs,

    #[command(flatten)]
    pub platform: PlatformArgs,

    #[command(flatten)]
    pub telemetry: TelemetryArgs,

    #[command(flatten)]
    pub watching: WatchArgs,

    #[command(flatten)]
    pub deployment: DeploymentArgs,
}

#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Target `process`")]
pub struct ProcessArgs {
    /// Where the queue, state, plans, outputs and downloaded tools are kept [default: `mayfly` in your data
    /// folder]
    #[arg(long, value_name = "DIR", env = env::DATA_DIR, value_hint = ValueHint::DirPath)]
    pub data_dir: Option<PathBuf>,

    /// How many executors run at a time; the rest wait, oldest first [default: one per processor]
    #[arg(long, value_name = "N", env = env::CONCURRENCY)]
    pub concurrency: Option<String>,

    /// What happens to running executors when the launcher stops: `interrupt` asks them to finish gracefully,
    /// `leave` lets them go on and finds them again at the next start [default: interrupt]
    #[arg(long, value_name = "WHAT", env = env::RUNS_ON_STOP)]
    pub runs_on_stop: Option<String>,

    /// Another executor binary than the built-in one
    #[arg(long, value_name = "PATH", env = env::EXECUTOR, value_hint = ValueHint::ExecutablePath)]
    pub executor: Option<PathBuf>,
}

#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Routing")]
pub struct RoutingArgs {
    /// `all` runs every dispatch, `flag` only those of workspaces with
    /// `TERRAKUBE_ENABLE_EPHEMERAL_EXECUTOR` in their environment; the others go to the persistent executor [default: all]
    #[arg(long, value_name = "WHICH", env = env::ROUTE)]
    pub route: Option<String>,

    /// `true` reads a flag of 0, false or off as absent [default: false]
    #[arg(long, value_name = "BOOL", env = env::ROUTE_STRICT, num_args = 0..=1, default_missing_value = "true")]
    pub route_strict: Option<String>,

    /// The persistent executor, its path included: `http://executor:8090/api/v1/terraform-rs`
    #[arg(long, value_name = "URL", env = env::PERSISTENT_EXECUTOR_URL)]
    pub persistent_executor_url: Option<String>,
}

#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Diagnostics")]
pub struct TelemetryArgs {
    /// `json` or `text` [default: text on a terminal, else json]
    #[arg(long, value_name = "FORMAT", env = env::LOG_FORMAT)]
    pub log_format: Option<String>,

    /// What is logged, as `tracing` directives [default: info]
    #[arg(long, value_name = "FILTER", env = env::LOG_FILTER)]
    pub log_filter: Option<String>,
}

const EXAMPLES: &str = "\
Examples:
  InternalSecret=… api-launcher serve --data-dir /var/lib/mayfly
  api-launcher serve --allow-unauthenticated --listen 127.0.0.1:0     to try it out
  MAYFLY_ROUTE=flag MAYFLY_PERSISTENT_EXECUTOR_URL=http://executor:8090/api/v1/terraform-rs \\
      InternalSecret=… api-launcher serve

Secrets are given by the environment and are no options, because command lines are open to everybody:
InternalSecret, TerrakubeRedisPassword, TerrakubeRedisSentinelPassword and the keys of the artifact store.

SIGTERM ends readiness, stops accepting when the endpoints have had time to follow, finishes open requests, and keeps
what is queued for the next start; a second one leaves at once.";

/// Where accepted steps run.
#[derive(Debug)]
pub(crate) enum TargetSettings {
    Kubernetes {
        deployment: Box<Deployment>,
        watching: Box<Watching>,
        /// The platform runs are reported to.
        platform: Option<Box<PlatformSettings>>,
        /// Without it: records of the local platform.
        data_dir: Option<PathBuf>,
    },
    Process(ProcessSettings),
}

#[derive(Clone, Copy)]
enum TargetName {
    Kubernetes,
    Process,
}

/// The settings of the service.
#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) listen: SocketAddr,
    /// `None` lets everybody in.
    pub(crate) secret: Option<InternalSecret>,
    pub(crate) target: TargetSettings,
    pub(crate) routing: Routing,
    /// How long dispatches are accepted after SIGTERM.
    pub(crate) drain: Duration,
    /// How long stopping may take, the drain included.
    pub(crate) shutdown: Duration,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Unauthenticated {
    No,
    Loopback,
    Everywhere,
}

impl TelemetryArgs {
    /// Format and filter, with what is wrong about them.
    pub(crate) fn resolve(&self) -> Result<(LogFormat, EnvFilter), Vec<InvalidSetting>> {
        let mut reader = SettingsReader::default();
        let format = reader.choose(
            env::LOG_FORMAT,
            self.log_format.as_deref(),
            &[
                ("auto", LogFormat::detect()),
                ("json", LogFormat::Json),
                ("text", LogFormat::Text),
            ],
        );
        let directives = present(self.log_filter.as_deref()).unwrap_or("info");
        let filter = EnvFilter::try_new(directives);
        if filter.is_err() {
            reader.reject(env::LOG_FILTER, "holds no `tracing` directives");
        }
        match filter {
            Ok(filter) if reader.invalid.is_empty() => Ok((format, filter)),
            _ => Err(reader.invalid),
        }
    }
}

impl ServeArgs {
    /// The settings, or everything that is wrong. `secret` is the text of `InternalSecret`.
    pub(crate) fn resolve(&self, secret: Option<&str>) -> Result<Settings, Vec<InvalidSetting>> {
        let mut reader = SettingsReader::default();
        let target = reader.choose(
            env::TARGET,
            self.target.as_deref(),
            &[
                ("kubernetes", TargetName::Kubernetes),
                ("process", TargetName::Process),
            ],
        );
        let open = reader.choose(
            env::ALLOW_UNAUTHENTICATED,
            self.allow_unauthenticated.as_deref(),
            &[
                ("false", Unauthenticated::No),
                ("true", Unauthenticated::Loopback),
                ("everywhere", Unauthenticated::Everywhere),
            ],
        );
        let secret = resolve_secret(&mut reader, secret, open);
        let listen = self.resolve_listen(&mut reader, open);
        let (drain, shutdown) = self.resolve_stopping(&mut reader, target);
        let target = match target {
            TargetName::Kubernetes => self.resolve_deployment(&mut reader),
            TargetName::Process => self
                .resolve_process(&mut reader)
                .map(TargetSettings::Process),
        };
        let routing = self.routing.resolve(&mut reader);
        match (target, routing) {
            (Some(target), Some(routing)) if reader.invalid.is_empty() => Ok(Settings {
                listen,
                secret,
                target,
                routing,
                drain,
                shutdown,
            }),
            _ => Err(reader.invalid),
        }
    }

    /// How long dispatches are still accepted, and how long stopping may take in all.
    fn resolve_stopping(
        &self,
        reader: &mut SettingsReader,
        target: TargetName,
    ) -> (Duration, Duration) {
        let mut seconds = |variable, text: &Option<String>| {
            reader.parse(variable, text.as_deref(), "a number of seconds")
        };
        let drain: Option<u64> = seconds(env::DRAIN_SECONDS, &self.drain_seconds);
        let all =
            seconds(env::SHUTDOWN_SECONDS, &self.shutdown_seconds).unwrap_or(SHUTDOWN_SECONDS);
        if let Some(drain) = drain.filter(|drain| *drain > 0 && *drain >= all) {
            reader.reject(
                env::DRAIN_SECONDS,
                format!(
                    "is `{drain}`, which leaves open requests no time: {} is {all}",
                    env::SHUTDOWN_SECONDS
                ),
            );
        }
        let drain = drain.unwrap_or(match target {
            TargetName::Kubernetes => DRAIN_SECONDS.min(all / 2),
            // It is alone with its data directory: nobody could follow to another.
            TargetName::Process => 0,
        });
        (Duration::from_secs(drain), Duration::from_secs(all))
    }

    fn resolve_process(&self, reader: &mut SettingsReader) -> Option<ProcessSettings> {
        let settings = self.process.resolve(reader);
        let data_dir = settings.as_ref().map(|settings| settings.data.path());
        let platform = self.platform.resolve(reader, data_dir);
        Some(ProcessSettings {
            platform: platform.map(Box::new),
            ..settings?
        })
    }

    fn resolve_deployment(&self, reader: &mut SettingsReader) -> Option<TargetSettings> {
        let watching = self.watching.resolve(reader);
        let data_dir = self.process.data_dir.clone();
        let platform = self.platform.resolve(reader, data_dir.as_deref());
        match self
            .deployment
            .resolve(self.platform.terrakube.api_url.as_deref())
        {
            Ok(deployment) => Some(TargetSettings::Kubernetes {
                deployment: Box::new(deployment),
                watching: Box::new(watching),
                platform: platform.map(Box::new),
                data_dir,
            }),
            Err(problems) => {
                reader
                    .invalid
                    .extend(problems.iter().map(InvalidSetting::from));
                None
            }
        }
    }

    fn resolve_listen(&self, reader: &mut SettingsReader, open: Unauthenticated) -> SocketAddr {
        let ip = match open {
            Unauthenticated::Loopback => Ipv4Addr::LOCALHOST,
            _ => Ipv4Addr::UNSPECIFIED,
        };
        let listen = reader
            .parse(
                env::LISTEN,
                self.listen.as_deref(),
                "an IP address and a port such as `0.0.0.0:8090`",
            )
            .unwrap_or(SocketAddr::new(IpAddr::V4(ip), PORT));
        if open == Unauthenticated::Loopback && !listen.ip().is_loopback() {
            reader.reject(
                env::ALLOW_UNAUTHENTICATED,
                format!(
                    "is `true`, which is for loopback addresses, but {} is `{listen}`; \
                     `everywhere` lets anybody who reaches it run commands",
                    env::LISTEN
                ),
            );
        }
        listen
    }
}

fn resolve_secret(
    reader: &mut SettingsReader,
    secret: Option<&str>,
    open: Unauthenticated,
) -> Option<InternalSecret> {
    if open != Unauthenticated::No {
        return None;
    }
    match present(secret).map(InternalSecret::parse) {
        Some(Ok(secret)) => return Some(secret),
        Some(Err(error)) => reader.reject(env::INTERNAL_SECRET, error.to_string()),
        None => reader.reject(
            env::INTERNAL_SECRET,
            format!(
                "is not set; it is the secret shared with the platform (without one, {}=true is for trying out)",
                env::ALLOW_UNAUTHENTICATED
            ),
        ),
    }
    None
}

impl ProcessArgs {
    fn resolve(&self, reader: &mut SettingsReader) -> Option<ProcessSettings> {
        let concurrency: Option<NonZeroUsize> = reader.parse(
            env::CONCURRENCY,
            self.concurrency.as_deref(),
            "a number from 1",
        );
        let on_stop = reader.choose(
            env::RUNS_ON_STOP,
            self.runs_on_stop.as_deref(),
            &[
                ("interrupt", RunsOnStop::Interrupt),
                ("leave", RunsOnStop::Leave),
            ],
        );
        let data = DataDir::locate(self.data_dir.as_deref())
            .map_err(|error| reader.reject(env::DATA_DIR, format!("is needed: {error}")));
        if let Some(path) = self
            .executor
            .as_deref()
            .filter(|path| which::which(path).is_err())
        {
            let path = path.display();
            reader.reject(
                env::EXECUTOR,
                format!("is `{path}`, which is no program that can be started"),
            );
        }
        let program = Program::choose(self.executor.as_deref())
            .map_err(|error| reader.reject(env::EXECUTOR, format!("is needed: {error}")));
        Some(ProcessSettings {
            data: data.ok()?,
            program: program.ok()?,
            concurrency: concurrency
                .or_else(|| std::thread::available_parallelism().ok())
                .map_or(1, NonZeroUsize::get),
            on_stop,
            platform: None,
        })
    }
}

impl RoutingArgs {
    fn resolve(&self, reader: &mut SettingsReader) -> Option<Routing> {
        let by_flag = reader.choose(
            env::ROUTE,
            self.route.as_deref(),
            &[("all", false), ("flag", true)],
        );
        let flag = reader.choose(
            env::ROUTE_STRICT,
            self.route_strict.as_deref(),
            &[("false", Flag::Present), ("true", Flag::Strict)],
        );
        let url: Option<Url> = reader.parse(
            env::PERSISTENT_EXECUTOR_URL,
            self.persistent_executor_url.as_deref(),
            "a URL such as `http://executor:8090/api/v1/terraform-rs`",
        );
        let url = url.filter(|url| {
            let fits = matches!(url.scheme(), "http" | "https");
            if !fits {
                reader.reject(
                    env::PERSISTENT_EXECUTOR_URL,
                    "must begin with http:// or https://",
                );
            }
            fits
        });
        if !by_flag {
            return Some(Routing::All);
        }
        let Some(url) = url else {
            if present(self.persistent_executor_url.as_deref()).is_none() {
                reader.reject(
                    env::PERSISTENT_EXECUTOR_URL,
                    format!("is not set, but {} is `flag`", env::ROUTE),
                );
            }
            return None;
        };
        Fallback::new(flag, url)
            .map_err(|error| {
                reader.reject(
                    env::PERSISTENT_EXECUTOR_URL,
                    format!("cannot be used: {error}"),
                );
            })
            .ok()
            .map(Routing::Flag)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    const SECRET: &str = "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=";

    #[test]
    fn a_secret_is_all_it_needs() {
        let settings = ServeArgs::default().resolve(Some(SECRET)).unwrap();
        assert_eq!(settings.listen.to_string(), "0.0.0.0:8090");
        assert!(settings.secret.is_some());
        assert!(matches!(settings.routing, Routing::All));
    }

    #[test]
    fn every_problem_is_told_at_once_and_named() {
        let args = ServeArgs {
            listen: Some("nowhere".to_owned()),
            target: Some("process".to_owned()),
            allow_unauthenticated: None,
            shutdown_seconds: Some("soon".to_owned()),
            process: ProcessArgs {
                concurrency: Some("0".to_owned()),
                runs_on_stop: Some("explode".to_owned()),
                executor: Some("/etc/passwd".into()),
                ..ProcessArgs::default()
            },
            routing: RoutingArgs {
                route: Some("flag".to_owned()),
                route_strict: Some("maybe".to_owned()),
                persistent_executor_url: Some("ftp://executor".to_owned()),
            },
            ..ServeArgs::default()
        };
        let problems = args.resolve(Some("hunter2")).unwrap_err();
        let mut names: Vec<_> = problems
            .iter()
            .map(|problem| problem.variable.as_str())
            .collect();
        names.sort_unstable();
        assert_eq!(
            names,
            [
                "InternalSecret",
                "MAYFLY_CONCURRENCY",
                "MAYFLY_EXECUTOR",
                "MAYFLY_LISTEN",
                "MAYFLY_PERSISTENT_EXECUTOR_URL",
                "MAYFLY_ROUTE_STRICT",
                "MAYFLY_RUNS_ON_STOP",
                "MAYFLY_SHUTDOWN_SECONDS",
            ]
        );
        let all: String = problems.iter().map(ToString::to_string).collect();
        assert!(!all.contains("hunter2"), "{all}");
    }

    #[rstest]
    #[case("true", None, "127.0.0.1:8090")]
    #[case("true", Some("[::1]:0"), "[::1]:0")]
    #[case("everywhere", None, "0.0.0.0:8090")]
    #[case("everywhere", Some("10.0.0.1:80"), "10.0.0.1:80")]
    fn without_a_secret_it_listens_where_it_is_told_to(
        #[case] open: &str,
        #[case] listen: Option<&str>,
        #[case] expected: &str,
    ) {
        let args = ServeArgs {
            allow_unauthenticated: Some(open.to_owned()),
            listen: listen.map(str::to_owned),
            ..ServeArgs::default()
        };
        let settings = args.resolve(None).unwrap();
        assert_eq!(settings.listen.to_string(), expected);
        assert!(settings.secret.is_none());
    }

    #[test]
    fn without_a_secret_other_machines_are_kept_out_unless_forced() {
        let args = ServeArgs {
            allow_unauthenticated: Some("true".to_owned()),
            listen: Some("0.0.0.0:8090".to_owned()),
            ..ServeArgs::default()
        };
        let problems = args.resolve(None).unwrap_err();
        assert_eq!(problems[0].variable, "MAYFLY_ALLOW_UNAUTHENTICATED");
    }

    #[test]
    fn a_target_brings_its_own_settings_and_problems() {
        let mut args = ServeArgs {
            target: Some("moon".to_owned()),
            ..ServeArgs::default()
        };
        args.deployment.image_pull_policy = Some("Sometimes".to_owned());
        let problems = args.resolve(Some(SECRET)).unwrap_err();
        let names: Vec<_> = problems.iter().map(|p| p.variable.as_str()).collect();
        assert_eq!(names, ["MAYFLY_TARGET", "MAYFLY_IMAGE_PULL_POLICY"]);
        args.target = Some("process".to_owned());
        let settings = args.resolve(Some(SECRET)).unwrap();
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
        let args = ServeArgs {
            target: Some(target.to_owned()),
            drain_seconds: drain.map(str::to_owned),
            shutdown_seconds: shutdown.map(str::to_owned),
            ..ServeArgs::default()
        };
        let settings = args.resolve(Some(SECRET)).unwrap();
        assert_eq!(settings.drain, Duration::from_secs(drains));
        assert_eq!(settings.shutdown, Duration::from_secs(stops));
    }

    #[test]
    fn a_drain_that_leaves_no_time_for_open_requests_is_refused() {
        let args = ServeArgs {
            drain_seconds: Some("25".to_owned()),
            ..ServeArgs::default()
        };
        let problems = args.resolve(Some(SECRET)).unwrap_err();
        assert_eq!(problems[0].variable, "MAYFLY_DRAIN_SECONDS");
        assert!(
            problems[0].reason.contains("MAYFLY_SHUTDOWN_SECONDS is 25"),
            "{}",
            problems[0]
        );
    }

    #[test]
    fn routing_by_flag_needs_a_persistent_executor() {
        let mut args = ServeArgs::default();
        args.routing.route = Some("flag".to_owned());
        let problems = args.resolve(Some(SECRET)).unwrap_err();
        assert_eq!(problems[0].variable, "MAYFLY_PERSISTENT_EXECUTOR_URL");
    }
}
