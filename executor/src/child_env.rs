//! The environment of tools and scripts: an allow-list of the executor's own, plus the run's variables.
//!
//! The executor's environment holds the platform's secrets and the job data. Children get only the variables that are
//! named here or in the operator's configuration. The variables in `EPHEMERAL_JOB_ENV_VARS` come from the job document,
//! like the run's other variables. They never reach the executor's own environment. Variables from a config map of the
//! run have a prefix in the executor's environment, so that the executor ignores them. Children get them without the
//! prefix.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::Path;

use clap::{Arg, CommandFactory as _};
use job_contract::pairs::parse_pairs;
use job_contract::{Exit, JobData, env};
use percent_encoding::percent_decode_str;

use crate::config::Config;
use crate::error::StepError;
use crate::identity::BROUGHT_FOR_AWS;
use crate::jvm_settings::{self, CA_VARIABLES};

/// Names that every process needs to run, and those that identify the pod.
const INHERITED: &[&str] = &[
    "HOME",
    "LANG",
    "LANGUAGE",
    "LOGNAME",
    "PATH",
    "SHELL",
    "TERM",
    "TMPDIR",
    "TZ",
    "USER",
    // Certificates and proxies, in every spelling tools read.
    "ALL_PROXY",
    "CURL_CA_BUNDLE",
    "FTP_PROXY",
    "GIT_SSL_CAINFO",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "NODE_EXTRA_CA_CERTS",
    "NO_PROXY",
    "REQUESTS_CA_BUNDLE",
    "SSL_CERT_DIR",
    "SSL_CERT_FILE",
    "all_proxy",
    "ftp_proxy",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "AWS_DEFAULT_REGION",
    "AWS_EC2_METADATA_DISABLED",
    "AWS_REGION",
    "AWS_STS_REGIONAL_ENDPOINTS",
    "KUBERNETES_SERVICE_HOST",
    "KUBERNETES_SERVICE_PORT",
    env::RUN_MARK,
    // Settings of the tool that an operator bakes into the image.
    "TF_CLI_CONFIG_FILE",
    "TF_PLUGIN_CACHE_DIR",
];

/// Workload identity, as the webhooks of the clouds inject it: names of files, roles and endpoints. An operator can keep it from
/// children.
const POD_IDENTITY: &[&str] = &[
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_ROLE_ARN",
    "AWS_ROLE_SESSION_NAME",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AZURE_AUTHORITY_HOST",
    "AZURE_CLIENT_ID",
    "AZURE_FEDERATED_TOKEN_FILE",
    "AZURE_TENANT_ID",
    "GOOGLE_APPLICATION_CREDENTIALS",
];

const INHERITED_PREFIXES: &[&str] = &["LC_"];

/// Settings for steps without interaction.
const AUTOMATION: &[(&str, &str)] = &[
    ("CHECKPOINT_DISABLE", "1"),
    ("TF_IN_AUTOMATION", "1"),
    ("TF_INPUT", "0"),
];

/// The environment from which every child of this run starts.
#[derive(Clone, Default)]
pub struct ChildEnv {
    inherited: BTreeMap<OsString, OsString>,
    run: BTreeMap<String, String>,
}

/// Values are the user's, and may be secret. Only names are shown.
impl std::fmt::Debug for ChildEnv {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set()
            .entries(self.inherited.keys())
            .entries(self.run.keys())
            .finish()
    }
}

impl ChildEnv {
    /// Picks from `own`, the executor's environment, the variables that children may see, and adds the run's variables.
    pub fn new(
        own: impl IntoIterator<Item = (OsString, OsString)>,
        forward: &[String],
        job: &JobData,
    ) -> Result<Self, StepError> {
        let is_allowed = |name: &OsStr| {
            name.to_str().is_some_and(|name| {
                let listed = INHERITED.contains(&name)
                    || POD_IDENTITY.contains(&name)
                    || INHERITED_PREFIXES
                        .iter()
                        .any(|prefix| name.starts_with(prefix))
                    || forward.iter().any(|extra| extra.trim() == name);
                // Secrets are never passed on, even if a workspace or the operator lists them.
                listed && !env::is_secret(name)
            })
        };
        let (for_children, own): (Vec<_>, Vec<_>) = own
            .into_iter()
            .partition(|(name, _)| name_for_children(name).is_some());
        let mut env = Self {
            inherited: own
                .into_iter()
                .filter(|(name, _)| is_allowed(name))
                .collect(),
            run: AUTOMATION
                .iter()
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
                .collect(),
        };
        // A stock launcher sets these on the container, where the run's own variables override them.
        let mapped = for_children.iter().filter_map(|(name, value)| {
            Some((
                name_for_children(name)?.to_owned(),
                value.to_str()?.to_owned(),
            ))
        });
        let extra = mapped.chain(extra_variables(job));
        let extra = extra.filter(|(name, _)| !env::SECRETS.contains(&name.as_str()));
        for (name, value) in extra.chain(job.environment_variables.clone()) {
            env.set(&name, &value)?;
        }
        Ok(env)
    }

    /// Sets a variable of the run.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), StepError> {
        check(name, value)?;
        self.run.insert(name.to_owned(), value.to_owned());
        Ok(())
    }

    /// Takes a variable away, whoever has set it.
    pub(crate) fn unset(&mut self, name: &str) {
        self.run.remove(name);
        self.inherited.remove(OsStr::new(name));
    }

    /// Takes away what a cloud has injected into the pod for its identity, except for names in `forward`.
    pub(crate) fn keep_pod_identity(&mut self, forward: &[String]) {
        for name in POD_IDENTITY {
            if !forward.iter().any(|extra| extra.trim() == *name) {
                self.inherited.remove(OsStr::new(name));
            }
        }
    }

    /// Takes away what the pod has for AWS. Libraries would use it instead of the session of the run's role.
    pub(crate) fn keep_aws_credentials(&mut self) {
        let of_pod = POD_IDENTITY.iter().filter(|name| name.starts_with("AWS_"));
        let of_session = ["AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"];
        for name in of_pod.chain(BROUGHT_FOR_AWS).chain(&of_session) {
            self.inherited.remove(OsStr::new(name));
        }
    }

    /// Whether the run itself sets a variable, and not the pod.
    pub(crate) fn is_of_run(&self, name: &str) -> bool {
        self.run.contains_key(name)
    }

    /// Makes children trust the authorities in a file, and no others of the executor's.
    pub(crate) fn trust(&mut self, file: &Path) -> Result<(), StepError> {
        jvm_settings::check_authorities(file).map_err(|wrong| {
            StepError::new(
                Exit::BadConfiguration,
                format!("`{}`: {wrong}", env::RUN_CA_FILE),
            )
        })?;
        self.inherited.remove(OsStr::new("SSL_CERT_DIR"));
        let names = CA_VARIABLES.map(|name| (name.into(), file.into()));
        self.inherited.extend(names);
        Ok(())
    }

    /// Logins of proxies.
    pub(crate) fn proxy_secrets(&self) -> Vec<String> {
        let proxies = self.inherited().filter_map(|(name, value)| {
            let name = name.to_str()?.to_ascii_lowercase();
            name.ends_with("_proxy").then_some(value.to_str()?)
        });
        proxies.flat_map(passwords).collect()
    }

    /// The same environment without the variables whose names begin with `prefix`, whoever has set them.
    pub(crate) fn without_prefix(&self, prefix: &str) -> Self {
        let mut env = self.clone();
        env.run.retain(|name, _| !name.starts_with(prefix));
        env.inherited
            .retain(|name, _| !name.as_encoded_bytes().starts_with(prefix.as_bytes()));
        env
    }

    /// The value that children see.
    pub fn get(&self, name: &str) -> Option<&OsStr> {
        self.run.get(name).map(OsStr::new).or_else(|| {
            self.inherited
                .get(OsStr::new(name))
                .map(OsString::as_os_str)
        })
    }

    /// The executor's own `PATH`: tools and scripts cannot replace it (contract 4.4).
    pub fn path(&self) -> OsString {
        self.inherited
            .get(OsStr::new("PATH"))
            .cloned()
            .unwrap_or_default()
    }

    /// Lets children find the programs of a folder before others.
    pub(crate) fn put_first_in_path(&mut self, folder: &Path) {
        let mut path = folder.as_os_str().to_owned();
        let rest = self.path();
        if !rest.is_empty() {
            path.push(":");
            path.push(rest);
        }
        self.inherited.insert("PATH".into(), path);
    }

    /// The environment of the executor's own helpers, such as git. It holds no variable of the run.
    pub fn inherited(&self) -> impl Iterator<Item = (&OsStr, &OsStr)> {
        self.inherited
            .iter()
            .map(|(name, value)| (name.as_os_str(), value.as_os_str()))
    }

    /// All variables of a child.
    pub fn iter(&self) -> impl Iterator<Item = (&OsStr, &OsStr)> {
        let inherited = self.inherited().filter(|(name, _)| {
            !name
                .to_str()
                .is_some_and(|name| self.run.contains_key(name) && !is_fixed(name))
        });
        let run = self.run.iter().filter(|(name, _)| !is_fixed(name));
        inherited.chain(run.map(|(name, value)| (OsStr::new(name), OsStr::new(value))))
    }
}

/// The password in the address of a proxy, as it is there and as it is.
fn passwords(address: &str) -> Vec<String> {
    let (_, rest) = address.split_once("://").unwrap_or(("", address));
    let login = rest.rsplit_once('@').map(|(login, _)| login);
    let Some((_, password)) = login.and_then(|login| login.split_once(':')) else {
        return Vec::new();
    };
    let decoded = percent_decode_str(password).decode_utf8_lossy();
    let both = [password.to_owned(), decoded.into_owned()];
    both.into_iter().filter(|text| !text.is_empty()).collect()
}

/// The name that children see for a variable of the executor's environment that is meant for children alone.
fn name_for_children(name: &OsStr) -> Option<&str> {
    let name = name.to_str()?.strip_prefix(env::FOR_CHILDREN_PREFIX)?;
    (!name.is_empty()).then_some(name)
}

/// Whether the executor's own value overrides the run's. With the run mark, a launcher finds processes that a killed
/// executor left.
fn is_fixed(name: &str) -> bool {
    ["PATH", env::RUN_MARK].contains(&name)
}

/// Refuses a variable that no environment can hold.
fn check(name: &str, value: &str) -> Result<(), StepError> {
    let limit = env::MAX_ENV_STRING_BYTES;
    let size = name.len() + value.len() + 2;
    let problem = if name.is_empty() || name.contains(['=', '\0']) {
        "has a name no process can have".to_owned()
    } else if value.contains('\0') {
        "holds a NUL character".to_owned()
    } else if size > limit {
        format!("is {size} bytes long, the limit is {limit}")
    } else {
        return Ok(());
    };
    let name = name.escape_debug();
    Err(StepError::user(format!(
        "environment variable `{name}` {problem}"
    )))
}

/// The pairs of `EPHEMERAL_JOB_ENV_VARS` (contract 3.4).
pub(crate) fn extra_variables(job: &JobData) -> impl Iterator<Item = (String, String)> + use<> {
    let pairs = job.environment_variables.get(env::EPHEMERAL_ENV);
    let pairs = pairs.map(|text| parse_pairs(text)).unwrap_or_default();
    pairs.into_iter().filter(|(name, _)| !name.is_empty())
}

/// Names in the run's `EPHEMERAL_JOB_ENV_VARS` that have no effect on the executor, because they are its own settings.
pub fn ineffective_variables(job: &JobData) -> Vec<String> {
    let command = Config::command();
    let settings: Vec<&OsStr> = command.get_arguments().filter_map(Arg::get_env).collect();
    extra_variables(job)
        .map(|(name, _)| name)
        .filter(|name| settings.contains(&OsStr::new(name)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own(pairs: &[(&str, &str)]) -> Vec<(OsString, OsString)> {
        pairs
            .iter()
            .map(|(name, value)| (name.into(), value.into()))
            .collect()
    }

    fn job(pairs: &[(&str, &str)]) -> JobData {
        JobData {
            environment_variables: pairs
                .iter()
                .map(|(n, v)| ((*n).to_owned(), (*v).to_owned()))
                .collect(),
            ..JobData::default()
        }
    }

    #[test]
    fn passwords_of_proxies_are_secrets() {
        let proxies = own(&[
            ("https_proxy", "http://me:p%40ss@p:1"),
            ("HTTP_PROXY", "http://p:1"),
        ]);
        let env = ChildEnv::new(proxies, &[], &JobData::default()).unwrap();
        assert_eq!(env.proxy_secrets(), ["p%40ss", "p@ss"]);
    }

    #[test]
    fn only_listed_names_reach_a_child() {
        let own = own(&[
            ("PATH", "/bin"),
            ("LC_ALL", "C"),
            ("InternalSecret", "s"),
            (env::LEASE_TOKEN, "s"),
            ("EphemeralJobData", "d"),
            ("AwsTerraformStateSecretKey", "k"),
            ("OTHER", "o"),
            ("EXTRA", "e"),
        ]);
        let job = job(&[(
            "EPHEMERAL_JOB_ENV_VARS",
            "WANTED=w; InternalSecret=x;OTHER=mine",
        )]);
        let forward = ["EXTRA", "InternalSecret", env::LEASE_TOKEN].map(str::to_owned);
        let env = ChildEnv::new(own, &forward, &job).unwrap();
        let names: Vec<_> = env.iter().map(|(name, _)| name.to_str().unwrap()).collect();
        assert_eq!(
            names,
            [
                "EXTRA",
                "LC_ALL",
                "PATH",
                "CHECKPOINT_DISABLE",
                "EPHEMERAL_JOB_ENV_VARS",
                "OTHER",
                "TF_INPUT",
                "TF_IN_AUTOMATION",
                "WANTED",
            ]
        );
        assert_eq!(env.get("OTHER").unwrap(), "mine");
    }

    /// A stock executor's container has the first value, and its tool gets the second one instead.
    #[test]
    fn variables_of_the_same_name_override_extra_variables_of_the_document() {
        let own = own(&[("AWS_REGION", "of the pod"), ("HTTPS_PROXY", "of the pod")]);
        let job = job(&[
            (
                "EPHEMERAL_JOB_ENV_VARS",
                "AWS_REGION=extra;STAGE=extra;PATH=/evil;URL=a=b; =x",
            ),
            ("STAGE", "of the run"),
        ]);
        let env = ChildEnv::new(own, &[], &job).unwrap();
        let all: BTreeMap<_, _> = env.iter().collect();
        let of = |name: &str| all.get(OsStr::new(name)).and_then(|value| value.to_str());
        assert_eq!(of("AWS_REGION"), Some("extra"));
        assert_eq!(of("STAGE"), Some("of the run"));
        assert_eq!(of("URL"), Some("a=b"));
        assert_eq!(of("HTTPS_PROXY"), Some("of the pod"));
        assert_eq!(of("PATH"), None);
        // The executor's own helpers do not get them.
        let inherited: Vec<_> = env.inherited().map(|(_, value)| value).collect();
        assert_eq!(inherited, ["of the pod", "of the pod"]);
    }

    /// Precedence is that of a container's environment: config map, container, document.
    #[test]
    fn values_of_the_runs_config_map_reach_children_only_and_are_overridden() {
        let own = own(&[
            ("AWS_REGION", "of the pod"),
            ("PATH", "/bin"),
            ("MAYFLY_RUN_ENV_", "nameless"),
            ("MAYFLY_RUN_ENV_AWS_REGION", "of the map"),
            ("MAYFLY_RUN_ENV_InternalSecret", "of the map"),
            ("MAYFLY_RUN_ENV_LOCALDOMAIN", "of the map"),
            ("MAYFLY_RUN_ENV_PATH", "/evil"),
            ("MAYFLY_RUN_ENV_STAGE", "of the map"),
            ("MAYFLY_RUN_ENV_TEAM", "of the map"),
        ]);
        let job = job(&[
            ("EPHEMERAL_JOB_ENV_VARS", "STAGE=extra;TEAM=extra"),
            ("TEAM", "of the run"),
        ]);
        let forward = ["MAYFLY_RUN_ENV_TEAM".to_owned()];
        let env = ChildEnv::new(own, &forward, &job).unwrap();
        let all: BTreeMap<_, _> = env.iter().collect();
        let of = |name: &str| all.get(OsStr::new(name)).and_then(|value| value.to_str());
        assert_eq!(of("AWS_REGION"), Some("of the map"));
        assert_eq!(of("LOCALDOMAIN"), Some("of the map"));
        assert_eq!(of("STAGE"), Some("extra"));
        assert_eq!(of("TEAM"), Some("of the run"));
        assert_eq!(of("PATH"), Some("/bin"));
        assert_eq!(of("InternalSecret"), None);
        assert!(
            !all.keys()
                .any(|name| name.to_str().unwrap().starts_with("MAYFLY_"))
        );
        // The executor's own helpers do not get them.
        let inherited: Vec<_> = env.inherited().map(|(_, value)| value).collect();
        assert_eq!(inherited, ["of the pod", "/bin"]);
    }

    #[test]
    fn settings_of_the_executor_among_extra_variables_are_found() {
        let extra = "TerrakubeEnableColorOutput=false;TF_LOG=debug;TerrakubeRedisSSL=false;OTHER=x";
        let job = job(&[("EPHEMERAL_JOB_ENV_VARS", extra)]);
        assert_eq!(
            ineffective_variables(&job),
            ["TerrakubeEnableColorOutput", "TerrakubeRedisSSL"]
        );
    }

    #[test]
    fn variables_of_the_run_override_all_but_path_and_run_mark() {
        let env = ChildEnv::new(
            own(&[
                ("PATH", "/bin"),
                ("AWS_ROLE_ARN", "pod"),
                (env::RUN_MARK, "/runs/1"),
            ]),
            &[],
            &job(&[
                ("PATH", "/evil"),
                ("AWS_ROLE_ARN", "run"),
                (env::RUN_MARK, "/runs/2"),
            ]),
        )
        .unwrap();
        let all: BTreeMap<_, _> = env.iter().collect();
        assert_eq!(all[OsStr::new("PATH")], "/bin");
        assert_eq!(all[OsStr::new(env::RUN_MARK)], "/runs/1");
        assert_eq!(all[OsStr::new("AWS_ROLE_ARN")], "run");
    }

    #[test]
    fn an_operator_can_keep_what_a_cloud_has_injected() {
        let pod = own(&[
            ("AWS_REGION", "r"),
            ("AWS_ROLE_ARN", "pod"),
            ("AWS_WEB_IDENTITY_TOKEN_FILE", "/pod"),
            ("GOOGLE_APPLICATION_CREDENTIALS", "/pod"),
        ]);
        let job = job(&[("AWS_WEB_IDENTITY_TOKEN_FILE", "/run")]);
        let forward = ["AWS_ROLE_ARN".to_owned()];
        let mut env = ChildEnv::new(pod, &forward, &job).unwrap();
        assert!(!env.is_of_run("AWS_ROLE_ARN") && env.is_of_run("AWS_WEB_IDENTITY_TOKEN_FILE"));
        env.keep_pod_identity(&forward);
        let of = |name: &str| env.get(name).and_then(OsStr::to_str);
        assert_eq!(of("AWS_REGION"), Some("r"));
        assert_eq!(of("AWS_ROLE_ARN"), Some("pod"));
        assert_eq!(of("AWS_WEB_IDENTITY_TOKEN_FILE"), Some("/run"));
        assert_eq!(of("GOOGLE_APPLICATION_CREDENTIALS"), None);
    }

    #[test]
    fn variables_that_no_environment_can_hold_are_named() {
        let fail = |name: &str, value: &str| {
            ChildEnv::new(own(&[]), &[], &job(&[(name, value)])).unwrap_err()
        };
        for (name, value, problem) in [
            ("A=B", "x", "`A=B` has a name no process can have"),
            ("A", "x\0", "`A` holds a NUL character"),
            ("A", &"x".repeat(131_072), "`A` is 131075 bytes long"),
        ] {
            let error = fail(name, value).to_string();
            assert!(error.contains(problem), "{error}");
        }
    }
}
