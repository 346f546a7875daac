//! The variables an executor is started with: those of a pod, from nothing, plus what a machine needs to be usable. Nothing
//! else of the caller's environment gets through. [`crate::executor`] hands over the secrets among them apart from the rest.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use job_contract::{Document, env};
use runtime::setting::SettingError;
use runtime::{handover, no_proxy};
use secrecy::{ExposeSecret as _, SecretString};
use url::Url;

/// What differs between steps and machines.
#[derive(Debug)]
pub struct Setup<'a> {
    pub data_dir: &'a Path,
    /// Folder made for this step.
    pub work_dir: &'a Path,
    /// Where the executor leaves its final report.
    pub report: &'a Path,
    pub color: bool,
    /// What the executor seals its report with, for a launcher that acts on it.
    pub report_key: Option<String>,
    pub platform: Platform<'a>,
    /// Whether someone may read the run's changes and state as JSON.
    pub structured_output: bool,
}

/// Which platform the executor reports to.
#[derive(Clone, Copy, Debug)]
pub enum Platform<'a> {
    /// The records of this machine. Names of the caller's variables that the executor, its tool and its scripts get too.
    Machine(&'a [String]),
    /// The one behind a hub. The executor has a lease, and no secret of the platform.
    Hub(&'a Lease<'a>),
}

/// The lease of an executor.
#[derive(Clone, Copy, Debug)]
pub struct Lease<'a> {
    pub url: &'a str,
    pub token: &'a SecretString,
    /// Variables of the caller that the executor, its tool and its scripts get too.
    pub forwarded: &'a [String],
    pub access: Access,
}

/// What an executor with a lease knows of the platform behind the hub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// What the environment of its agent says, without a way to the platform.
    Agent,
    /// The platform are the records of this machine. The hub is in the process that starts the executor.
    Records,
    /// The executor reaches the platform as that process does, which is also the hub.
    Terrakube,
}

/// The store in the data directory.
const LOCAL_STORE: &str = "LocalTerraformStateImpl";

/// What a process needs on any machine: where programs and certificates are, how to reach the network.
const MACHINE: [&str; 22] = [
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TERM",
    "TZ",
    "TMPDIR",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "http_proxy",
    "https_proxy",
    "all_proxy",
    "no_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "NO_PROXY",
    "XDG_RUNTIME_DIR",
    "XDG_CACHE_HOME",
];

/// Settings of the executor that its deployment decides; here the caller's environment is the deployment.
const DEPLOYMENT: [&str; 30] = [
    env::TERRAFORM_RELEASES_URL,
    env::TOFU_RELEASES_URL,
    env::CUSTOM_TOFU_RELEASES_URL,
    env::RELEASE_MIRROR_URL,
    env::RELEASE_KEYS_FILE,
    env::RELEASE_SIGNATURES,
    env::TOOL_CACHE_DIR,
    env::TOOLS_REPOSITORY,
    env::TOOLS_BRANCH,
    env::SSH_KNOWN_HOSTS,
    env::ALLOWED_VCS_URL_REGEX,
    env::ALLOWED_VCS_URL_MATCH,
    env::GIT_LOGINS,
    env::ARCHIVE_MAX_BYTES,
    env::ARCHIVE_MAX_ENTRIES,
    env::GRACE_PERIOD_SECONDS,
    env::SILENCE_SECONDS,
    env::MEMORY_STOP_PERCENT,
    env::LOG_FILE,
    env::LOG_FILTER,
    env::ENV_FORWARD,
    env::MIXED_FLEET,
    env::PLAN_FILES,
    env::PLAN_FILES_MAX_BYTES,
    env::PROVIDER_CACHE_DIR,
    env::PROVIDER_CACHE_MAX_BYTES,
    env::MODULE_CACHE,
    env::PROVIDER_FETCHES,
    env::HOOKS_DIR,
    env::RUN_CA_FILE,
];

/// How the platform is reached that the caller's environment names.
const PLATFORM_ACCESS: [&str; 20] = [
    env::API_URL,
    env::INTERNAL_SECRET,
    env::ENABLE_SECURITY,
    env::DISABLE_ACKNOWLEDGE,
    env::LOG_VIA_API,
    env::REDIS_HOSTNAME,
    env::REDIS_PORT,
    env::REDIS_USERNAME,
    env::REDIS_PASSWORD,
    env::REDIS_SSL,
    env::REDIS_CA_FILE,
    env::REDIS_TRUSTSTORE_PATH,
    env::REDIS_TRUSTSTORE_PASSWORD,
    env::REDIS_TIMEOUT,
    env::REDIS_CLUSTER_NODES,
    env::REDIS_CLUSTER_MAX_REDIRECTS,
    env::REDIS_SENTINEL_MASTER,
    env::REDIS_SENTINEL_NODES,
    env::REDIS_SENTINEL_USERNAME,
    env::REDIS_SENTINEL_PASSWORD,
];

/// What belongs to a platform, without anything that opens it.
const PLATFORM: [&str; 6] = [
    env::PUBLIC_API_URL,
    env::REGISTRY_DOMAIN,
    env::DISPATCH_WAIT_SECONDS,
    env::STATUS_POLL_SECONDS,
    env::REPORT_PATIENCE_SECONDS,
    env::LIVE_LOG_MAX_BYTES,
];

/// The store of a platform. Behind a hub of another process, executors use the store through the hub.
const STORE: [&str; 28] = [
    env::STATE_TYPE,
    env::BACKEND_CREDENTIALS,
    env::AWS_BUCKET,
    env::AWS_REGION,
    env::AWS_ENDPOINT,
    env::AWS_ENDPOINT_REGION,
    env::AWS_PATH_STYLE,
    env::AWS_CHUNKED_ENCODING,
    env::AWS_CHECKSUM_VALIDATION,
    env::AWS_ACCESS_KEY,
    env::AWS_SECRET_KEY,
    env::AWS_ENABLE_ROLE_AUTH,
    env::AWS_INCLUDE_BACKEND_KEYS,
    env::AWS_USE_LOCKFILE,
    env::STORE_AWS_ROLE,
    env::STORE_AZURE_IDENTITY,
    env::STORE_GCP_IDENTITY,
    env::AZURE_ACCOUNT,
    env::AZURE_RESOURCE_GROUP,
    env::AZURE_CONTAINER,
    env::AZURE_ACCESS_KEY,
    env::GCP_BUCKET,
    env::GCP_PROJECT,
    env::GCP_CREDENTIALS,
    // What the stores' role credentials come from on a machine.
    "AWS_PROFILE",
    "AWS_CONFIG_FILE",
    "AWS_SHARED_CREDENTIALS_FILE",
    "GOOGLE_APPLICATION_CREDENTIALS",
];

/// The names of the variables that executors, tools and scripts get too.
///
/// # Errors
/// Refuses the secrets of the platform: no tool and no script gets them.
pub fn forwarded(own: impl Fn(&str) -> Option<OsString>) -> Result<Vec<String>, SettingError> {
    let list = own(env::ENV_FORWARD).unwrap_or_default();
    let list = list.to_string_lossy();
    let names = list.split(',').map(str::trim);
    let names: Vec<String> = names
        .filter(|name| !name.is_empty())
        .map(str::to_owned)
        .collect();
    match names.iter().find(|name| env::is_secret(name)) {
        Some(secret) => {
            let text = format!("names `{secret}`, a secret that no tool and no script may get");
            Err(SettingError::new(env::ENV_FORWARD, text))
        }
        None => Ok(names),
    }
}

/// All variables for one step. `own` looks up the caller's.
pub fn build(
    setup: &Setup<'_>,
    job: &Document,
    own: impl Fn(&str) -> Option<OsString>,
) -> Vec<(OsString, OsString)> {
    let forwarded = match setup.platform {
        Platform::Hub(lease) => lease.forwarded,
        Platform::Machine(forwarded) => forwarded,
    };
    let platform: &[&[&str]] = match setup.platform {
        Platform::Machine(_) => &[],
        Platform::Hub(lease) => match lease.access {
            Access::Agent => &[&PLATFORM],
            Access::Records => &[&[env::REPORT_PATIENCE_SECONDS]],
            Access::Terrakube => &[&PLATFORM_ACCESS, &PLATFORM, &STORE],
        },
    };
    // A file can hold each of these.
    let files = env::SECRET_STORE_SETTINGS
        .into_iter()
        .chain(env::ASSUMER_SECRETS)
        .chain([env::GIT_LOGINS])
        .map(|name| format!("{name}{}", env::FILE_SUFFIX))
        .collect::<Vec<_>>();
    let names = MACHINE
        .into_iter()
        .chain(DEPLOYMENT)
        .chain(env::SECRET_STORE_SETTINGS)
        .chain(env::ASSUMER_SETTINGS)
        .chain(files.iter().map(String::as_str))
        .chain(env::IDENTITY_SETTINGS)
        .chain(platform.iter().copied().flatten().copied())
        .chain(forwarded.iter().map(String::as_str));
    let mut variables: Vec<(OsString, OsString)> = names
        .filter_map(|name| Some((name.into(), own(name)?)))
        .collect();
    for prefix in [
        env::FOR_HOOKS_PREFIX,
        env::GIT_LOGIN_PREFIX,
        env::SECRET_LOGIN_PREFIX,
    ] {
        variables.extend(handover::with_prefix(prefix));
    }

    let flag = |on: bool| OsString::from(if on { "true" } else { "false" });
    let mut set = |name: &str, value: &OsStr| {
        variables.retain(|(known, _)| known != name);
        variables.push((name.into(), value.to_owned()));
    };
    set(env::BATCH, &flag(true));
    match setup.platform {
        Platform::Machine(_) => set(env::STATE_TYPE, OsStr::new(LOCAL_STORE)),
        Platform::Hub(lease) => {
            set(env::LEASE_URL, OsStr::new(lease.url));
            set(env::LEASE_TOKEN, OsStr::new(lease.token.expose_secret()));
            set(env::ENV_FORWARD, OsStr::new(&forwarded.join(",")));
            for (name, value) in of_hub_here(lease, &own) {
                set(name, &value);
            }
        }
    }
    set(env::DATA_DIR, setup.data_dir.as_os_str());
    set(env::WORK_DIR, setup.work_dir.as_os_str());
    // The same for every run of this machine, whatever its own folder is.
    let checkouts = setup.data_dir.join("launcher/checkouts");
    set(env::CHECKOUT_DIR, checkouts.as_os_str());
    set(env::RUN_MARK, setup.work_dir.as_os_str());
    set(env::TERMINATION_LOG, setup.report.as_os_str());
    if let Some(key) = &setup.report_key {
        set(env::REPORT_KEY, OsStr::new(key));
    }
    set(env::OUTCOME_EXIT_CODE, &flag(true));
    set(env::LOG_FORMAT, OsStr::new("json"));
    set(env::TOOL_SELECTION, OsStr::new("installed"));
    // The process that started it watches it.
    set(
        env::DEADLINE_SECONDS,
        own(env::DEADLINE_SECONDS)
            .as_deref()
            .unwrap_or(OsStr::new("0")),
    );
    set(env::COLOR_OUTPUT, &flag(setup.color));
    set(env::STRUCTURED_OUTPUT, &flag(setup.structured_output));

    set(env::JOB_DATA, OsStr::new(&job.encode()));
    variables
}

/// What an executor needs if the process that starts it is the hub too.
fn of_hub_here(
    lease: &Lease<'_>,
    own: impl Fn(&str) -> Option<OsString>,
) -> Vec<(&'static str, OsString)> {
    let hub = Url::parse(lease.url).ok();
    let Some(hub) = hub.filter(|_| lease.access != Access::Agent) else {
        return Vec::new();
    };
    // An IPv6 address stands there without its brackets.
    let host = hub.host_str().unwrap_or_default();
    let host = host.trim_matches(['[', ']']);
    let direct = no_proxy::with(host, &own);
    let mut variables: Vec<_> = no_proxy::NAMES.map(|name| (name, direct.clone())).into();
    if lease.access == Access::Records {
        variables.push((env::STATE_TYPE, LOCAL_STORE.into()));
        variables.push((
            env::PUBLIC_API_URL,
            hub.origin().ascii_serialization().into(),
        ));
        // Records are files, so a cancellation can be looked for often.
        let poll = own(env::STATUS_POLL_SECONDS).unwrap_or_else(|| "1".into());
        variables.push((env::STATUS_POLL_SECONDS, poll));
    }
    variables
}

#[cfg(test)]
mod tests {
    use super::*;
    use job_contract::{JobData, encoding};
    use rstest::rstest;
    use std::collections::BTreeMap;

    fn environment(job: &JobData, own: &[(&str, &str)]) -> BTreeMap<String, String> {
        environment_on(Platform::Machine(&["CORP_ID".to_owned()]), job, own)
    }

    fn environment_on(
        platform: Platform<'_>,
        job: &JobData,
        own: &[(&str, &str)],
    ) -> BTreeMap<String, String> {
        let setup = Setup {
            data_dir: Path::new("/data"),
            work_dir: Path::new("/work"),
            report: Path::new("/report"),
            color: false,
            report_key: None,
            platform,
            structured_output: false,
        };
        let own = |name: &str| {
            own.iter()
                .find(|(known, _)| *known == name)
                .map(|(_, value)| OsString::from(value))
        };
        let text = |value: OsString| value.into_string().unwrap();
        build(&setup, &Document::written(job), own)
            .into_iter()
            .map(|(name, value)| (text(name), text(value)))
            .collect()
    }

    #[test]
    fn the_environment_is_a_pods_and_lets_no_secret_of_the_caller_through() {
        let own = [
            ("PATH", "/bin"),
            ("https_proxy", "http://proxy"),
            ("AWS_SECRET_ACCESS_KEY", "hunter2"),
            ("TF_VAR_password", "hunter2"),
            ("MAYFLY_DATA_DIR", "/other"),
            ("MAYFLY_ENV_FORWARD", "CORP_ID, "),
            ("CORP_ID", "7"),
            ("CUSTOMER_VAULT_TOKEN_FILE", "/vault-token"),
            ("ASSUMER_SECRET_ACCESS_KEY_FILE", "/assumer-key"),
            ("MAYFLY_GIT_LOGINS_FILE", "/git-logins"),
        ];
        let found = environment(&JobData::default(), &own);
        let mut expected = BTreeMap::from([
            ("EphemeralFlagBatch", "true"),
            ("TerraformStateType", "LocalTerraformStateImpl"),
            ("MAYFLY_DATA_DIR", "/data"),
            ("MAYFLY_WORK_DIR", "/work"),
            ("MAYFLY_CHECKOUT_DIR", "/data/launcher/checkouts"),
            ("MAYFLY_RUN_MARK", "/work"),
            ("MAYFLY_TERMINATION_LOG", "/report"),
            ("MAYFLY_OUTCOME_EXIT_CODE", "true"),
            ("MAYFLY_LOG_FORMAT", "json"),
            ("MAYFLY_TOOL_SELECTION", "installed"),
            ("MAYFLY_DEADLINE_SECONDS", "0"),
            ("TerrakubeEnableColorOutput", "false"),
            ("MAYFLY_STRUCTURED_OUTPUT", "false"),
            ("PATH", "/bin"),
            ("https_proxy", "http://proxy"),
            ("MAYFLY_ENV_FORWARD", "CORP_ID, "),
            ("CORP_ID", "7"),
            ("CUSTOMER_VAULT_TOKEN_FILE", "/vault-token"),
            ("ASSUMER_SECRET_ACCESS_KEY_FILE", "/assumer-key"),
            ("MAYFLY_GIT_LOGINS_FILE", "/git-logins"),
        ]);
        let encoded = encoding::encode(&JobData::default());
        expected.insert("EphemeralJobData", &encoded);
        let found: BTreeMap<&str, &str> = found
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()))
            .collect();
        assert_eq!(found, expected);
    }

    /// Without its rules, a run could read every secret.
    #[test]
    fn files_with_settings_of_stores_are_named_too() {
        let own = [
            ("MAYFLY_SECRET_REFERENCES_ALLOW_FILE", "/rules"),
            ("CUSTOMER_VAULT_TOKEN_FILE", "/token"),
            ("ASSUMER_SECRET_ACCESS_KEY_FILE", "/key"),
        ];
        let found = environment(&JobData::default(), &own);
        for (name, value) in own {
            assert_eq!(found.get(name).map(String::as_str), Some(value), "{name}");
        }
    }

    #[test]
    fn an_executor_with_a_lease_gets_no_way_to_the_platform_but_the_hub() {
        let own = [
            ("InternalSecret", "hunter2"),
            ("AzBuilderApiUrl", "http://api"),
            ("TerrakubeRedisPassword", "hunter2"),
            ("TerrakubeApiUrl", "https://terrakube.example.test"),
            ("TerraformStateType", "AwsTerraformStateImpl"),
            ("MAYFLY_ENV_FORWARD", "OTHER"),
            ("OTHER", "hunter2"),
            ("CORP_ID", "7"),
        ];
        let lease = Lease {
            url: "http://hub/lease",
            token: &"mfr_token".into(),
            forwarded: &["CORP_ID".to_owned(), "ABSENT".to_owned()],
            access: Access::Agent,
        };
        let job = JobData::default();
        let found = environment_on(Platform::Hub(&lease), &job, &own);
        assert!(
            !found.values().any(|value| value.contains("hunter2")),
            "{found:?}"
        );
        for name in ["AzBuilderApiUrl", "ABSENT", "TerraformStateType"] {
            assert!(!found.contains_key(name), "{name}");
        }
        for (name, value) in [
            ("MAYFLY_LEASE_URL", "http://hub/lease"),
            ("MAYFLY_LEASE_TOKEN", "mfr_token"),
            ("MAYFLY_ENV_FORWARD", "CORP_ID,ABSENT"),
            ("CORP_ID", "7"),
            ("TerrakubeApiUrl", "https://terrakube.example.test"),
        ] {
            assert_eq!(found[name], value, "{name}");
        }
    }

    #[test]
    fn an_executor_beside_its_hub_reaches_it_without_a_proxy_and_the_platform_as_the_launcher_does()
    {
        let own = |name: &str| (name == "MAYFLY_ENV_FORWARD").then(|| " CORP_ID,, PATH".into());
        assert_eq!(forwarded(own).unwrap(), ["CORP_ID", "PATH"]);
        let own = [
            ("NO_PROXY", "git.example.test"),
            ("InternalSecret", "hunter2"),
            ("TerraformStateType", "AwsTerraformStateImpl"),
            ("MAYFLY_STATUS_POLL_SECONDS", "7"),
        ];
        let found = |access| {
            let lease = Lease {
                url: "http://127.0.0.1:8090/api/v1/executor/lease",
                token: &"mfr_token".into(),
                forwarded: &[],
                access,
            };
            environment_on(Platform::Hub(&lease), &JobData::default(), &own)
        };
        let terrakube = found(Access::Terrakube);
        for (name, value) in [
            ("no_proxy", "git.example.test,127.0.0.1"),
            ("NO_PROXY", "git.example.test,127.0.0.1"),
            ("InternalSecret", "hunter2"),
            ("TerraformStateType", "AwsTerraformStateImpl"),
        ] {
            assert_eq!(terrakube[name], value, "{name}");
        }
        let records = found(Access::Records);
        assert!(!records.contains_key("InternalSecret"));
        for (name, value) in [
            ("NO_PROXY", "git.example.test,127.0.0.1"),
            ("TerraformStateType", "LocalTerraformStateImpl"),
            ("TerrakubeApiUrl", "http://127.0.0.1:8090"),
            ("MAYFLY_STATUS_POLL_SECONDS", "7"),
        ] {
            assert_eq!(records[name], value, "{name}");
        }
    }

    #[rstest]
    #[case(env::INTERNAL_SECRET)]
    #[case(env::AWS_SECRET_KEY)]
    #[case("EphemeralJobData_1")]
    fn a_secret_is_not_forwarded_and_named(#[case] secret: &str) {
        let own = |_: &str| Some(format!("CORP_ID,{secret}").into());
        let error = forwarded(own).unwrap_err();
        assert_eq!(error.variable, env::ENV_FORWARD);
        assert!(error.text.contains(&format!("`{secret}`")), "{error}");
    }

    #[rstest]
    #[case(&[], "127.0.0.1")]
    #[case(&[("no_proxy", ""), ("NO_PROXY", "git.example.test")], "git.example.test,127.0.0.1")]
    #[case(&[("NO_PROXY", "*")], "*")]
    fn the_hub_is_added_to_what_needs_no_proxy(
        #[case] own: &[(&str, &str)],
        #[case] expected: &str,
    ) {
        let lease = Lease {
            url: "http://127.0.0.1:8090/api/v1/executor/lease",
            token: &"mfr_token".into(),
            forwarded: &[],
            access: Access::Records,
        };
        let found = environment_on(Platform::Hub(&lease), &JobData::default(), own);
        assert_eq!(found["no_proxy"], expected);
        assert_eq!(found["NO_PROXY"], expected);
    }

    #[test]
    fn large_job_data_stay_in_one_piece() {
        let mut job = JobData::default();
        let value = "x".repeat(2 * encoding::MAX_ENVIRONMENT_BYTES);
        job.variables.insert("big".into(), value.as_str().into());
        let found = environment(&job, &[]);
        assert_eq!(encoding::decode(found[env::JOB_DATA].as_bytes()), Ok(job));
        assert!(!found.contains_key(env::JOB_DATA_FILE));
    }
}
