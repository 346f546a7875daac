//! Settings of the executor itself, from its environment. The run is described by the job data alone.

use std::env::{VarError, var as env_var};
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use artifact_store::{HubSettings, HubStore, RequestTiming, Store, StoreArgs};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, Args, CommandFactory as _, Parser};
use git_address::{AllowList, Match, RuleError};
use job_contract::identity::{self, Identities};
use job_contract::provider_cache::CacheMode;
use job_contract::{Exit, JobData, Records, StepType, env};
use platform::lease::{LeaseArgs, LeaseConfig};
use platform::redis::{Redis, RedisArgs};
use platform::terrakube::{TerrakubeArgs, TerrakubeConfig};
use provider_store::Access;
use reqwest::Url;
use runtime::setting::{ReadSetting as _, SettingError, parse_over_environment};
use runtime::telemetry::LogFormat;
use secret_stores::AllowList as RoleList;

use crate::deploy_role::{Delivery, LONGEST_SECONDS, SHORTEST_SECONDS};
use crate::error::StepError;
use crate::stop::Budget;
use crate::tool::{Selection, SignaturePolicy};
use crate::workspace::ArchiveLimits;

/// Runs one Terraform or OpenTofu step and exits.
///
/// The step is described by a job document in the environment, as Terrakube sends it. Started as the one
/// container of a Kubernetes Job, or by `api-launcher run` on a single machine.
#[derive(Debug, Parser)]
#[command(
    name = "executor",
    version,
    after_help = "`executor check-secret-stores` logs in at each store of secrets, reads no secret, and exits.\n\n\
                  Exit codes: 0 done, 1 the tool or a script failed, 2 a defect of the executor, 64 bad \
                  configuration, 65 bad job data, 75 infrastructure failed before anything was started, 76 \
                  another executor holds the step, 128+n ended by signal n. Unless MAYFLY_OUTCOME_EXIT_CODE is \
                  true, every outcome that was reported ends with 0.\n\n\
                  Secrets are given by the environment and are no options, because every user of a machine can \
                  read command lines: EphemeralJobData (or a file, --job-data-file), InternalSecret (or a file, InternalSecretFile), MAYFLY_LEASE_TOKEN, MAYFLY_REPORT_KEY, TerrakubeRedisPassword, \
                  TerrakubeRedisSentinelPassword and the keys of the artifact store."
)]
pub struct Config {
    #[command(flatten)]
    pub job: JobConfig,
    #[command(flatten)]
    pub platform: TerrakubeArgs,
    #[command(flatten)]
    pub lease: LeaseArgs,
    #[command(flatten)]
    pub redis: RedisArgs,
    #[command(flatten)]
    pub store: StoreConfig,
    #[command(flatten)]
    pub tools: ToolsConfig,
    #[command(flatten)]
    pub source: SourceConfig,
    #[command(flatten)]
    pub run: RunConfig,
    #[command(flatten)]
    pub identity: IdentityConfig,
    #[command(flatten)]
    pub deploy_role: DeployRoleConfig,
    #[command(flatten)]
    pub telemetry: TelemetryConfig,
}

/// Where the job document comes from.
#[derive(Args)]
#[command(next_help_heading = "Job data")]
pub struct JobConfig {
    /// The job document: base64 of JSON, also URL-safe, line-wrapped or zstd-compressed.
    #[arg(long, env = env::JOB_DATA, hide_env_values = true, hide = true)]
    pub job_data: Option<String>,
    /// A file that holds the job document. The executor removes it after reading, because tools and scripts could read
    /// it too.
    #[arg(long, env = env::JOB_DATA_FILE)]
    pub job_data_file: Option<PathBuf>,
    /// SHA-256 of the job data as they are given, in hexadecimal. The executor refuses other job data.
    #[arg(long, env = env::JOB_DATA_DIGEST)]
    pub job_data_sha256: Option<String>,
}

/// Less than the claim that the chart makes.
pub(crate) const PROVIDER_CACHE_BYTES: u64 = 16 * 1024 * 1024 * 1024;
/// Room for what scripts build for the apply.
const PLAN_FILES_BYTES: u64 = 512 * 1024 * 1024;

impl JobConfig {
    /// Adds the further parts of job data that did not fit into one variable; `own` reads a variable.
    fn complete(&mut self, own: impl Fn(&str) -> Option<String>) {
        if let Some(data) = &mut self.job_data {
            data.extend((1..).map_while(|part| own(&env::job_data_part(part))));
        }
    }
}

/// The document may hold secrets, so only its presence is shown.
impl std::fmt::Debug for JobConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JobConfig")
            .field("job_data", &self.job_data.is_some())
            .field("job_data_file", &self.job_data_file)
            .field("job_data_sha256", &self.job_data_sha256)
            .finish()
    }
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Storage")]
pub struct StoreConfig {
    #[command(flatten)]
    pub artifacts: StoreArgs,
    /// Root of the local store, the local platform's records and the tool cache
    /// [default: `$HOME/.terraform-spring-boot`].
    #[arg(long, env = env::DATA_DIR)]
    pub data_dir: Option<PathBuf>,
    /// Folder for the run's workspace and generated credentials; the executor empties it at the end of the run
    /// [default: `executor` below the data directory].
    #[arg(long, env = env::WORK_DIR)]
    pub work_dir: Option<PathBuf>,
    /// Folder for the work trees of workspaces. A work tree has the same path in all steps. Executors that share the
    /// folder take turns in a workspace [default: `workspaces` below the work folder].
    #[arg(long, env = env::CHECKOUT_DIR)]
    pub checkout_dir: Option<PathBuf>,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Tools")]
pub struct ToolsConfig {
    /// Folder of installed tools, shared by many executors [default: the data directory].
    #[arg(long, env = env::TOOL_CACHE_DIR)]
    pub tool_cache_dir: Option<PathBuf>,
    /// Folder of packages of providers, shared by many executors [default: the data directory, and in a pod the folder of the
    /// plugin cache].
    #[arg(long, env = env::PROVIDER_CACHE_DIR)]
    pub provider_cache_dir: Option<PathBuf>,
    /// Size of these packages, in bytes, from which on those are removed that were not used for the longest time.
    #[arg(long, env = env::PROVIDER_CACHE_MAX_BYTES, default_value_t = PROVIDER_CACHE_BYTES)]
    pub provider_cache_max_bytes: u64,
    /// How a run uses packages in a folder that it cannot write: `link` where they are, `copy`, or `auto`, which links if the folder
    /// is on a disk of this machine. A folder that it can write is always copied.
    #[arg(long, env = env::PROVIDER_CACHE_ACCESS, default_value = "auto")]
    pub provider_cache_access: Access,
    /// For how many seconds nothing may move on a volume with packages or tools. Then the run goes on without it.
    #[arg(long, env = env::CACHE_TIMEOUT_SECONDS, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..))]
    pub cache_timeout_seconds: u64,
    /// Who fills that folder: `runs`, or `fill`, with which a run only reads it and its final report names what it lacked.
    #[arg(long, env = env::PROVIDER_CACHE_MODE, default_value = CacheMode::Runs.name())]
    pub provider_cache_mode: CacheMode,
    /// Whether runs share git repositories of modules in that folder. Whoever can read it can read them [default: true, and
    /// false in a pod].
    #[arg(long, env = env::MODULE_CACHE)]
    pub module_cache: Option<bool>,
    /// How many packages of locked providers are fetched at a time before `init`; 0 leaves all of them to the tool.
    #[arg(long, env = env::PROVIDER_FETCHES, default_value_t = 4)]
    pub provider_fetches: usize,
    /// Prefer an `installed` tool that satisfies the version range, or the `newest` release that does.
    #[arg(long, env = env::TOOL_SELECTION, default_value = "newest")]
    pub tool_selection: Selection,
    /// Index of Terraform releases [default: HashiCorp's].
    #[arg(long, env = env::TERRAFORM_RELEASES_URL)]
    pub terraform_releases_url: Option<Url>,
    /// Index of OpenTofu releases [default: --custom-tofu-releases-url].
    #[arg(long, env = env::TOFU_RELEASES_URL)]
    pub tofu_releases_url: Option<Url>,
    /// The same, under the name that the platform uses [default: the platform's `/tofu/index.json`, else OpenTofu's own].
    #[arg(long, env = env::CUSTOM_TOFU_RELEASES_URL)]
    pub custom_tofu_releases_url: Option<Url>,
    /// Mirror whose scheme, host and path prefix replace the scheme and host of every download address.
    #[arg(long, env = env::RELEASE_MIRROR_URL)]
    pub release_mirror_url: Option<Url>,
    /// Whether a release needs a valid signature, or only has its signature checked if it has one.
    #[arg(long, env = env::RELEASE_SIGNATURES, default_value = "offered")]
    pub release_signatures: SignaturePolicy,
    /// OpenPGP keys, armoured or binary, that are trusted in addition to the built-in ones.
    #[arg(long, env = env::RELEASE_KEYS_FILE)]
    pub release_keys_file: Option<PathBuf>,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Source")]
pub struct SourceConfig {
    /// `known_hosts` file. If it is set, it must list the SSH server keys.
    #[arg(long, env = env::SSH_KNOWN_HOSTS)]
    pub ssh_known_hosts_file: Option<PathBuf>,
    /// Regular expression of addresses of repositories. Runs fetch from no others, also not submodules and modules. Empty
    /// allows all.
    #[arg(long, env = env::ALLOWED_VCS_URL_REGEX, value_parser = allowed_urls)]
    pub allowed_vcs_url_regex: Option<String>,
    /// Whether this expression must match the whole address (`full`), or any part of it (`search`).
    #[arg(long, env = env::ALLOWED_VCS_URL_MATCH, default_value = "full")]
    pub allowed_vcs_url_match: Match,
    /// Largest unpacked size of fetched content, in bytes.
    #[arg(long, env = env::ARCHIVE_MAX_BYTES, default_value_t = ArchiveLimits::default().max_bytes)]
    pub archive_max_bytes: u64,
    /// Largest number of entries in fetched content.
    #[arg(long, env = env::ARCHIVE_MAX_ENTRIES, default_value_t = ArchiveLimits::default().max_entries)]
    pub archive_max_entries: u64,
    /// Extension repository whose scripts and folders the run's own scripts can use.
    #[arg(long, env = env::TOOLS_REPOSITORY)]
    pub tools_repository: Option<String>,
    /// Branch of the extension repository.
    #[arg(long, env = env::TOOLS_BRANCH)]
    pub tools_branch: Option<String>,
}

/// Empty is no rule. Blanks are a mistake: they must not allow everything.
fn allowed_urls(text: &str) -> Result<String, RuleError> {
    if !text.is_empty() {
        AllowList::new(text, Match::Full)?;
    }
    Ok(text.to_owned())
}

impl SourceConfig {
    /// The addresses that runs may fetch from; `None` is all of them.
    pub(crate) fn allow_list(&self) -> Result<Option<Arc<AllowList>>, StepError> {
        let pattern = self.allowed_vcs_url_regex.as_deref();
        let Some(pattern) = pattern.filter(|pattern| !pattern.is_empty()) else {
            return Ok(None);
        };
        let list = AllowList::new(pattern, self.allowed_vcs_url_match)
            .map_err(|error| unusable(format!("`{}`: {error}", env::ALLOWED_VCS_URL_REGEX)))?;
        Ok(Some(Arc::new(list)))
    }
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Run")]
pub struct RunConfig {
    /// `true` puts the outcome in the exit code.
    #[arg(long, env = env::OUTCOME_EXIT_CODE, value_parser = clap::builder::BoolishValueParser::new(),
          default_value = "false", action = clap::ArgAction::Set)]
    pub outcome_exit_code: bool,
    /// `false` turns the colours of the tool's output off.
    #[arg(long, env = env::COLOR_OUTPUT, value_parser = clap::builder::BoolishValueParser::new(),
          default_value = "true", action = clap::ArgAction::Set)]
    pub color_output: bool,
    /// `false` leaves out what only a platform's user interface reads: the list of changes in the job context and the
    /// live view, and the state as JSON. The plan in the log is then the tool's own output.
    #[arg(long, env = env::STRUCTURED_OUTPUT, value_parser = clap::builder::BoolishValueParser::new(),
          default_value = "true", action = clap::ArgAction::Set)]
    pub structured_output: bool,
    /// `true` suppresses status reports.
    #[arg(long, env = env::DISABLE_ACKNOWLEDGE, value_parser = clap::builder::BoolishValueParser::new(),
          default_value = "false", action = clap::ArgAction::Set)]
    pub disable_acknowledge: bool,
    /// `true` sends the log to the platform's API instead of Redis.
    #[arg(long, env = env::LOG_VIA_API, value_parser = clap::builder::BoolishValueParser::new(),
          default_value = "false", action = clap::ArgAction::Set)]
    pub log_via_api: bool,
    /// Limit of the step's part of the live log, in bytes. Each line counts 128 bytes more than its text.
    #[arg(long, env = env::LIVE_LOG_MAX_BYTES, default_value_t = 32 * 1024 * 1024)]
    pub live_log_max_bytes: u64,
    /// `true` runs plans that come with policies, and steps that evaluate policies, without evaluating any. Mandatory
    /// policies are skipped too.
    #[arg(long, env = env::IGNORE_POLICIES, value_parser = clap::builder::BoolishValueParser::new(),
          default_value = "false", action = clap::ArgAction::Set)]
    pub ignore_policies: bool,
    /// Seconds from the first SIGTERM to the SIGKILL
    /// [default: 300 for apply and destroy, 60 otherwise].
    #[arg(long, env = env::GRACE_PERIOD_SECONDS)]
    pub grace_period_seconds: Option<u64>,
    /// Minutes that the run may take. Then the executor stops it and stores its state.
    #[arg(long, env = env::MAX_DURATION_MINUTES, default_value_t = 360)]
    pub max_duration_minutes: u64,
    /// The same limit in seconds. It overrides the minutes; 0 means no limit.
    #[arg(long, env = env::DEADLINE_SECONDS)]
    pub deadline_seconds: Option<u64>,
    /// Seconds without a line in the log before the executor stops the run; 0 means no limit.
    #[arg(long, env = env::SILENCE_SECONDS, default_value_t = 0)]
    pub silence_seconds: u64,
    /// Percentage of the memory limit at which the executor interrupts the tool, so that the state can be stored; 0
    /// means never.
    #[arg(long, env = env::MEMORY_STOP_PERCENT, default_value_t = 80,
          value_parser = clap::value_parser!(u64).range(0..=100))]
    pub memory_stop_percent: u64,
    /// Where the final report is written.
    #[arg(long, env = env::TERMINATION_LOG, default_value = TERMINATION_LOG_PATH)]
    pub termination_log: PathBuf,
    /// Extra names, comma-separated, that tools and scripts inherit from this environment.
    #[arg(long, env = env::ENV_FORWARD, value_delimiter = ',')]
    pub env_forward: Vec<String>,
    /// File that receives a copy of the run's log.
    #[arg(long, env = env::LOG_FILE)]
    pub log_file: Option<PathBuf>,
    /// Where the step's record and its claim are kept: `platform`; `shared`, a data folder that all pods share; or
    /// `pod`, whose step must never start twice [default: the platform; outside of pods the data directory].
    #[arg(long, env = env::RECORDS, value_parser = records)]
    pub records: Option<Records>,
    /// `true` lets an apply use a plan without a record, as other executors make it.
    #[arg(long, env = env::MIXED_FLEET, value_parser = clap::builder::BoolishValueParser::new(),
          default_value = "false", action = clap::ArgAction::Set)]
    pub mixed_fleet: bool,
    /// `false` does not leave the files that a plan step has changed to the apply of its plan.
    #[arg(long, env = env::PLAN_FILES, value_parser = clap::builder::BoolishValueParser::new(),
          default_value = "true", action = clap::ArgAction::Set)]
    pub plan_files: bool,
    /// PEM file with the authorities that the tool, git, scripts and hooks trust [default: the executor's own].
    #[arg(long, env = env::RUN_CA_FILE)]
    pub run_ca_file: Option<PathBuf>,
    /// Folder of the operator's hooks, which run around the tool in every run.
    #[arg(long, env = env::HOOKS_DIR)]
    pub hooks_dir: Option<PathBuf>,
    /// Largest size of these files together, in bytes.
    #[arg(long, env = env::PLAN_FILES_MAX_BYTES, default_value_t = PLAN_FILES_BYTES)]
    pub plan_files_max_bytes: u64,
    /// Name of the pod, written into the claim.
    #[arg(long, env = env::POD_NAME)]
    pub pod_name: Option<String>,
    /// UID of the pod, written into the claim and the final report.
    #[arg(long, env = env::POD_UID)]
    pub pod_uid: Option<String>,
}

fn records(text: &str) -> Result<Records, &'static str> {
    Records::parse(text.trim()).ok_or("expected `platform`, `shared` or `pod`")
}

impl RunConfig {
    /// The time from the first SIGTERM to the SIGKILL.
    pub(crate) fn grace_period(&self, step: StepType) -> Duration {
        self.grace_period_seconds
            .map_or(Budget::default_grace(step), Duration::from_secs)
    }

    /// The limits at which the executor stops the run.
    pub(crate) fn limits(&self) -> RunLimits {
        let seconds = |seconds| (seconds > 0).then(|| Duration::from_secs(seconds));
        RunLimits {
            deadline: seconds(
                self.deadline_seconds
                    .unwrap_or_else(|| self.max_duration_minutes.saturating_mul(60)),
            ),
            silence: seconds(self.silence_seconds),
            memory_percent: Some(self.memory_stop_percent).filter(|percent| *percent > 0),
        }
    }
}

/// Whom the run is at the clouds. A launcher or an agent sets these for its pods.
#[derive(Args, Debug)]
#[command(next_help_heading = "Identity")]
pub struct IdentityConfig {
    /// ARN of the role on AWS.
    #[arg(long, env = env::IDENTITY_AWS_ROLE)]
    pub identity_aws_role_arn: Option<String>,
    /// Provider of a workload identity pool on Google Cloud.
    #[arg(long, env = env::IDENTITY_GCP_PROVIDER)]
    pub identity_gcp_provider: Option<String>,
    /// Service account on Google Cloud that the identity acts as.
    #[arg(long, env = env::IDENTITY_GCP_SERVICE_ACCOUNT)]
    pub identity_gcp_service_account: Option<String>,
    /// Id of the application or managed identity on Azure.
    #[arg(long, env = env::IDENTITY_AZURE_CLIENT_ID)]
    pub identity_azure_client_id: Option<String>,
    /// Its tenant.
    #[arg(long, env = env::IDENTITY_AZURE_TENANT_ID)]
    pub identity_azure_tenant_id: Option<String>,
    /// The subscription of runs.
    #[arg(long, env = env::IDENTITY_AZURE_SUBSCRIPTION_ID)]
    pub identity_azure_subscription_id: Option<String>,
    /// Folder of the tokens.
    #[arg(long, env = env::IDENTITY_DIR, default_value = identity::FOLDER)]
    pub identity_dir: PathBuf,
    /// `false` keeps from the tool and scripts what a cloud injects into the pod for its identity.
    #[arg(long, env = env::IDENTITY_PASS_THROUGH, value_parser = clap::builder::BoolishValueParser::new(),
          default_value = "true", action = clap::ArgAction::Set)]
    pub identity_pass_through: bool,
}

impl IdentityConfig {
    /// The identities, or each setting that cannot be used.
    pub(crate) fn identities(&self) -> Result<Identities, Vec<identity::Problem>> {
        Identities::read(|name| match name {
            env::IDENTITY_AWS_ROLE => self.identity_aws_role_arn.clone(),
            env::IDENTITY_GCP_PROVIDER => self.identity_gcp_provider.clone(),
            env::IDENTITY_GCP_SERVICE_ACCOUNT => self.identity_gcp_service_account.clone(),
            env::IDENTITY_AZURE_CLIENT_ID => self.identity_azure_client_id.clone(),
            env::IDENTITY_AZURE_TENANT_ID => self.identity_azure_tenant_id.clone(),
            env::IDENTITY_AZURE_SUBSCRIPTION_ID => self.identity_azure_subscription_id.clone(),
            _ => None,
        })
    }
}

/// Roles on AWS that workspaces may name for their deployment.
#[derive(Args, Debug)]
#[command(next_help_heading = "Deploy roles")]
pub struct DeployRoleConfig {
    /// Patterns of roles that workspaces may name, separated by commas or blanks. Without one, none is allowed.
    #[arg(long, env = env::ASSUMER_ALLOWED_ROLES, default_value = "", hide_default_value = true,
          value_parser = RoleList::parse_roles)]
    pub assumer_allowed_roles: RoleList,
    /// `true` lets the identity of the pod assume roles, if there are no keys. Code of runs can use that identity too.
    #[arg(long, env = env::ASSUMER_POD_IDENTITY, value_parser = clap::builder::BoolishValueParser::new(),
          default_value = "false", action = clap::ArgAction::Set)]
    pub assumer_pod_identity: bool,
    /// External id; `{organizationId}` and `{workspaceId}` are those of the run.
    #[arg(long, env = env::ASSUMER_EXTERNAL_ID)]
    pub assumer_external_id: Option<String>,
    /// Region whose token service is asked.
    #[arg(long, env = env::ASSUMER_REGION, default_value = "us-east-1")]
    pub assumer_region: String,
    /// Seconds that a session lasts, if the workspace does not say it.
    #[arg(long, env = env::ASSUMER_DURATION_SECONDS, default_value_t = 18_000,
          value_parser = clap::value_parser!(u32).range(i64::from(SHORTEST_SECONDS)..=i64::from(LONGEST_SECONDS)))]
    pub assumer_duration_seconds: u32,
    /// How runs get a session: in variables (`env`), by an `endpoint` that renews it, or `auto`.
    #[arg(long, env = env::ASSUMER_DELIVERY, default_value = "auto")]
    pub assumer_delivery: Delivery,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Diagnostics")]
pub struct TelemetryConfig {
    /// Format of diagnostics on stderr [default: `text` on a terminal, else `json`].
    #[arg(long, env = env::LOG_FORMAT)]
    pub log_format: Option<LogFormat>,
    /// Filter of diagnostics, as `tracing` directives.
    #[arg(long, env = env::LOG_FILTER, default_value = "info")]
    pub log_filter: String,
}

/// Settings that cannot be used.
fn unusable(text: impl Into<String>) -> StepError {
    StepError::new(Exit::BadConfiguration, text).with_hint("run `executor --help` for the settings")
}

fn missing_records(records: Option<Records>) -> String {
    match records {
        Some(records) => format!("the setting `{}={}` needs it", env::RECORDS, records.name()),
        None => format!(
            "an executor in a pod keeps its records at the platform, unless `{}` names a folder for them, or `{}=pod` \
             permits records that are lost with the pod",
            env::DATA_DIR,
            env::RECORDS
        ),
    }
}

/// Kubernetes sets it in every container.
const KUBERNETES_SERVICE_HOST: &str = "KUBERNETES_SERVICE_HOST";
const TERRAFORM_RELEASES: &str = "https://releases.hashicorp.com/terraform/index.json";
const TOFU_RELEASES: &str = "https://api.github.com/repos/opentofu/opentofu/releases";

/// Where Kubernetes looks for a container's termination message by default.
pub const TERMINATION_LOG_PATH: &str = "/dev/termination-log";

/// The environment variable of the option that a usage error names. A pod has no command line to correct.
pub fn variable_of(usage: &clap::Error) -> Option<String> {
    if usage.kind() == ErrorKind::InvalidUtf8 {
        // This kind of error names no option.
        let command = Config::command();
        let mut names = command.get_arguments().filter_map(Arg::get_env);
        let name = names.find(|name| matches!(env_var(name), Err(VarError::NotUnicode(_))))?;
        return name.to_str().map(str::to_owned);
    }
    let ContextValue::String(option) = usage.get(ContextKind::InvalidArg)? else {
        return None;
    };
    let long = option
        .trim_start_matches("--")
        .split([' ', '='])
        .next()?
        .to_owned();
    let command = Config::command();
    let argument = command
        .get_arguments()
        .find(|argument| argument.get_long() == Some(&long))?;
    Some(argument.get_env()?.to_string_lossy().into_owned())
}

/// Limits of a run; `None` is no limit.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RunLimits {
    /// Wall-clock time of the run.
    pub(crate) deadline: Option<Duration>,
    /// Time without anything written to the log.
    pub(crate) silence: Option<Duration>,
    /// Percentage of the memory limit at which the tool is interrupted.
    pub(crate) memory_percent: Option<u64>,
}

/// Folders of the executor, resolved once.
#[derive(Clone, Debug)]
pub struct Folders {
    pub home: PathBuf,
    pub data: PathBuf,
    pub work: PathBuf,
    /// Folder of the work trees.
    pub checkouts: PathBuf,
    pub tool_cache: PathBuf,
    /// Packages of providers that runs share. A pod has no folder that others see, unless one is mounted.
    pub provider_cache: Option<PathBuf>,
}

impl StoreConfig {
    /// Opens the store of these settings, or the store of the hub, if it relays the requests of the run and no other store is
    /// set. All errors are reported at once.
    pub(crate) fn open(
        &self,
        folders: &Folders,
        relaying: Option<&LeaseConfig>,
        job: &JobData,
    ) -> Result<Store, StepError> {
        if let Some(lease) = relaying
            && !self.artifacts.state_type.is_set()
        {
            let token = lease.token().clone();
            let settings = HubSettings {
                lease: lease.url().clone(),
                token: Arc::new(move || token.current()),
                organization: job.organization_id.clone(),
                workspace: job.workspace_id.clone(),
                job: job.job_id.clone(),
                step: job.step_id.clone(),
            };
            let store = HubStore::open(settings, &RequestTiming::default())?;
            return Ok(Store::of_hub(store));
        }
        let settings = self.artifacts.resolve(&folders.data);
        let settings =
            settings.map_err(|error| unusable(error.to_string()).with_hint(error.hint()))?;
        Ok(Store::open(&settings)?)
    }
}

impl Config {
    /// Parses a command line, which includes the program's name, over the environment. A blank variable counts as not
    /// set, because charts write empty values for unset ones.
    pub fn parse_over_environment(
        args: impl IntoIterator<Item = OsString>,
    ) -> Result<Self, clap::Error> {
        let mut config: Self = parse_over_environment(args, |argument| {
            // Blanks are no rule that was left out.
            argument
                .get_env()
                .is_none_or(|name| name != env::ALLOWED_VCS_URL_REGEX)
        })?;
        config.job.complete(|name| env_var(name).ok());
        Ok(config)
    }

    /// Resolves the folders from the settings and `HOME`.
    pub fn folders(&self, home: Option<OsString>) -> Result<Folders, StepError> {
        let home = home.filter(|home| !home.is_empty()).map(PathBuf::from);
        let data = match (&self.store.data_dir, &home) {
            (Some(data), _) => data.clone(),
            (None, Some(home)) => home.join(".terraform-spring-boot"),
            (None, None) => {
                let text = format!("neither `{}` nor `HOME` is set", env::DATA_DIR);
                return Err(unusable(text));
            }
        };
        let work = self
            .store
            .work_dir
            .clone()
            .unwrap_or_else(|| data.join("executor"));
        Ok(Folders {
            home: home.unwrap_or_else(|| data.clone()),
            checkouts: self
                .store
                .checkout_dir
                .clone()
                .unwrap_or_else(|| work.join("workspaces")),
            work,
            tool_cache: self
                .tools
                .tool_cache_dir
                .clone()
                .unwrap_or_else(|| data.clone()),
            provider_cache: self
                .tools
                .provider_cache_dir
                .clone()
                .or_else(|| (!self.is_in_pod()).then(|| data.clone())),
            data,
        })
    }

    /// Whether this program runs in a pod. Kubernetes gives every container the address of its API, and Mayfly's
    /// launchers name the pod.
    pub(crate) fn is_in_pod(&self) -> bool {
        self.run.pod_name.is_some() || std::env::var_os(KUBERNETES_SERVICE_HOST).is_some()
    }

    /// Checks that the step's record is kept where the launcher expects it. A pod has no folder that outlives it.
    /// Without a record, the step would be unreported, and a second pod would not know that it started.
    pub fn check_records(&self) -> Result<(), StepError> {
        self.check_records_in(self.is_in_pod())
    }

    fn check_records_in(&self, is_pod: bool) -> Result<(), StepError> {
        let records = self.run.records;
        let has_platform = self.platform.is_set() || self.lease.is_set();
        let missing = match records {
            _ if has_platform => None,
            Some(Records::Pod) => None,
            Some(Records::Platform) => Some(env::API_URL),
            Some(Records::Shared) => self.store.data_dir.is_none().then_some(env::DATA_DIR),
            None => (is_pod && self.store.data_dir.is_none()).then_some(env::API_URL),
        };
        match missing {
            Some(missing) => {
                let why = missing_records(records);
                Err(unusable(format!("`{missing}` is not set, and {why}")))
            }
            None => Ok(()),
        }
    }

    /// The platform's API and its Redis, if they are set. All errors are reported at once.
    pub fn network(&self) -> Result<(Option<TerrakubeConfig>, Option<Redis>), StepError> {
        let mut errors = Vec::new();
        let platform = self.terrakube().unwrap_or_else(|wrong| {
            errors.extend(wrong.iter().map(ToString::to_string));
            None
        });
        let redis = self.redis.resolve().unwrap_or_else(|wrong| {
            errors.extend(wrong.iter().map(ToString::to_string));
            None
        });
        if errors.is_empty() {
            Ok((platform, redis.map(Redis::new)))
        } else {
            Err(unusable(errors.join("; ")))
        }
    }

    /// The platform's API alone, if it is set and its settings are valid.
    pub fn api(&self) -> Option<TerrakubeConfig> {
        self.terrakube().ok().flatten()
    }

    /// The platform's API. With a lease and without its address, the API behind the hub's relay.
    fn terrakube(&self) -> Result<Option<TerrakubeConfig>, Vec<SettingError>> {
        match self.lease.resolve() {
            Ok(None) => self.platform.resolve(),
            Ok(Some(lease)) => self.platform.resolve_leased(lease).map(Some),
            Err(mut errors) => {
                errors.extend(self.platform.resolve().err().into_iter().flatten());
                Err(errors)
            }
        }
    }

    /// Where releases of Terraform and of OpenTofu are listed.
    pub fn release_indexes(&self) -> (Url, Url) {
        let parsed = |text: &str| Url::parse(text).expect("an address");
        let terraform = self.tools.terraform_releases_url.clone();
        let of_platform = || {
            let api = self.platform.api_url()?.trim_end_matches('/');
            Url::parse(&format!("{api}/tofu/index.json")).ok()
        };
        let own = self.tools.tofu_releases_url.clone();
        let custom = || self.tools.custom_tofu_releases_url.clone();
        let tofu = own.or_else(custom).or_else(of_platform);
        (
            terraform.unwrap_or_else(|| parsed(TERRAFORM_RELEASES)),
            tofu.unwrap_or_else(|| parsed(TOFU_RELEASES)),
        )
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn config(args: &[&str]) -> Config {
        Config::parse_from([&["executor"], args].concat())
    }

    #[test]
    fn secrets_are_not_offered_as_options() {
        let help = Config::command().render_long_help().to_string();
        for option in [
            "internal-secret",
            "lease-token",
            "redis-password",
            "secret-key",
            "access-key",
            "--job-data <",
        ] {
            assert!(!help.contains(option), "{option} in {help}");
        }
        for variable in [
            env::INTERNAL_SECRET,
            env::LEASE_TOKEN,
            env::REDIS_PASSWORD,
            env::JOB_DATA,
        ] {
            assert!(help.contains(variable), "{variable} in {help}");
        }
        let named = |hidden: fn(&clap::Arg) -> bool| -> BTreeSet<String> {
            let command = Config::command();
            let hidden = command.get_arguments().filter(|argument| hidden(argument));
            let names = hidden.filter_map(clap::Arg::get_env);
            names
                .map(|name| name.to_str().unwrap().to_owned())
                .collect()
        };
        // The key of reports has no option, and an executor has no token of an agent.
        let without = [env::REPORT_KEY, env::AGENT_TOKEN];
        let secrets = env::SECRETS.iter().filter(|name| !without.contains(name));
        let secrets = secrets.chain([&env::JOB_DATA]);
        let secrets: BTreeSet<_> = secrets.map(|name| (*name).to_owned()).collect();
        assert_eq!(named(clap::Arg::is_hide_env_values_set), secrets);
        assert_eq!(named(clap::Arg::is_hide_set), secrets);
    }

    #[test]
    fn a_rule_for_addresses_that_cannot_be_used_ends_the_executor_at_its_start() {
        for pattern in ["  ", "https://(?!evil)", "https://(h"] {
            let args = ["executor", "--allowed-vcs-url-regex", pattern];
            let error = Config::try_parse_from(args).unwrap_err();
            assert_eq!(variable_of(&error).unwrap(), env::ALLOWED_VCS_URL_REGEX);
            assert!(error.to_string().contains("the pattern"), "{error}");
        }
        let list = |pattern| {
            config(&["--allowed-vcs-url-regex", pattern])
                .source
                .allow_list()
        };
        assert!(list("").unwrap().is_none());
        assert!(list("https://h/.*").unwrap().is_some());
    }

    #[test]
    fn the_command_line_is_well_formed() {
        Config::command().debug_assert();
    }

    #[test]
    fn folders_are_below_home_unless_they_are_set() {
        let folders = config(&[]).folders(Some("/home/cnb".into())).unwrap();
        assert_eq!(
            folders.data,
            PathBuf::from("/home/cnb/.terraform-spring-boot")
        );
        assert_eq!(
            folders.work,
            PathBuf::from("/home/cnb/.terraform-spring-boot/executor")
        );
        assert_eq!(
            folders.checkouts,
            PathBuf::from("/home/cnb/.terraform-spring-boot/executor/workspaces")
        );
        let folders = config(&["--data-dir", "/d"]).folders(None).unwrap();
        assert_eq!(
            (folders.data, folders.tool_cache),
            ("/d".into(), "/d".into())
        );
        let error = config(&[]).folders(None).unwrap_err().to_string();
        assert_eq!(error, "neither `MAYFLY_DATA_DIR` nor `HOME` is set");
    }

    #[test]
    fn the_error_of_a_pod_without_records_names_the_variable() {
        let missing = |args: &[&str], is_pod| {
            let error = config(args).check_records_in(is_pod).err()?.to_string();
            let mut names = [env::API_URL, env::DATA_DIR].into_iter();
            let name = names.find(|name| error.starts_with(&format!("`{name}` is not set, and ")));
            Some(name.expect(&error))
        };
        let api = ["--api-url", "http://api"];
        let folder = ["--data-dir", "/d"];
        assert_eq!(missing(&[], true), Some(env::API_URL));
        assert_eq!(missing(&["--api-url", " "], true), Some(env::API_URL));
        for enough in [&api, &folder, &["--records", "pod"]] {
            assert_eq!(missing(enough, true), None, "{enough:?}");
        }
        assert_eq!(missing(&[], false), None);
        for (records, without) in [("platform", env::API_URL), ("shared", env::DATA_DIR)] {
            let options = ["--records", records];
            assert_eq!(missing(&options, false), Some(without));
            assert_eq!(missing(&[options, api].concat(), true), None);
        }
        let folder_alone = [folder, ["--records", "platform"]].concat();
        assert_eq!(missing(&folder_alone, true), Some(env::API_URL));
    }

    #[test]
    fn a_lease_uses_the_relay_of_its_hub_unless_the_api_is_set() {
        let lease = [
            "--lease-url",
            "https://hub/leases/1",
            "--lease-token",
            "mfr_1",
            "--public-api-url",
            "https://api.example.test",
        ];
        let relayed = config(&lease);
        relayed.check_records_in(true).unwrap();
        let relayed = relayed.network().unwrap().0.unwrap();
        assert!(relayed.is_relayed() && relayed.lease.is_some());
        assert_eq!(relayed.api_url.as_str(), "https://hub/leases/1/platform");
        assert_eq!(relayed.public_url.as_str(), "https://api.example.test/");

        let api = ["--api-url", "http://api", "--enable-security", "false"];
        let direct = config(&[&lease[..], &api].concat());
        let direct = direct.network().unwrap().0.unwrap();
        assert!(!direct.is_relayed() && direct.lease.is_some());
        assert_eq!(direct.api_url.as_str(), "http://api/");

        let error_of = |args: &[&str]| config(args).network().unwrap_err().to_string();
        let half = error_of(&lease[..2]);
        assert!(
            half.starts_with("`MAYFLY_LEASE_TOKEN` is not set"),
            "{half}"
        );
        let nameless = error_of(&lease[..4]);
        assert!(
            nameless.contains("`TerrakubeApiUrl` is not set"),
            "{nameless}"
        );
    }

    #[test]
    fn the_launcher_passes_the_pods_name() {
        assert!(config(&["--pod-name", "job-1-s-abcde"]).is_in_pod());
    }

    #[test]
    fn the_platform_lists_opentofu_releases_by_default() {
        let tofu = |args: &[&str]| config(args).release_indexes().1.to_string();
        assert_eq!(tofu(&[]), TOFU_RELEASES);
        assert_eq!(
            tofu(&["--api-url", "http://api:8080/"]),
            "http://api:8080/tofu/index.json"
        );
        let custom = [
            "--api-url",
            "http://api",
            "--custom-tofu-releases-url",
            "http://c/x",
        ];
        assert_eq!(tofu(&custom), "http://c/x");
        let own = ["--tofu-releases-url", "http://m/x"];
        assert_eq!(tofu(&[&custom[..], &own].concat()), "http://m/x");
        assert!(
            Config::try_parse_from(["executor", "--terraform-releases-url", "nonsense"]).is_err()
        );
    }

    #[test]
    fn a_usage_error_names_its_variable() {
        let error =
            Config::try_parse_from(["executor", "--grace-period-seconds", "soon"]).unwrap_err();
        assert_eq!(
            variable_of(&error).as_deref(),
            Some(env::GRACE_PERIOD_SECONDS)
        );
    }

    #[test]
    fn job_data_are_joined_from_their_variables() {
        let own = |name: &str| match name {
            "EphemeralJobData_1" => Some("b".to_owned()),
            "EphemeralJobData_2" => Some("c".to_owned()),
            "EphemeralJobData_4" => Some("e".to_owned()),
            _ => None,
        };
        let mut job = config(&["--job-data", "a"]).job;
        job.complete(own);
        assert_eq!(job.job_data.as_deref(), Some("abc"));
        let mut absent = config(&[]).job;
        absent.complete(own);
        assert_eq!(absent.job_data, None);
    }

    #[test]
    fn job_data_is_not_shown() {
        assert!(!format!("{:?}", config(&["--job-data", "hunter2"])).contains("hunter2"));
    }
}
