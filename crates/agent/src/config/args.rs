//! The options of the agent.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueHint};
use cluster::settings::KubernetesArgs;
use data_dir::DataDir;
use job_contract::env;
use platform::report_key;
use pool_protocol::id::{AgentName, NameError, PoolName};
use processes::environment::Access;
use processes::executor::Program;
use runtime::handover;
use runtime::setting::{
    HttpUrl, ReadSetting as _, Setting, SettingError, SettingValue, choice, present,
};

use super::file::FileValues;
use super::{AgentSettings, Settings, TargetSettings};
use crate::client::AgentToken;
use crate::client::exchange::{Exchange, ExchangeSettings};
use crate::client::token::{self, PoolTokenSource};
use crate::kubernetes::KubernetesSettings;
use crate::process::ProcessSettings;
use crate::stop::StopMode;

const SLOTS: u32 = 25;
const DRAIN_SECONDS: u64 = 3600;
/// Longer than the own grace period of an executor.
const GRACE_SECONDS: u64 = 360;
const TOKEN_SECONDS: u32 = 3600;

/// The settings that options, environment and file share.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct SettingsArgs {
    /// Address of the hub
    #[arg(long, value_name = "URL", env = env::AGENT_SERVICE_URL)]
    service_url: Option<Setting<HttpUrl>>,

    /// File with the token of the pool; it is read again for each call
    #[arg(long, value_name = "FILE", env = env::AGENT_TOKEN_FILE, value_hint = ValueHint::FilePath)]
    token_file: Option<Setting<PathBuf>>,

    /// File with a token of an OpenID provider that the pool trusts, instead of a token of the pool. It is read for each
    /// exchange
    #[arg(long, value_name = "FILE", env = env::AGENT_OIDC_TOKEN_FILE, value_hint = ValueHint::FilePath)]
    oidc_token_file: Option<Setting<PathBuf>>,

    /// Id of an organization of the pool, for the exchange
    #[arg(long, value_name = "ID", env = env::AGENT_ORGANIZATION_NAME)]
    organization_name: Option<Setting<String>>,

    /// Name of the pool, for the exchange
    #[arg(long, value_name = "NAME", env = env::AGENT_RUNNER_POOL_ID)]
    runner_pool_id: Option<Setting<Name<PoolName>>>,

    /// Seconds for which a token of the exchange is good, 43200 at most [default: 3600]
    #[arg(long, value_name = "SECONDS", env = env::AGENT_TOKEN_EXPIRATION)]
    token_expiration: Option<Setting<PositiveNumber>>,

    /// Name of the agent, unique in its pool [default: the name of this host]
    #[arg(long, value_name = "NAME", env = env::AGENT_NAME)]
    name: Option<Setting<Name<AgentName>>>,

    /// How many tasks run at a time [default: 25]
    #[arg(long, value_name = "N", env = env::AGENT_SLOTS)]
    slots: Option<Setting<PositiveNumber>>,

    /// Where executors run: `kubernetes`, as Jobs, or `process`, on this machine [default: kubernetes]
    #[arg(long, value_name = "TARGET", env = env::AGENT_DEPLOY_TARGET)]
    deploy_target: Option<Setting<TargetName>>,

    /// Take one task, and end with it; the exit code is 0 however the run ends, and 1 if the agent fails [default: false]
    #[arg(long, value_name = "BOOL", env = env::AGENT_SINGLE_RUN, num_args = 0..=1, default_missing_value = "true")]
    single_run: Option<Setting<bool>>,

    /// End after so many seconds without a run; 0 means never [default: 0]
    #[arg(long, value_name = "SECONDS", env = env::AGENT_IDLE_TIMEOUT)]
    idle_timeout: Option<Setting<u64>>,

    /// What happens to the runs when the agent stops: `detach`, `drain`, `grace` or `force`
    /// [default: detach on target `kubernetes`, drain on target `process`]
    #[arg(long, value_name = "MODE", env = env::AGENT_ON_STOP)]
    on_stop: Option<Setting<StopMode>>,

    /// How long `drain` waits before `grace` [default: 3600]
    #[arg(long, value_name = "SECONDS", env = env::AGENT_DRAIN_TIMEOUT)]
    drain_timeout: Option<Setting<u64>>,

    /// How long `grace` waits before `force`; executors take up to 300 s by default [default: 360]
    #[arg(long, value_name = "SECONDS", env = env::AGENT_GRACE_TIMEOUT)]
    grace_timeout: Option<Setting<u64>>,

    /// Whether a stopped agent leaves the list of the pool at once, instead of going offline [default: true]
    #[arg(long, value_name = "BOOL", env = env::AGENT_DISCONNECT_ON_STOP)]
    disconnect_on_stop: Option<Setting<bool>>,

    /// Names of variables of the agent's environment that executors, tools and scripts get, separated by blanks
    /// [default: none]
    #[arg(long, value_name = "NAMES", env = env::AGENT_ENV_FORWARD_ALLOWLIST)]
    env_forward_allowlist: Option<Setting<VariableNames>>,

    /// Where target `process` keeps the files of its runs, and its executors their tools
    /// [default: `mayfly` in your data folder]
    #[arg(long, value_name = "DIR", env = env::AGENT_WORKING_DIRECTORY, value_hint = ValueHint::DirPath)]
    working_directory: Option<Setting<PathBuf>>,

    /// Another executor binary than the built-in one, for target `process`
    #[arg(long, value_name = "PATH", env = env::EXECUTOR, value_hint = ValueHint::ExecutablePath)]
    executor: Option<Setting<PathBuf>>,

    /// Address where `/healthz` and `/readyz` are answered [default: none]
    #[arg(long, value_name = "ADDRESS:PORT", env = env::AGENT_LISTEN)]
    listen: Option<Setting<SocketAddr>>,
}

/// The name of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TargetName {
    Kubernetes,
    Process,
}

impl SettingValue for TargetName {
    fn parse(text: &str) -> Result<Self, String> {
        let words = [("kubernetes", Self::Kubernetes), ("process", Self::Process)];
        choice(text, &words)
    }
}

/// The name of an agent or a pool.
#[derive(Clone, Debug)]
struct Name<N>(N);

impl<N> SettingValue for Name<N>
where
    N: FromStr<Err = NameError> + Clone + Send + Sync + 'static,
{
    fn parse(text: &str) -> Result<Self, String> {
        let name = text.parse().map(Self);
        name.map_err(|error| format!("cannot be used: {error}"))
    }
}

#[derive(Clone, Copy, Debug)]
struct PositiveNumber(u32);

impl SettingValue for PositiveNumber {
    fn parse(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(number @ 1..) => Ok(Self(number)),
            _ => Err(format!("is `{text}`, expected a number from 1")),
        }
    }
}

/// Names of environment variables.
#[derive(Clone, Debug)]
struct VariableNames(Vec<String>);

impl SettingValue for VariableNames {
    fn parse(text: &str) -> Result<Self, String> {
        let is_name = |name: &&str| {
            name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
                && !name.starts_with(|c: char| c.is_ascii_digit())
        };
        match text.split_whitespace().find(|name| !is_name(name)) {
            Some(wrong) => Err(format!(
                "names `{wrong}`, which is no name of a variable; names are separated by blanks"
            )),
            None => Ok(Self(text.split_whitespace().map(str::to_owned).collect())),
        }
    }
}

macro_rules! keys {
    ($($key:ident),*) => {
        /// The keys of the file. The token is no option.
        const KEYS: &[&str] = &["token", $(stringify!($key)),*];
        /// The keys that are also options.
        pub(crate) const OPTIONS: &[&str] = &[$(stringify!($key)),*];

        impl SettingsArgs {
            /// Adds the values of the file for settings that are not set otherwise.
            fn over(mut self, file: &mut FileValues) -> Self {
                $(
                    let text = file.take(stringify!($key));
                    if let Some(text) = text.filter(|_| !self.$key.is_set()) {
                        let name = file.name_of(stringify!($key));
                        self.$key = Some(Setting::named(name, &text));
                    }
                )*
                self
            }
        }
    };
}

keys!(
    service_url,
    token_file,
    oidc_token_file,
    organization_name,
    runner_pool_id,
    token_expiration,
    name,
    slots,
    deploy_target,
    single_run,
    idle_timeout,
    on_stop,
    drain_timeout,
    grace_timeout,
    disconnect_on_stop,
    env_forward_allowlist,
    working_directory,
    executor,
    listen
);

impl SettingsArgs {
    /// Returns the settings, or all errors. `token` is the token in the environment.
    pub(crate) fn resolve(
        self,
        mut file: Option<FileValues>,
        token: Option<&str>,
        kubernetes: &KubernetesArgs,
    ) -> Result<Settings, Vec<SettingError>> {
        let errors = &mut Vec::new();
        let in_environment =
            present(token).map(|token| (env::AGENT_TOKEN.to_owned(), token.to_owned()));
        let in_file = file
            .as_mut()
            .and_then(|file| Some((file.name_of("token"), file.take("token")?)))
            .filter(|(_, text)| present(Some(text)).is_some());
        // A token file in the options or the environment overrides a token in the configuration file.
        let is_token_file_first = self.token_file.is_set();
        let this = match &mut file {
            Some(file) => self.over(file),
            None => self,
        };
        let token = if this.oidc_token_file.is_set() {
            if in_environment.is_some() || in_file.is_some() || this.token_file.is_set() {
                let text = "is set, and a token of the pool too: set one";
                errors.push(SettingError::new(env::AGENT_OIDC_TOKEN_FILE, text));
            }
            this.resolve_exchange(errors)
        } else {
            this.resolve_token(in_environment, in_file, is_token_file_first, errors)
        };
        let agent = this.resolve_agent(errors);
        let target = this.resolve_target(kubernetes, errors);
        let (Some(agent), Some(target), Some(token), []) =
            (agent, target, token, errors.as_slice())
        else {
            return Err(std::mem::take(errors));
        };
        Ok(Settings {
            agent,
            token,
            target,
            warnings: file.iter().flat_map(|file| file.unknown(KEYS)).collect(),
            file: file.map(|file| file.path),
        })
    }

    fn resolve_exchange(&self, errors: &mut Vec<SettingError>) -> Option<AgentToken> {
        let file = self.oidc_token_file.read(errors);
        let organization = self
            .organization_name
            .require(env::AGENT_ORGANIZATION_NAME, errors);
        let pool = self
            .runner_pool_id
            .require(env::AGENT_RUNNER_POOL_ID, errors);
        let expiration = self.token_expiration.read(errors);
        let expiration = expiration.map_or(TOKEN_SECONDS, |PositiveNumber(seconds)| seconds);
        Some(AgentToken::Exchange(Arc::new(Exchange::new(
            ExchangeSettings {
                file: file?,
                organization: organization?,
                pool: pool?.0,
                expiration: expiration.into(),
            },
        ))))
    }

    /// Chooses between the tokens of the environment and of the file. Each has the name of its setting.
    fn resolve_token(
        &self,
        in_environment: Option<(String, String)>,
        in_file: Option<(String, String)>,
        is_token_file_first: bool,
        errors: &mut Vec<SettingError>,
    ) -> Option<AgentToken> {
        let token_file = self.token_file.read(errors);
        let source = match (in_environment, in_file, token_file) {
            (None, _, Some(path)) if is_token_file_first => PoolTokenSource::File(path),
            (Some((name, text)), ..) | (None, Some((name, text)), _) => match token::check(&text) {
                Ok(token) => PoolTokenSource::Given(token),
                Err(error) => {
                    let text = format!("cannot be used: {error}");
                    errors.push(SettingError::new(name, text));
                    return None;
                }
            },
            (None, None, Some(path)) => PoolTokenSource::File(path),
            (None, None, None) => {
                let text = "is not set; a token of the pool is needed, or MAYFLY_AGENT_TOKEN_FILE, or \
                     MAYFLY_AGENT_OIDC_TOKEN_FILE";
                errors.push(SettingError::new(env::AGENT_TOKEN, text));
                return None;
            }
        };
        if let PoolTokenSource::File(_) = &source
            && let Err(error) = source.read()
        {
            let text = format!("cannot be used: {error}");
            errors.push(SettingError::new(env::AGENT_TOKEN_FILE, text));
        }
        Some(AgentToken::Pool(source))
    }

    fn resolve_agent(&self, errors: &mut Vec<SettingError>) -> Option<AgentSettings> {
        let service_url = self.service_url.require(env::AGENT_SERVICE_URL, errors);
        if let Some(HttpUrl { url, .. }) = &service_url
            && (!url.username().is_empty()
                || url.password().is_some()
                || url.query().is_some()
                || url.fragment().is_some())
        {
            let text = "has a login, a query or a fragment, which an address of a hub has not";
            errors.push(SettingError::new(env::AGENT_SERVICE_URL, text));
        }
        let name = self.name.read(errors).map(|Name(name)| name);
        let name = name.or_else(|| {
            let name = host_name();
            if name.is_none() && !self.name.is_set() {
                let text = "is not set, and the name of this host cannot be used";
                errors.push(SettingError::new(env::AGENT_NAME, text));
            }
            name
        });
        let seconds = |setting: &Option<Setting<u64>>, default, errors: &mut _| {
            Duration::from_secs(setting.read(errors).unwrap_or(default))
        };
        let slots = self
            .slots
            .read(errors)
            .map_or(SLOTS, |PositiveNumber(slots)| slots);
        let single_run = self.single_run.read(errors).unwrap_or(false);
        let idle_timeout = seconds(&self.idle_timeout, 0, errors);
        let on_stop = self.on_stop.read(errors);
        let drain_timeout = seconds(&self.drain_timeout, DRAIN_SECONDS, errors);
        let grace_timeout = seconds(&self.grace_timeout, GRACE_SECONDS, errors);
        let disconnect_on_stop = self.disconnect_on_stop.read(errors).unwrap_or(true);
        let listen = self.listen.read(errors);
        Some(AgentSettings {
            service_url: service_url?.url,
            hub_is_here: false,
            name: name?,
            slots,
            single_run,
            idle_timeout: Some(idle_timeout).filter(|timeout| !timeout.is_zero()),
            on_stop: on_stop.unwrap_or(match self.target() {
                TargetName::Kubernetes => StopMode::Detach,
                TargetName::Process => StopMode::Drain,
            }),
            drain_timeout,
            grace_timeout,
            disconnect_on_stop,
            listen,
        })
    }

    fn target(&self) -> TargetName {
        self.deploy_target
            .get()
            .copied()
            .unwrap_or(TargetName::Kubernetes)
    }

    fn resolve_target(
        &self,
        kubernetes: &KubernetesArgs,
        errors: &mut Vec<SettingError>,
    ) -> Option<TargetSettings> {
        let forwarded = self.env_forward_allowlist.read(errors);
        let forwarded = forwarded.map_or_else(Vec::new, |VariableNames(names)| names);
        let is_target_wrong = self.deploy_target.is_set() && self.deploy_target.get().is_none();
        self.deploy_target.read(errors);
        if is_target_wrong {
            return None;
        }
        let report_key = report_key::from_lookup(handover::var)
            .map_err(|error| errors.push(error))
            .ok();
        let data = self.working_directory.read(errors);
        let executor = self.executor.read(errors);
        match self.target() {
            TargetName::Kubernetes => {
                let hub = self.service_url.get().map(|hub| hub.text.as_str());
                let (deployment, cluster) = kubernetes.resolve_leased(hub, errors)?;
                let value = |name: String| Some((std::env::var(&name).ok()?, name));
                let forwarded = forwarded.into_iter().filter_map(value);
                Some(TargetSettings::Kubernetes(Box::new(KubernetesSettings {
                    deployment,
                    cluster,
                    forwarded: forwarded.map(|(value, name)| (name, value)).collect(),
                    report_key: report_key?,
                })))
            }
            TargetName::Process => {
                let mut keep = |variable: &str, text: String| {
                    errors.push(SettingError::new(variable, text));
                };
                let data = DataDir::locate(data.as_deref())
                    .map_err(|error| keep(env::AGENT_WORKING_DIRECTORY, error.to_string()))
                    .ok()?;
                if let Some(path) = executor
                    .as_deref()
                    .filter(|path| which::which(path).is_err())
                {
                    let text = format!(
                        "is `{}`, which is no program that can be started",
                        path.display()
                    );
                    keep(env::EXECUTOR, text);
                }
                let program = Program::choose(executor.as_deref())
                    .map_err(|error| keep(env::EXECUTOR, error.to_string()))
                    .ok()?;
                Some(TargetSettings::Process(ProcessSettings {
                    data,
                    program,
                    forwarded,
                    access: Access::Agent,
                    report_key: report_key?,
                }))
            }
        }
    }
}

/// Returns the name of this host, without its domain.
fn host_name() -> Option<AgentName> {
    let name = nix::unistd::gethostname().ok()?.into_string().ok()?;
    let name = name.split('.').next().unwrap_or_default();
    name.to_ascii_lowercase().parse().ok()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rstest::rstest;
    use runtime::setting::from_variables;
    use secrecy::ExposeSecret as _;

    use super::*;

    const HUB: (&str, &str) = ("MAYFLY_AGENT_SERVICE_URL", "https://hub.example.test");

    fn file(text: &str) -> FileValues {
        FileValues::parse("/etc/mayfly-agent.yaml".into(), text).unwrap()
    }

    fn resolve(
        variables: &[(&str, &str)],
        token: Option<&str>,
        text: &str,
    ) -> Result<Settings, Vec<SettingError>> {
        let mut args: SettingsArgs = from_variables(variables);
        if !text.contains("deploy_target") {
            args.deploy_target = Some("process".into());
        }
        args.resolve(Some(file(text)), token, &KubernetesArgs::default())
    }

    /// Returns a setting as text.
    fn shown(settings: &Settings, key: &str) -> String {
        let TargetSettings::Process(process) = &settings.target else {
            panic!("another target");
        };
        let agent = &settings.agent;
        match key {
            "service_url" => agent.service_url.to_string(),
            "name" => agent.name.to_string(),
            "slots" => agent.slots.to_string(),
            "single_run" => agent.single_run.to_string(),
            "idle_timeout" => format!("{:?}", agent.idle_timeout),
            "on_stop" => format!("{:?}", agent.on_stop),
            "drain_timeout" => format!("{:?}", agent.drain_timeout),
            "grace_timeout" => format!("{:?}", agent.grace_timeout),
            "disconnect_on_stop" => agent.disconnect_on_stop.to_string(),
            "listen" => format!("{:?}", agent.listen),
            "env_forward_allowlist" => process.forwarded.join(","),
            "working_directory" => process.data.path().display().to_string(),
            other => panic!("no such key: {other}"),
        }
    }

    #[rstest]
    #[case(
        "service_url",
        "MAYFLY_AGENT_SERVICE_URL",
        None,
        "http://file:1",
        "http://file:1/",
        "http://env:2",
        "http://env:2/"
    )]
    #[case(
        "name",
        "MAYFLY_AGENT_NAME",
        None,
        "of-file",
        "of-file",
        "of-env",
        "of-env"
    )]
    #[case("slots", "MAYFLY_AGENT_SLOTS", Some("25"), "3", "3", "4", "4")]
    #[case(
        "single_run",
        "MAYFLY_AGENT_SINGLE_RUN",
        Some("false"),
        "true",
        "true",
        "false",
        "false"
    )]
    #[case(
        "idle_timeout",
        "MAYFLY_AGENT_IDLE_TIMEOUT",
        Some("None"),
        "3",
        "Some(3s)",
        "0",
        "None"
    )]
    #[case(
        "on_stop",
        "MAYFLY_AGENT_ON_STOP",
        Some("Drain"),
        "force",
        "Force",
        "detach",
        "Detach"
    )]
    #[case(
        "drain_timeout",
        "MAYFLY_AGENT_DRAIN_TIMEOUT",
        Some("3600s"),
        "3",
        "3s",
        "4",
        "4s"
    )]
    #[case(
        "grace_timeout",
        "MAYFLY_AGENT_GRACE_TIMEOUT",
        Some("360s"),
        "3",
        "3s",
        "4",
        "4s"
    )]
    #[case(
        "disconnect_on_stop",
        "MAYFLY_AGENT_DISCONNECT_ON_STOP",
        Some("true"),
        "false",
        "false",
        "true",
        "true"
    )]
    #[case(
        "listen",
        "MAYFLY_AGENT_LISTEN",
        Some("None"),
        "127.0.0.1:1",
        "Some(127.0.0.1:1)",
        "[::1]:2",
        "Some([::1]:2)"
    )]
    #[case(
        "env_forward_allowlist",
        "MAYFLY_AGENT_ENV_FORWARD_ALLOWLIST",
        Some(""),
        "[A, B]",
        "A,B",
        "C  D",
        "C,D"
    )]
    #[case(
        "working_directory",
        "MAYFLY_AGENT_WORKING_DIRECTORY",
        None,
        "/of/file",
        "/of/file",
        "/of/env",
        "/of/env"
    )]
    fn the_environment_overrides_the_file_and_the_file_overrides_the_default(
        #[case] key: &str,
        #[case] variable: &str,
        #[case] default: Option<&str>,
        #[case] in_file: &str,
        #[case] of_file: &str,
        #[case] in_environment: &str,
        #[case] of_environment: &str,
    ) {
        let hub = [HUB].into_iter().filter(|(name, _)| *name != variable);
        let hub: Vec<_> = hub.collect();
        let text = format!("{key}: {in_file}");
        let by_file = resolve(&hub, Some("secret"), &text).unwrap();
        assert_eq!(shown(&by_file, key), of_file);
        let both = [hub.clone(), vec![(variable, in_environment)]].concat();
        let by_both = resolve(&both, Some("secret"), &text).unwrap();
        assert_eq!(shown(&by_both, key), of_environment);
        assert_eq!(by_both.warnings, Vec::<String>::new());
        // A blank counts as not set.
        let blank = [hub.clone(), vec![(variable, " ")]].concat();
        let by_blank = resolve(&blank, Some("secret"), &text).unwrap();
        assert_eq!(shown(&by_blank, key), of_file);
        if let Some(default) = default {
            let by_default = resolve(&hub, Some("secret"), "").unwrap();
            assert_eq!(shown(&by_default, key), default);
        }
    }

    #[test]
    fn the_environment_overrides_the_tokens_in_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        fs::write(&path, "of-a-file").unwrap();
        let path = path.to_str().unwrap();
        let own = ("MAYFLY_AGENT_TOKEN_FILE", path);
        let by_key = format!("token: of-yaml\ntoken_file: {path}");
        let by_blank_key = format!("token: \"\"\ntoken_file: {path}");
        for (variables, token, text, expected) in [
            (vec![HUB, own], Some("of-env"), "token: of-yaml", "of-env"),
            (vec![HUB, own], None, "token: of-yaml", "of-a-file"),
            (vec![HUB], None, by_key.as_str(), "of-yaml"),
            (vec![HUB], Some(" "), by_key.as_str(), "of-yaml"),
            (vec![HUB], None, by_blank_key.as_str(), "of-a-file"),
        ] {
            let settings = resolve(&variables, token, text).unwrap();
            let AgentToken::Pool(source) = &settings.token else {
                panic!("a token of the pool");
            };
            assert_eq!(source.read().unwrap().expose_secret(), expected);
            assert!(!format!("{settings:?}").contains("of-yaml"));
        }
    }

    #[test]
    fn an_exchange_needs_its_pool_and_organization_and_no_other_token() {
        let text = "oidc_token_file: /var/run/token\norganization_name: one\nrunner_pool_id: eu";
        let settings = resolve(&[HUB], None, text).unwrap();
        let AgentToken::Exchange(exchange) = settings.token else {
            panic!("an exchange");
        };
        assert_eq!(
            (
                &*exchange.settings.organization,
                exchange.settings.pool.as_str()
            ),
            ("one", "eu")
        );
        assert_eq!(exchange.settings.expiration, 3600);
        let more = format!("{text}\ntoken_expiration: 600");
        let settings = resolve(&[HUB], None, &more).unwrap();
        assert!(
            matches!(settings.token, AgentToken::Exchange(exchange) if exchange.settings.expiration == 600)
        );
        let errors = resolve(&[HUB], Some("secret"), text).unwrap_err();
        assert!(errors[0].to_string().contains("set one"), "{errors:?}");
        // A blank counts as not set.
        let blank = ("MAYFLY_AGENT_TOKEN_FILE", "");
        resolve(&[HUB, blank], Some(" "), &format!("{text}\ntoken: ''")).unwrap();
        let file = ("MAYFLY_AGENT_OIDC_TOKEN_FILE", "/var/run/token");
        let errors = resolve(&[HUB, file], None, "token_expiration: 0").unwrap_err();
        let names: Vec<_> = errors.iter().map(|p| p.variable.as_str()).collect();
        let expiration = "token_expiration in /etc/mayfly-agent.yaml";
        assert_eq!(
            names,
            [
                env::AGENT_ORGANIZATION_NAME,
                env::AGENT_RUNNER_POOL_ID,
                expiration
            ]
        );
    }

    #[test]
    fn all_errors_are_reported_at_once_with_their_place_and_without_the_token() {
        let cut = "mfp_eu_hunter2_000000";
        let text = format!("token: {cut}\nslots: 0\non_stop: never\ndeploy_target: moon");
        let variables = [
            ("MAYFLY_AGENT_NAME", "No Name"),
            ("MAYFLY_AGENT_LISTEN", "here"),
        ];
        let errors = resolve(&variables, None, &text).unwrap_err();
        let mut names: Vec<_> = errors.iter().map(|p| p.variable.as_str()).collect();
        names.sort_unstable();
        assert_eq!(
            names,
            [
                "MAYFLY_AGENT_LISTEN",
                "MAYFLY_AGENT_NAME",
                "MAYFLY_AGENT_SERVICE_URL",
                "deploy_target in /etc/mayfly-agent.yaml",
                "on_stop in /etc/mayfly-agent.yaml",
                "slots in /etc/mayfly-agent.yaml",
                "token in /etc/mayfly-agent.yaml",
            ]
        );
        let all: String = errors.iter().map(ToString::to_string).collect();
        assert!(!all.contains("hunter2"), "{all}");
    }

    #[test]
    fn a_missing_token_and_a_login_in_the_address_are_refused() {
        let errors = resolve(&[HUB], None, "").unwrap_err();
        assert_eq!(errors[0].variable, env::AGENT_TOKEN);
        let hub = (
            "MAYFLY_AGENT_SERVICE_URL",
            "https://me:hunter2@hub.example.test",
        );
        let errors = resolve(&[hub], Some("secret"), "").unwrap_err();
        assert!(!errors[0].to_string().contains("hunter2"), "{}", errors[0]);
    }

    #[test]
    fn the_default_is_target_kubernetes_with_detach() {
        let args: SettingsArgs = from_variables(&[HUB]);
        let settings = args
            .resolve(None, Some("secret"), &KubernetesArgs::default())
            .unwrap();
        assert_eq!(settings.agent.on_stop, StopMode::Detach);
        let TargetSettings::Kubernetes(kubernetes) = &settings.target else {
            panic!("another target");
        };
        // The Jobs get no secret of the platform.
        assert_eq!(kubernetes.deployment.env_secrets, Vec::<String>::new());
    }

    #[test]
    fn an_unknown_key_is_a_warning() {
        let settings = resolve(&[HUB], Some("secret"), "single-run: true").unwrap();
        assert!(
            settings.warnings[0].contains("`single_run`"),
            "{:?}",
            settings.warnings
        );
    }
}
