//! Every environment name either program reads or sets, in one file.
//!
//! Names in Terrakube's own spelling mean what they mean there (contract 10.1); ours start with `MAYFLY_`.

/// `true` selects batch mode: one step, then exit. Contract 10.1.
pub const BATCH: &str = "EphemeralFlagBatch";
/// The encoded job document. Contract 1.1.
pub const JOB_DATA: &str = "EphemeralJobData";
/// Path of a file holding the encoded job document, for documents too large for one environment string.
pub const JOB_DATA_FILE: &str = "EphemeralJobDataFile";

/// Where plans, state and step output are stored. Contract 6.
pub const STATE_TYPE: &str = "TerraformStateType";
/// `true` suppresses every status report. Contract 5.3.
pub const DISABLE_ACKNOWLEDGE: &str = "ExecutorFlagDisableAcknowledge";
/// `false` turns the colours of the tool's output off. Contract 4.5.
pub const COLOR_OUTPUT: &str = "TerrakubeEnableColorOutput";
/// Index of Terraform releases; empty means HashiCorp's own. Contract 9.1.
pub const TERRAFORM_RELEASES_URL: &str = "CustomTerraformReleasesUrl";
/// Base URL of the platform's API; its `/tofu/index.json` lists OpenTofu releases. Contract 9.1.
pub const API_URL: &str = "AzBuilderApiUrl";
/// Public base URL of the platform's API, handed to scripts as `terrakubeApi`. Contract 4.4.
pub const PUBLIC_API_URL: &str = "TerrakubeApiUrl";
/// Shared secret of the platform. Never reaches a tool or a script.
pub const INTERNAL_SECRET: &str = "InternalSecret";
/// Extension repository cloned for scripts, and its branch. Contract 4.4.
pub const TOOLS_REPOSITORY: &str = "TerrakubeToolsRepository";
/// See [`TOOLS_REPOSITORY`].
pub const TOOLS_BRANCH: &str = "TerrakubeToolsBranch";

/// Root of the local file store, the local platform's records and the tool cache.
pub const DATA_DIR: &str = "MAYFLY_DATA_DIR";
/// Folder for the run's workspace and its generated credentials, removed when the run ends.
pub const WORK_DIR: &str = "MAYFLY_WORK_DIR";
/// Folder of installed tools, shared by many executors.
pub const TOOL_CACHE_DIR: &str = "MAYFLY_TOOL_CACHE_DIR";
/// `installed` prefers a tool that is already there, `newest` the greatest release that satisfies the range.
pub const TOOL_SELECTION: &str = "MAYFLY_TOOL_SELECTION";
/// Index of OpenTofu releases; wins over the platform's.
pub const TOFU_RELEASES_URL: &str = "MAYFLY_TOFU_RELEASES_URL";
/// Mirror prefix that replaces scheme and host of every download URL in a release index.
pub const RELEASE_MIRROR_URL: &str = "MAYFLY_RELEASE_MIRROR_URL";
/// File of armoured OpenPGP keys trusted beside the built-in ones for release signatures.
pub const RELEASE_KEYS_FILE: &str = "MAYFLY_RELEASE_KEYS_FILE";
/// `required` refuses a release without a valid signature, `offered` checks one where it exists.
pub const RELEASE_SIGNATURES: &str = "MAYFLY_RELEASE_SIGNATURES";
/// `known_hosts` file; when set, SSH server keys are verified against it.
pub const SSH_KNOWN_HOSTS: &str = "MAYFLY_SSH_KNOWN_HOSTS_FILE";
/// Largest unpacked size of fetched content, in bytes.
pub const ARCHIVE_MAX_BYTES: &str = "MAYFLY_ARCHIVE_MAX_BYTES";
/// Largest number of entries in fetched content.
pub const ARCHIVE_MAX_ENTRIES: &str = "MAYFLY_ARCHIVE_MAX_ENTRIES";
/// `true` puts the outcome in the exit code ([`crate::Exit`]) instead of 0 for every reported outcome.
pub const OUTCOME_EXIT_CODE: &str = "MAYFLY_OUTCOME_EXIT_CODE";
/// Seconds between the first SIGTERM and the SIGKILL that follows it; the pod's grace period.
pub const GRACE_PERIOD_SECONDS: &str = "MAYFLY_GRACE_PERIOD_SECONDS";
/// Where the final report is written; Kubernetes shows it as the container's termination message.
pub const TERMINATION_LOG: &str = "MAYFLY_TERMINATION_LOG";
/// Extra names, comma-separated, that tools and scripts inherit from the executor's environment.
pub const ENV_FORWARD: &str = "MAYFLY_ENV_FORWARD";
/// A file that receives a copy of the run's log.
pub const LOG_FILE: &str = "MAYFLY_LOG_FILE";
/// `json` or `text`: the format of the program's own diagnostics on stderr.
pub const LOG_FORMAT: &str = "MAYFLY_LOG_FORMAT";
/// Filter of the program's own diagnostics, in `tracing` directives.
pub const LOG_FILTER: &str = "MAYFLY_LOG";
/// Identity of the pod that runs the executor, from the downward API; written into the claim.
pub const POD_NAME: &str = "MAYFLY_POD_NAME";
/// See [`POD_NAME`].
pub const POD_UID: &str = "MAYFLY_POD_UID";

/// Address the launcher's HTTP service listens on.
pub const LISTEN: &str = "MAYFLY_LISTEN";
/// Where accepted steps run: `process` starts executors on the launcher's own machine.
pub const TARGET: &str = "MAYFLY_TARGET";
/// How many executors the `process` target runs at a time.
pub const CONCURRENCY: &str = "MAYFLY_CONCURRENCY";
/// `true` turns the check of tokens off on a loopback address, `everywhere` on any address.
pub const ALLOW_UNAUTHENTICATED: &str = "MAYFLY_ALLOW_UNAUTHENTICATED";
/// `all` launches every dispatch, `flag` only those of workspaces that ask for it.
pub const ROUTE: &str = "MAYFLY_ROUTE";
/// `true` reads the values `0`, `false` and `off` of the workspace's flag as absence.
pub const ROUTE_STRICT: &str = "MAYFLY_ROUTE_STRICT";
/// Full URL of the executor that gets the dispatches of workspaces without the flag.
pub const PERSISTENT_EXECUTOR_URL: &str = "MAYFLY_PERSISTENT_EXECUTOR_URL";
/// Seconds the launcher takes at most to stop.
pub const SHUTDOWN_SECONDS: &str = "MAYFLY_SHUTDOWN_SECONDS";
/// What a stopping launcher does with executors on its machine: `interrupt` or `leave`.
pub const RUNS_ON_STOP: &str = "MAYFLY_RUNS_ON_STOP";
/// Another executor program than the one built into the launcher.
pub const EXECUTOR: &str = "MAYFLY_EXECUTOR";
/// Presence in a workspace's environment asks for a run of its own. Contract 2.1.
pub const ENABLE_EPHEMERAL: &str = "TERRAKUBE_ENABLE_EPHEMERAL_EXECUTOR";

/// Largest environment string Linux accepts at `execve`, name, `=` and NUL included (`MAX_ARG_STRLEN`).
pub const MAX_ENV_STRING_BYTES: usize = 131_072;
