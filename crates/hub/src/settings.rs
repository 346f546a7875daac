//! The settings of a hub.

use std::path::{Path, PathBuf};
use std::time::Duration;

use artifact_store::StoreSettings;
use clap::{Args, ValueHint};
use data_dir::{DataDir, DataDirArgs};
use job_contract::env;
use pool_protocol::token::JobTokenKeys;
use pool_store::Rules;
use reporter::settings::{PlatformArgs, PlatformSettings};
use runtime::setting::{ReadSetting as _, Seconds, Setting, SettingError};
use secrecy::{ExposeSecret as _, SecretString};

use super::job_token_keys;
use super::pools::{self, OwnPool, Pools, RunLogs};
use super::watched_file::WatchedFile;

/// The prefix of the URL of a SQLite store.
const SQLITE: &str = "sqlite:";
/// The longest time in the queue. The platform keeps no job waiting for longer.
const LONGEST_QUEUE: Duration = Duration::from_hours(6);
/// The longest `MAYFLY_POOL_LOST_SECONDS`.
const LONGEST_SILENCE: Duration = Duration::from_hours(7 * 24);

/// The options of a hub.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Pools")]
pub struct HubArgs {
    /// YAML file of the pools whose agents take runs from this launcher; it is read again when it changes
    /// [default: no pools]
    #[arg(long, value_name = "FILE", env = env::POOLS_FILE, value_hint = ValueHint::FilePath)]
    pub pools: Option<PathBuf>,

    /// Database of the runs of pools.
    #[arg(long, value_name = "URL", env = env::POOL_STORE, hide_env_values = true, hide = true)]
    pub pool_store: Option<Setting<SecretString>>,

    /// Keys of the tokens of runs, base64.
    #[arg(long, value_name = "BASE64", env = env::JOB_TOKEN_KEYS, hide_env_values = true, hide = true)]
    pub job_token_keys: Option<Setting<SecretString>>,

    /// File with one or two keys of the tokens of runs, base64, one a line; the first one signs. It is read again when it
    /// changes [default: a new key beside the SQLite database]
    #[arg(long, value_name = "FILE", env = env::JOB_TOKEN_KEYS_FILE, value_hint = ValueHint::FilePath)]
    pub job_token_keys_file: Option<PathBuf>,

    /// A run that an executor has taken is given up after this time without a heartbeat of the executor and its agent
    /// [default: 600]
    #[arg(long, value_name = "SECONDS", env = env::POOL_LOST_SECONDS)]
    pub pool_lost_seconds: Option<Setting<Seconds>>,

    /// A run that no executor takes is given up after this time, 21600 at most
    /// [default: 3600, on target `process` 21600]
    #[arg(long, value_name = "SECONDS", env = env::POOL_QUEUE_SECONDS)]
    pub pool_queue_seconds: Option<Setting<Seconds>>,
}

/// The settings of a hub.
#[derive(Debug)]
pub struct HubSettings {
    pub(crate) pools: WatchedFile<Pools>,
    pub(crate) store: StoreUrl,
    pub(crate) keys: KeySetting,
    pub(crate) rules: Rules,
    pub(crate) platform: HubPlatform,
    /// The logs of executors on this machine.
    pub(crate) logs: Option<RunLogs>,
}

/// What the hub confirms runs with and reports them to.
#[derive(Debug)]
pub(crate) enum HubPlatform {
    Terrakube(Box<PlatformSettings>),
    /// The records in the data directory. Its agents are on this machine, or share the directory.
    Records(DataDir),
}

impl HubPlatform {
    /// The store of the artifacts of pools: the platform's, if others reach it.
    pub(crate) fn artifacts(&self) -> Option<StoreSettings> {
        match self {
            Self::Terrakube(platform) => platform.outputs().cloned(),
            Self::Records(data) => Some(StoreSettings::Local {
                data_dir: data.path().to_owned(),
            }),
        }
    }
}

/// The source of the keys of job tokens.
#[derive(Debug)]
pub(crate) enum KeySetting {
    Known(WatchedFile<JobTokenKeys>),
    /// A file that is created if it does not exist.
    Create(PathBuf),
}

/// The URL of a store. It may contain a password.
#[derive(Debug)]
pub(crate) struct StoreUrl(SecretString);

impl StoreUrl {
    pub(crate) fn reveal(&self) -> &str {
        self.0.expose_secret()
    }

    /// Returns the file of a SQLite database.
    pub(crate) fn file(&self) -> Option<&Path> {
        let rest = self.reveal().strip_prefix(SQLITE)?;
        let path = rest.strip_prefix("//").unwrap_or(rest);
        Some(Path::new(path.split('?').next().unwrap_or(path)))
    }
}

impl HubArgs {
    /// Returns the settings, or `None` without pools or if one of them is invalid. `shared_records` says that the records in
    /// the data directory may be the platform. They may be if an agent runs beside the hub, whose pool is `own`.
    pub fn resolve(
        &self,
        errors: &mut Vec<SettingError>,
        data: &DataDirArgs,
        platform: &PlatformArgs,
        shared_records: bool,
        own: Option<OwnPool>,
    ) -> Option<HubSettings> {
        if self.pools.is_none() && own.is_none() {
            return None;
        }
        let is_of_machine = own.is_some();
        let logs = own.as_ref().map(|own| own.logs.clone());
        let pools = self.resolve_pools(errors, own);
        let store = self.resolve_store(errors, data);
        if is_of_machine && store.as_ref().is_some_and(|store| store.file().is_none()) {
            let text = "is a database that hubs share, but the queue of target `process` is for one machine: name a file, as \
                        `sqlite:/folder/file.db`";
            errors.push(SettingError::new(env::POOL_STORE, text));
        }
        let keys = self.resolve_keys(errors, store.as_ref());
        let rules = self.resolve_rules(errors, is_of_machine);
        let located = data.locate().ok().filter(|_| is_of_machine);
        // Executors of this machine keep outputs in the data directory, also if that is the default.
        let outputs = located.as_ref().map(DataDir::path).or(data.given());
        let platform = if platform.terrakube.is_set() {
            let settings = platform.resolve(errors, outputs);
            settings.map(|settings| HubPlatform::Terrakube(Box::new(settings)))
        } else {
            resolve_records(errors, data, shared_records || is_of_machine)
        };
        Some(HubSettings {
            rules,
            pools: pools?,
            store: store?,
            keys: keys?,
            platform: platform?,
            logs,
        })
    }

    fn resolve_pools(
        &self,
        errors: &mut Vec<SettingError>,
        own: Option<OwnPool>,
    ) -> Option<WatchedFile<Pools>> {
        let with_own = move |pools: Pools| match &own {
            Some(own) => pools.with_own(own),
            None => Ok(pools),
        };
        let Some(file) = self.pools.as_deref() else {
            return with_own(Pools::default())
                .ok()
                .map(WatchedFile::without_file);
        };
        let pools = WatchedFile::open(file, move |text| pools::parse(text).and_then(&with_own));
        let wrong = |text: String| {
            let text = format!("is `{}`: {text}", file.display());
            SettingError::new(env::POOLS_FILE, text)
        };
        pools
            .map_err(|texts| errors.extend(texts.into_iter().map(wrong)))
            .ok()
    }

    fn resolve_store(
        &self,
        errors: &mut Vec<SettingError>,
        data: &DataDirArgs,
    ) -> Option<StoreUrl> {
        if let Some(url) = self.pool_store.read(errors) {
            return Some(StoreUrl(url));
        }
        match data.locate() {
            Ok(data) => {
                let file = data.launcher().join("pools/pools.db");
                Some(StoreUrl(format!("{SQLITE}{}", file.display()).into()))
            }
            Err(error) => {
                let text = format!("is needed for the database of pools: {error}");
                errors.push(SettingError::new(env::DATA_DIR, text));
                None
            }
        }
    }

    fn resolve_rules(&self, errors: &mut Vec<SettingError>, is_of_machine: bool) -> Rules {
        let mut defaults = Rules::default();
        if is_of_machine {
            // No other agent could take what waits there.
            defaults.queue_timeout = LONGEST_QUEUE;
        }
        let mut seconds = |setting: &Option<Setting<Seconds>>, default| {
            setting.read(errors).map_or(default, |Seconds(time)| time)
        };
        let lost_after = seconds(&self.pool_lost_seconds, defaults.lost_after);
        let queue_timeout = seconds(&self.pool_queue_seconds, defaults.queue_timeout);
        for (variable, time, longest) in [
            (env::POOL_QUEUE_SECONDS, queue_timeout, LONGEST_QUEUE),
            (env::POOL_LOST_SECONDS, lost_after, LONGEST_SILENCE),
        ] {
            if time > longest {
                let (seconds, most) = (time.as_secs(), longest.as_secs());
                let text = format!("is `{seconds}`, expected {most} at most");
                errors.push(SettingError::new(variable, text));
            }
        }
        Rules {
            orphaned_after: defaults.orphaned_after.min(lost_after / 2),
            lost_after,
            queue_timeout,
            ..defaults
        }
    }

    fn resolve_keys(
        &self,
        errors: &mut Vec<SettingError>,
        store: Option<&StoreUrl>,
    ) -> Option<KeySetting> {
        let given = self.job_token_keys.read(errors);
        let mut wrong = |variable: &str, texts: Vec<String>| {
            let error = |text| SettingError::new(variable, text);
            errors.extend(texts.into_iter().map(error));
        };
        match (given, self.job_token_keys_file.as_deref()) {
            (Some(_), Some(_)) => {
                let text = format!("is set, and {} too: set one", env::JOB_TOKEN_KEYS_FILE);
                wrong(env::JOB_TOKEN_KEYS, vec![text]);
                None
            }
            (Some(keys), None) => job_token_keys::parse(keys.expose_secret())
                .map(|keys| KeySetting::Known(WatchedFile::without_file(keys)))
                .map_err(|texts| wrong(env::JOB_TOKEN_KEYS, texts))
                .ok(),
            (None, Some(file)) => WatchedFile::open(file, job_token_keys::parse)
                .map(KeySetting::Known)
                .map_err(|texts| wrong(env::JOB_TOKEN_KEYS_FILE, texts))
                .ok(),
            (None, None) => {
                let file = store?
                    .file()
                    .map(|file| file.with_extension("job-token-key"));
                if file.is_none() {
                    let text = "is not set: hubs that share a database share the keys too";
                    wrong(env::JOB_TOKEN_KEYS, vec![text.to_owned()]);
                }
                file.map(KeySetting::Create)
            }
        }
    }
}

fn resolve_records(
    errors: &mut Vec<SettingError>,
    data: &DataDirArgs,
    may_be_platform: bool,
) -> Option<HubPlatform> {
    if may_be_platform {
        // Without a data directory, the store has said so.
        return data.locate().ok().map(HubPlatform::Records);
    }
    let text = format!(
        "is not set: a hub reports the runs of pools to the platform. {}=shared uses the records in the data directory instead",
        env::RECORDS
    );
    errors.push(SettingError::new(env::API_URL, text));
    None
}

#[cfg(test)]
mod tests {
    use std::fs;

    use pool_protocol::token::PoolToken;
    use runtime::setting::from_variables;

    use super::*;
    use crate::Boundary;

    const KEY: &str = "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=";

    struct Fixture(tempfile::TempDir);

    impl Fixture {
        fn new(pools: &str) -> Self {
            let folder = tempfile::tempdir().unwrap();
            fs::write(folder.path().join("pools.yaml"), pools).unwrap();
            Self(folder)
        }

        fn resolve(
            &self,
            more: &[(&str, &str)],
            platform: &[(&str, &str)],
        ) -> Result<HubSettings, Vec<String>> {
            let args = HubArgs {
                pools: Some(self.0.path().join("pools.yaml")),
                ..from_variables(more)
            };
            let data = DataDirArgs {
                data_dir: Some(self.0.path().join("data")),
            };
            let mut errors = Vec::new();
            let settings = args.resolve(&mut errors, &data, &from_variables(platform), false, None);
            settings.ok_or_else(|| errors.iter().map(ToString::to_string).collect())
        }
    }

    const PLATFORM: &[(&str, &str)] = &[
        (env::API_URL, "http://api:8080"),
        (env::PUBLIC_API_URL, "https://terrakube.example.test"),
        (env::INTERNAL_SECRET, KEY),
    ];

    #[test]
    fn a_hub_needs_a_file_of_pools_and_a_platform() {
        let fixture = Fixture::new("pools: {eu: {organizations: [a]}}");
        let settings = fixture.resolve(&[], PLATFORM).unwrap();
        let database = fixture.0.path().join("data/launcher/pools/pools.db");
        assert_eq!(settings.store.file(), Some(database.as_path()));
        let KeySetting::Create(key) = settings.keys else {
            panic!("a key is made")
        };
        assert_eq!(key, database.with_extension("job-token-key"));
        let none = HubArgs::default().resolve(
            &mut Vec::new(),
            &DataDirArgs::default(),
            &from_variables(&[]),
            false,
            None,
        );
        assert!(none.is_none());
    }

    #[test]
    fn all_errors_are_reported_at_once_without_secrets() {
        let fixture = Fixture::new("pools: {eu: {}}");
        let errors = fixture
            .resolve(
                &[
                    (env::POOL_STORE, "postgres://hub:hunter2@db/pools"),
                    (env::JOB_TOKEN_KEYS, "hunter2"),
                ],
                &[],
            )
            .unwrap_err();
        assert_eq!(errors.len(), 3, "{errors:#?}");
        assert!(errors[0].contains("pools.eu.organizations must be a list"));
        assert!(errors[1].starts_with("`MAYFLY_JOB_TOKEN_KEYS` has a key"));
        assert!(errors[2].starts_with("`AzBuilderApiUrl` is not set"));
        assert!(!errors.concat().contains("hunter2"));
    }

    #[test]
    fn the_hub_of_one_machine_needs_neither_a_file_of_pools_nor_a_platform() {
        let own = OwnPool {
            boundary: Boundary::Relay,
            token: PoolToken::new("local".parse().unwrap()),
            logs: RunLogs {
                data: "/data".into(),
                of_lease: |data, _| data.to_owned(),
            },
        };
        let folder = tempfile::tempdir().unwrap();
        let data = DataDirArgs {
            data_dir: Some(folder.path().to_owned()),
        };
        let resolve = |variables: &[(&str, &str)]| {
            let (mut errors, args): (_, HubArgs) = (Vec::new(), from_variables(variables));
            let platform = from_variables(&[]);
            let settings = args.resolve(&mut errors, &data, &platform, false, Some(own.clone()));
            (settings.unwrap(), errors)
        };
        let (settings, errors) = resolve(&[]);
        assert!(errors.is_empty(), "{errors:?}");
        assert!(settings.pools.current().get(own.token.pool()).is_some());
        assert!(matches!(settings.platform, HubPlatform::Records(_)));
        assert_eq!(settings.rules.queue_timeout, LONGEST_QUEUE);
        let shared = [
            (env::POOL_STORE, "postgres://db/pools"),
            (env::JOB_TOKEN_KEYS, KEY),
        ];
        let (_, errors) = resolve(&shared);
        assert!(errors[0].text.contains("for one machine"), "{errors:?}");
    }

    #[test]
    fn hubs_that_share_a_database_must_share_the_keys() {
        let fixture = Fixture::new("pools: {eu: {organizations: [a]}}");
        let shared = (env::POOL_STORE, "postgres://db/pools");
        let errors = fixture.resolve(&[shared], PLATFORM).unwrap_err();
        assert!(errors[0].contains("share the keys"), "{errors:?}");
        let settings = fixture
            .resolve(&[shared, (env::JOB_TOKEN_KEYS, KEY)], PLATFORM)
            .unwrap();
        assert_eq!(settings.store.file(), None);
        assert!(!format!("{settings:?}").contains("postgres"));
        let both = [(env::JOB_TOKEN_KEYS, KEY), (env::JOB_TOKEN_KEYS_FILE, "x")];
        let errors = fixture.resolve(&both, PLATFORM).unwrap_err();
        assert!(errors[0].contains("set one"), "{errors:?}");
    }
}
