//! The variables an executor is started with: those of a pod, from nothing, plus what a machine needs to be usable. Nothing
//! else of the caller's environment gets through. [`super::executor`] hands over the secrets among them apart from the rest.

#[cfg(feature = "kubernetes")]
use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::path::Path;

use job_contract::{Document, env};
use secrecy::{ExposeSecret as _, SecretString};

/// What differs between steps and machines.
#[derive(Debug)]
pub(crate) struct Setup<'a> {
    pub(crate) data_dir: &'a Path,
    /// Folder made for this step.
    pub(crate) work_dir: &'a Path,
    /// Where the executor leaves its final report.
    pub(crate) report: &'a Path,
    pub(crate) color: bool,
    /// What the executor seals its report with, for a launcher that acts on it.
    pub(crate) report_key: Option<String>,
    pub(crate) platform: Platform<'a>,
    /// Whether someone may read the run's changes and state as JSON.
    pub(crate) structured_output: bool,
}

/// Which platform the executor reports to.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(
    not(feature = "kubernetes"),
    expect(
        dead_code,
        reason = "without `serve` and `agent`, only `run` starts executors"
    )
)]
pub(crate) enum Platform<'a> {
    /// The records of this machine.
    Machine,
    /// The one that the caller's environment names.
    Terrakube,
    /// The one behind a hub. The executor has a lease, and no secret of the platform.
    Hub(&'a Lease<'a>),
}

/// The lease of an executor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lease<'a> {
    pub(crate) url: &'a str,
    pub(crate) token: &'a SecretString,
    /// Variables of the caller that the executor, its tool and its scripts get too.
    pub(crate) forwarded: &'a [String],
}

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
const DEPLOYMENT: [&str; 18] = [
    env::TERRAFORM_RELEASES_URL,
    env::TOFU_RELEASES_URL,
    env::RELEASE_MIRROR_URL,
    env::RELEASE_KEYS_FILE,
    env::RELEASE_SIGNATURES,
    env::TOOL_CACHE_DIR,
    env::TOOLS_REPOSITORY,
    env::TOOLS_BRANCH,
    env::SSH_KNOWN_HOSTS,
    env::ARCHIVE_MAX_BYTES,
    env::ARCHIVE_MAX_ENTRIES,
    env::GRACE_PERIOD_SECONDS,
    env::SILENCE_SECONDS,
    env::MEMORY_STOP_PERCENT,
    env::LOG_FILE,
    env::LOG_FILTER,
    env::ENV_FORWARD,
    env::MIXED_FLEET,
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

/// What belongs to a platform; the store comes with it.
const PLATFORM: [&str; 27] = [
    env::PUBLIC_API_URL,
    env::REGISTRY_DOMAIN,
    env::DISPATCH_WAIT_SECONDS,
    env::STATUS_POLL_SECONDS,
    env::REPORT_PATIENCE_SECONDS,
    env::LIVE_LOG_MAX_BYTES,
    env::STATE_TYPE,
    env::BACKEND_CREDENTIALS,
    env::AWS_BUCKET,
    env::AWS_REGION,
    env::AWS_ENDPOINT,
    env::AWS_ACCESS_KEY,
    env::AWS_SECRET_KEY,
    env::AWS_ENABLE_ROLE_AUTH,
    env::AWS_INCLUDE_BACKEND_KEYS,
    env::AWS_USE_LOCKFILE,
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

/// What a hub and an agent of this machine need of the caller's environment, and pass on to executors.
#[cfg(feature = "kubernetes")]
pub(crate) fn of_agent(own: impl Fn(&str) -> Option<OsString>) -> Vec<(OsString, OsString)> {
    let forwarded = forwarded(&own);
    let names = MACHINE
        .into_iter()
        .chain(DEPLOYMENT)
        .chain([env::DEADLINE_SECONDS])
        .chain(forwarded.iter().map(String::as_str));
    // A variable that is forwarded may also be one of the others.
    let names: BTreeSet<&str> = names.collect();
    let names = names.into_iter();
    names
        .filter_map(|name| Some((name.into(), own(name)?)))
        .collect()
}

/// The names of the variables that executors, tools and scripts get too.
#[cfg(feature = "kubernetes")]
pub(crate) fn forwarded(own: impl Fn(&str) -> Option<OsString>) -> Vec<String> {
    let list = own(env::ENV_FORWARD).unwrap_or_default();
    let list = list.to_string_lossy();
    let names = list.split(',').map(str::trim);
    let names = names.filter(|name| !name.is_empty());
    names.map(str::to_owned).collect()
}

/// All variables for one step. `own` looks up the caller's.
pub(crate) fn build(
    setup: &Setup<'_>,
    job: &Document,
    own: impl Fn(&str) -> Option<OsString>,
) -> Vec<(OsString, OsString)> {
    let forwarded = match setup.platform {
        Platform::Hub(lease) => lease.forwarded.join(","),
        _ => own(env::ENV_FORWARD)
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned(),
    };
    let (access, platform): (&[&str], &[&str]) = match setup.platform {
        Platform::Machine => (&[], &[]),
        Platform::Terrakube => (&PLATFORM_ACCESS, &PLATFORM),
        Platform::Hub(_) => (&[], &PLATFORM),
    };
    let names = MACHINE
        .into_iter()
        .chain(DEPLOYMENT)
        .chain(access.iter().chain(platform).copied())
        .chain(forwarded.split(',').map(str::trim));
    let mut variables: Vec<(OsString, OsString)> = names
        .filter(|name| !name.is_empty())
        .filter_map(|name| Some((name.into(), own(name)?)))
        .collect();

    let flag = |on: bool| OsString::from(if on { "true" } else { "false" });
    let mut set = |name: &str, value: &OsStr| {
        variables.retain(|(known, _)| known != name);
        variables.push((name.into(), value.to_owned()));
    };
    set(env::BATCH, &flag(true));
    match setup.platform {
        Platform::Machine => set(env::STATE_TYPE, OsStr::new("LocalTerraformStateImpl")),
        Platform::Terrakube => {}
        Platform::Hub(lease) => {
            set(env::LEASE_URL, OsStr::new(lease.url));
            set(env::LEASE_TOKEN, OsStr::new(lease.token.expose_secret()));
            set(env::ENV_FORWARD, OsStr::new(&forwarded));
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

#[cfg(test)]
mod tests {
    use super::*;
    use job_contract::{JobData, encoding};
    use std::collections::BTreeMap;

    fn environment(job: &JobData, own: &[(&str, &str)]) -> BTreeMap<String, String> {
        environment_on(Platform::Machine, job, own)
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
        ]);
        let encoded = encoding::encode(&JobData::default());
        expected.insert("EphemeralJobData", &encoded);
        let found: BTreeMap<&str, &str> = found
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()))
            .collect();
        assert_eq!(found, expected);
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
        };
        let job = JobData::default();
        let found = environment_on(Platform::Hub(&lease), &job, &own);
        assert!(
            !found.values().any(|value| value.contains("hunter2")),
            "{found:?}"
        );
        assert!(!found.contains_key("AzBuilderApiUrl") && !found.contains_key("ABSENT"));
        for (name, value) in [
            ("MAYFLY_LEASE_URL", "http://hub/lease"),
            ("MAYFLY_LEASE_TOKEN", "mfr_token"),
            ("MAYFLY_ENV_FORWARD", "CORP_ID,ABSENT"),
            ("CORP_ID", "7"),
            ("TerrakubeApiUrl", "https://terrakube.example.test"),
            ("TerraformStateType", "AwsTerraformStateImpl"),
        ] {
            assert_eq!(found[name], value, "{name}");
        }
    }

    #[cfg(feature = "kubernetes")]
    #[test]
    fn an_agent_of_this_machine_passes_on_what_a_run_promises() {
        let own = |name: &str| {
            let known = [
                ("MAYFLY_ENV_FORWARD", " CORP_ID,, ABSENT,PATH"),
                ("MAYFLY_DEADLINE_SECONDS", "90"),
                ("MAYFLY_GRACE_PERIOD_SECONDS", "30"),
                ("CORP_ID", "7"),
                ("PATH", "/bin"),
                ("InternalSecret", "hunter2"),
            ];
            let found = known.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| OsString::from(value))
        };
        assert_eq!(forwarded(own), ["CORP_ID", "ABSENT", "PATH"]);
        let found = of_agent(own);
        let names: Vec<_> = found
            .iter()
            .map(|(name, _)| name.to_str().unwrap())
            .collect();
        assert_eq!(
            names,
            [
                "CORP_ID",
                "MAYFLY_DEADLINE_SECONDS",
                "MAYFLY_ENV_FORWARD",
                "MAYFLY_GRACE_PERIOD_SECONDS",
                "PATH"
            ]
        );
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
