//! All environment names that one of the programs reads or sets.
//!
//! Names in Terrakube's spelling have the same meaning there (contract 10.1). Mayfly's own names start with `MAYFLY_`.

/// `true` selects batch mode: one step, then exit. Contract 10.1.
pub const BATCH: &str = "EphemeralFlagBatch";
/// The encoded job document, or its first part: see [`job_data_part`]. Contract 1.1.
pub const JOB_DATA: &str = "EphemeralJobData";
/// Path of a file with the encoded job document, for people who start an executor themselves.
pub const JOB_DATA_FILE: &str = "EphemeralJobDataFile";
/// SHA-256 of the job data, as they are in the variables or the file: 64 hexadecimal digits.
pub const JOB_DATA_DIGEST: &str = "MAYFLY_JOB_DATA_SHA256";

/// Where plans, state and step output are stored. Contract 6.
pub const STATE_TYPE: &str = "TerraformStateType";
/// Storage account of the Azure store. Contract 6.5, also for the next settings.
pub const AZURE_ACCOUNT: &str = "AzureTerraformStateStorageAccountName";
/// Resource group of the account, for the backend.
pub const AZURE_RESOURCE_GROUP: &str = "AzureTerraformStateResourceGroup";
/// Container of backend states. All other objects are in containers with fixed names.
pub const AZURE_CONTAINER: &str = "AzureTerraformStateStorageContainerName";
/// Key of the account.
pub const AZURE_ACCESS_KEY: &str = "AzureTerraformStateStorageAccessKey";
/// Access key id of the S3 store.
pub const AWS_ACCESS_KEY: &str = "AwsTerraformStateAccessKey";
/// Secret access key of the S3 store.
pub const AWS_SECRET_KEY: &str = "AwsTerraformStateSecretKey";
/// Bucket of the S3 store.
pub const AWS_BUCKET: &str = "AwsTerraformStateBucketName";
/// Region of the bucket.
pub const AWS_REGION: &str = "AwsTerraformStateRegion";
/// Address of another S3 service; empty for AWS.
pub const AWS_ENDPOINT: &str = "AwsEndpoint";
/// Region in the signatures of requests to [`AWS_ENDPOINT`].
pub const AWS_ENDPOINT_REGION: &str = "AwsEndpointRegion";
/// `false` puts the name of the bucket into the host of [`AWS_ENDPOINT`], and not into its path.
pub const AWS_PATH_STYLE: &str = "AwsPathStyleAccess";
/// `false` for a service that reads no bodies in signed chunks. They are never sent.
pub const AWS_CHUNKED_ENCODING: &str = "AwsChunkedEncodingEnabled";
/// `false` for a service that sends no checksums. They are never asked for.
pub const AWS_CHECKSUM_VALIDATION: &str = "AwsChecksumValidationEnabled";
/// `true` writes the keys into the backend file, `false` leaves the tool to find its own.
pub const AWS_INCLUDE_BACKEND_KEYS: &str = "AwsIncludeBackendKeys";
/// `true` takes credentials from the environment of the process or the machine instead of keys.
pub const AWS_ENABLE_ROLE_AUTH: &str = "AwsEnableRoleAuth";
/// `true` locks states with objects in the bucket.
pub const AWS_USE_LOCKFILE: &str = "AwsUseLockfile";
/// `outside` or `file`: how the tool's backend gets the store's credentials.
pub const BACKEND_CREDENTIALS: &str = "MAYFLY_BACKEND_CREDENTIALS";
/// ARN of a role that the executor assumes for the S3 store.
pub const STORE_AWS_ROLE: &str = "MAYFLY_STORE_AWS_ROLE_ARN";
/// `true` opens the Azure store with the identity of the pod or the node.
pub const STORE_AZURE_IDENTITY: &str = "MAYFLY_STORE_AZURE_IDENTITY";
/// `true` opens the GCS store with application default credentials or the identity of the node.
pub const STORE_GCP_IDENTITY: &str = "MAYFLY_STORE_GCP_IDENTITY";
/// Service account of the GCS store, base64 of its JSON key.
pub const GCP_CREDENTIALS: &str = "GcpTerraformStateCredentials";
/// Bucket of the GCS store.
pub const GCP_BUCKET: &str = "GcpTerraformStateBucketName";
/// Project of the bucket. It is not needed, because the name identifies the bucket.
pub const GCP_PROJECT: &str = "GcpTerraformStateProjectId";
/// `true` suppresses every status report. Contract 5.3.
pub const DISABLE_ACKNOWLEDGE: &str = "ExecutorFlagDisableAcknowledge";
/// `false` turns the colours of the tool's output off. Contract 4.5.
pub const COLOR_OUTPUT: &str = "TerrakubeEnableColorOutput";
/// `false` leaves out what only a platform's user interface reads: the list of changes, and the state as JSON.
pub const STRUCTURED_OUTPUT: &str = "MAYFLY_STRUCTURED_OUTPUT";
/// Index of Terraform releases; empty means HashiCorp's own. Contract 9.1.
pub const TERRAFORM_RELEASES_URL: &str = "CustomTerraformReleasesUrl";
/// Index of OpenTofu releases; empty means the platform's. Contract 9.1.
pub const CUSTOM_TOFU_RELEASES_URL: &str = "CustomTofuReleasesUrl";
/// Base URL of the platform's API; its `/tofu/index.json` lists OpenTofu releases. Contract 9.1.
pub const API_URL: &str = "AzBuilderApiUrl";
/// Public base URL of the platform's API, which scripts get as `terrakubeApi`. Contract 4.4.
pub const PUBLIC_API_URL: &str = "TerrakubeApiUrl";
/// Shared secret of the platform. Never reaches a tool or a script.
pub const INTERNAL_SECRET: &str = "InternalSecret";
/// Path of a file with [`INTERNAL_SECRET`], which is removed before anything of a run starts.
pub const INTERNAL_SECRET_FILE: &str = "InternalSecretFile";
/// `false` for a platform that checks no tokens. Contract 10.1.
pub const ENABLE_SECURITY: &str = "TerrakubeEnableSecurity";
/// Host and optional port of the platform's module registry. Contract 8.7.
pub const REGISTRY_DOMAIN: &str = "TerrakubeRegistryDomain";
/// Extension repository cloned for scripts, and its branch. Contract 4.4.
pub const TOOLS_REPOSITORY: &str = "TerrakubeToolsRepository";
/// See [`TOOLS_REPOSITORY`].
pub const TOOLS_BRANCH: &str = "TerrakubeToolsBranch";

/// URL of the lease that a hub has given on this step. The hub holds the claim. Without [`API_URL`], it also relays the calls
/// to the platform.
pub const LEASE_URL: &str = "MAYFLY_LEASE_URL";
/// Token of that lease. Never reaches a tool or a script.
pub const LEASE_TOKEN: &str = "MAYFLY_LEASE_TOKEN";

/// `true` sends the log through the platform's API instead of Redis. Contract 7.7.
pub const LOG_VIA_API: &str = "LogViaApi";
/// How many bytes one step may add to the live log.
pub const LIVE_LOG_MAX_BYTES: &str = "MAYFLY_LIVE_LOG_MAX_BYTES";
/// Host of Redis. Without it, without nodes of a cluster and without sentinels there is no Redis. Contract 7.2.
pub const REDIS_HOSTNAME: &str = "TerrakubeRedisHostname";
/// Port of Redis.
pub const REDIS_PORT: &str = "TerrakubeRedisPort";
/// User of Redis.
pub const REDIS_USERNAME: &str = "TerrakubeRedisUsername";
/// Password of Redis. Never reaches a tool or a script.
pub const REDIS_PASSWORD: &str = "TerrakubeRedisPassword";
/// `true` uses TLS for Redis.
pub const REDIS_SSL: &str = "TerrakubeRedisSSL";
/// Java's trust store for Redis. A PEM file is accepted. A keystore is refused with a hint.
pub const REDIS_TRUSTSTORE_PATH: &str = "TerrakubeRedisTruststorePath";
/// Password of the trust store; PEM files have none.
pub const REDIS_TRUSTSTORE_PASSWORD: &str = "TerrakubeRedisTruststorePassword";
/// Timeout of one command in milliseconds.
pub const REDIS_TIMEOUT: &str = "TerrakubeRedisTimeout";
/// Comma list of `host:port`: nodes of a cluster. Wins over sentinels and over one host.
pub const REDIS_CLUSTER_NODES: &str = "TerrakubeRedisClusterNodes";
/// How many redirections between nodes of a cluster a command may take.
pub const REDIS_CLUSTER_MAX_REDIRECTS: &str = "TerrakubeRedisClusterMaxRedirects";
/// Name of the Redis server in the settings of the sentinels.
pub const REDIS_SENTINEL_MASTER: &str = "TerrakubeRedisSentinelMaster";
/// Comma list of `host:port`: sentinels. Wins over one host.
pub const REDIS_SENTINEL_NODES: &str = "TerrakubeRedisSentinelNodes";
/// User for the sentinels, and for Redis if it has none of its own.
pub const REDIS_SENTINEL_USERNAME: &str = "TerrakubeRedisSentinelUsername";
/// See [`REDIS_SENTINEL_USERNAME`].
pub const REDIS_SENTINEL_PASSWORD: &str = "TerrakubeRedisSentinelPassword";
/// PEM file with the certificate authorities for Redis; without it, the system's.
pub const REDIS_CA_FILE: &str = "MAYFLY_REDIS_CA_FILE";

/// Root of the local file store, the local platform's records and the tool cache.
pub const DATA_DIR: &str = "MAYFLY_DATA_DIR";
/// Executor binary that `api-launcher run` starts instead of the one it contains.
pub const EXECUTOR: &str = "MAYFLY_EXECUTOR";
/// Folder for the run's workspace and its generated credentials. It is removed at the end of the run.
pub const WORK_DIR: &str = "MAYFLY_WORK_DIR";
/// Folder for the work trees of workspaces, each at a path that is the same in all steps. Executors that share it take turns
/// in a workspace.
pub const CHECKOUT_DIR: &str = "MAYFLY_CHECKOUT_DIR";
/// The mark of a run, which all its processes inherit. The launcher uses it to find processes that outlive the executor.
pub const RUN_MARK: &str = "MAYFLY_RUN_MARK";
/// Folder of installed tools, shared by many executors.
pub const TOOL_CACHE_DIR: &str = "MAYFLY_TOOL_CACHE_DIR";
/// `installed` prefers an installed tool, `newest` the greatest release that satisfies the range.
pub const TOOL_SELECTION: &str = "MAYFLY_TOOL_SELECTION";
/// Index of OpenTofu releases; wins over [`CUSTOM_TOFU_RELEASES_URL`].
pub const TOFU_RELEASES_URL: &str = "MAYFLY_TOFU_RELEASES_URL";
/// Mirror whose scheme, host and path prefix replace scheme and host of every download URL in a release index.
pub const RELEASE_MIRROR_URL: &str = "MAYFLY_RELEASE_MIRROR_URL";
/// File of OpenPGP keys, armoured or binary, trusted beside the built-in ones for release signatures.
pub const RELEASE_KEYS_FILE: &str = "MAYFLY_RELEASE_KEYS_FILE";
/// `required` refuses a release without a valid signature, `offered` checks a signature if there is one.
pub const RELEASE_SIGNATURES: &str = "MAYFLY_RELEASE_SIGNATURES";
/// `known_hosts` file; when set, SSH server keys are verified against it.
pub const SSH_KNOWN_HOSTS: &str = "MAYFLY_SSH_KNOWN_HOSTS_FILE";
/// Regular expression of the addresses of repositories that runs may fetch from. Empty allows all.
pub const ALLOWED_VCS_URL_REGEX: &str = "ALLOWED_VCS_URL_REGEX";
/// `full` or `search`: whether that expression must match the whole address or any part of it.
pub const ALLOWED_VCS_URL_MATCH: &str = "MAYFLY_ALLOWED_VCS_URL_MATCH";
/// JSON list of the operator's logins for git servers.
pub const GIT_LOGINS: &str = "MAYFLY_GIT_LOGINS";
/// The beginning of names of variables with a password, a token or a key of such a login. With [`FILE_SUFFIX`] at the end, the
/// path of a file.
pub const GIT_LOGIN_PREFIX: &str = "MAYFLY_GIT_LOGIN_";
/// Largest unpacked size of fetched content, in bytes.
pub const ARCHIVE_MAX_BYTES: &str = "MAYFLY_ARCHIVE_MAX_BYTES";
/// Largest number of entries in fetched content.
pub const ARCHIVE_MAX_ENTRIES: &str = "MAYFLY_ARCHIVE_MAX_ENTRIES";
/// `true` makes the exit code the outcome ([`crate::Exit`]), instead of 0 for every reported outcome.
pub const OUTCOME_EXIT_CODE: &str = "MAYFLY_OUTCOME_EXIT_CODE";
/// Seconds between the first SIGTERM and SIGKILL: the pod's grace period.
pub const GRACE_PERIOD_SECONDS: &str = "MAYFLY_GRACE_PERIOD_SECONDS";
/// Minutes a run may take, counted from the executor's start.
pub const MAX_DURATION_MINUTES: &str = "ExecutorJobMaxDurationMinutes";
/// The same limit in seconds. It overrides the minutes, and 0 means no limit. The launcher sets it to end before the Job's own
/// deadline.
pub const DEADLINE_SECONDS: &str = "MAYFLY_DEADLINE_SECONDS";
/// Seconds a run may be silent before it is stopped; 0 means no limit.
pub const SILENCE_SECONDS: &str = "MAYFLY_SILENCE_SECONDS";
/// Percentage of the memory limit at which the tool is interrupted; 0 means never.
pub const MEMORY_STOP_PERCENT: &str = "MAYFLY_MEMORY_STOP_PERCENT";
/// Where the final report is written; Kubernetes shows it as the container's termination message.
pub const TERMINATION_LOG: &str = "MAYFLY_TERMINATION_LOG";
/// `true` runs steps with policies without evaluating the policies. Contract 13.1.
pub const IGNORE_POLICIES: &str = "MAYFLY_IGNORE_POLICIES";
/// Key that proves that a final report is genuine, base64 of 32 bytes or more. Without it, the key is derived from
/// [`INTERNAL_SECRET`]. Never reaches a tool or a script.
pub const REPORT_KEY: &str = "MAYFLY_REPORT_KEY";
/// `true` lets an apply use a plan without a record of Mayfly's plan step.
pub const MIXED_FLEET: &str = "MAYFLY_MIXED_FLEET";
pub const PROVIDER_CACHE_DIR: &str = "MAYFLY_PROVIDER_CACHE_DIR";
pub const PROVIDER_CACHE_MAX_BYTES: &str = "MAYFLY_PROVIDER_CACHE_MAX_BYTES";
/// `auto`, `link` or `copy`: how a run uses packages that it cannot write.
pub const PROVIDER_CACHE_ACCESS: &str = "MAYFLY_PROVIDER_CACHE_ACCESS";
/// How long nothing may move on the volume of a cache.
pub const CACHE_TIMEOUT_SECONDS: &str = "MAYFLY_CACHE_TIMEOUT_SECONDS";
/// `runs` or `fill`: who fills the store of providers. The launcher's setting, which executors get from it.
pub const PROVIDER_CACHE_MODE: &str = "MAYFLY_PROVIDER_CACHE_MODE";
/// Comma list of the registries of which Jobs of the operator fetch packages. The launcher's setting, which executors get from it.
pub const PROVIDER_CACHE_REGISTRIES: &str = "MAYFLY_PROVIDER_CACHE_REGISTRIES";
/// `true` or `false`: whether runs share git repositories of modules.
pub const MODULE_CACHE: &str = "MAYFLY_MODULE_CACHE";
pub const PROVIDER_FETCHES: &str = "MAYFLY_PROVIDER_FETCHES";
pub const PLAN_FILES: &str = "MAYFLY_PLAN_FILES";
pub const PLAN_FILES_MAX_BYTES: &str = "MAYFLY_PLAN_FILES_MAX_BYTES";
/// A variable of a workspace.
pub const PLAN_FILES_EXCLUDE: &str = "MAYFLY_PLAN_FILES_EXCLUDE";
/// Folder of the operator's hooks.
pub const HOOKS_DIR: &str = "MAYFLY_HOOKS_DIR";
/// Prefix of variables that only the operator's hooks get, without the prefix. They may be secrets.
pub const FOR_HOOKS_PREFIX: &str = "MAYFLY_HOOK_ENV_";
/// Tells a hook where the run's working directory is.
pub const HOOK_WORKING_DIR: &str = "MAYFLY_WORKING_DIR";
/// Folder of service bindings. The executor trusts the authorities of those with the type `ca-certificates`.
pub const SERVICE_BINDING_ROOT: &str = "SERVICE_BINDING_ROOT";
/// PEM file with the authorities that tools, git, scripts and hooks trust, instead of the executor's own.
pub const RUN_CA_FILE: &str = "MAYFLY_RUN_CA_FILE";
/// Extra names, comma-separated, that tools and scripts inherit from the executor's environment.
pub const ENV_FORWARD: &str = "MAYFLY_ENV_FORWARD";
/// A file that receives a copy of the run's log.
pub const LOG_FILE: &str = "MAYFLY_LOG_FILE";
/// `json` or `text`: the format of the program's own diagnostics on stderr.
pub const LOG_FORMAT: &str = "MAYFLY_LOG_FORMAT";
/// Filter of the program's own diagnostics, in `tracing` directives.
pub const LOG_FILTER: &str = "MAYFLY_LOG";
/// How many seconds an executor waits until the platform has recorded its dispatch.
pub const DISPATCH_WAIT_SECONDS: &str = "MAYFLY_DISPATCH_WAIT_SECONDS";
/// Seconds between two checks whether the job was cancelled. A pause may take up to twice as long.
pub const STATUS_POLL_SECONDS: &str = "MAYFLY_STATUS_POLL_SECONDS";
/// How many seconds the final report is retried while the platform does not answer.
pub const REPORT_PATIENCE_SECONDS: &str = "MAYFLY_REPORT_PATIENCE_SECONDS";
/// `platform`, `shared` or `pod`: where the record of a step is kept ([`crate::Records`]).
pub const RECORDS: &str = "MAYFLY_RECORDS";
/// Identity of the pod that runs the executor, from the downward API; written into the claim.
pub const POD_NAME: &str = "MAYFLY_POD_NAME";
/// See [`POD_NAME`].
pub const POD_UID: &str = "MAYFLY_POD_UID";

// Identities of runs at the clouds. Launcher and agent pass them on to the executor.

/// ARN of the role on AWS.
pub const IDENTITY_AWS_ROLE: &str = "MAYFLY_IDENTITY_AWS_ROLE_ARN";
/// Provider of a workload identity pool on Google Cloud.
pub const IDENTITY_GCP_PROVIDER: &str = "MAYFLY_IDENTITY_GCP_PROVIDER";
/// Service account on Google Cloud that the identity acts as.
pub const IDENTITY_GCP_SERVICE_ACCOUNT: &str = "MAYFLY_IDENTITY_GCP_SERVICE_ACCOUNT";
/// Id of the application or managed identity on Azure.
pub const IDENTITY_AZURE_CLIENT_ID: &str = "MAYFLY_IDENTITY_AZURE_CLIENT_ID";
/// Its tenant.
pub const IDENTITY_AZURE_TENANT_ID: &str = "MAYFLY_IDENTITY_AZURE_TENANT_ID";
/// The subscription of runs.
pub const IDENTITY_AZURE_SUBSCRIPTION_ID: &str = "MAYFLY_IDENTITY_AZURE_SUBSCRIPTION_ID";
/// Folder of the tokens.
pub const IDENTITY_DIR: &str = "MAYFLY_IDENTITY_DIR";
/// `false` keeps from the tool and scripts what a cloud injects into the pod for its identity.
pub const IDENTITY_PASS_THROUGH: &str = "MAYFLY_IDENTITY_PASS_THROUGH";

/// All of these settings.
pub const IDENTITY_SETTINGS: [&str; 8] = [
    IDENTITY_AWS_ROLE,
    IDENTITY_GCP_PROVIDER,
    IDENTITY_GCP_SERVICE_ACCOUNT,
    IDENTITY_AZURE_CLIENT_ID,
    IDENTITY_AZURE_TENANT_ID,
    IDENTITY_AZURE_SUBSCRIPTION_ID,
    IDENTITY_DIR,
    IDENTITY_PASS_THROUGH,
];

// Roles on AWS that workspaces name for their deployment.

/// Variable of a workspace: ARN of the role.
pub const DEPLOY_ROLE: &str = "EPHEMERAL_AWS_ASSUME_ROLE_ARN";
/// Variable of a workspace: seconds that a session lasts.
pub const DEPLOY_ROLE_SECONDS: &str = "EPHEMERAL_AWS_ASSUME_ROLE_DURATION_SECONDS";
/// Access key id of the user who assumes roles.
pub const ASSUMER_ACCESS_KEY_ID: &str = "ASSUMER_ACCESS_KEY_ID";
/// Its secret.
pub const ASSUMER_SECRET_ACCESS_KEY: &str = "ASSUMER_SECRET_ACCESS_KEY";
/// `true` lets the identity of the pod assume roles, if there are no keys.
pub const ASSUMER_POD_IDENTITY: &str = "MAYFLY_ASSUMER_POD_IDENTITY";
/// Patterns of the roles that workspaces may name, separated by commas or blanks.
pub const ASSUMER_ALLOWED_ROLES: &str = "MAYFLY_ASSUMER_ALLOWED_ROLES";
/// External id of each request.
pub const ASSUMER_EXTERNAL_ID: &str = "MAYFLY_ASSUMER_EXTERNAL_ID";
/// Region whose token service is asked.
pub const ASSUMER_REGION: &str = "MAYFLY_ASSUMER_REGION";
/// Seconds that a session lasts, if the workspace does not say it.
pub const ASSUMER_DURATION_SECONDS: &str = "MAYFLY_ASSUMER_DURATION_SECONDS";
/// `auto`, `env` or `endpoint`: how runs get a session.
pub const ASSUMER_DELIVERY: &str = "MAYFLY_ASSUMER_DELIVERY";

/// The secrets among these settings. A file can hold each: see [`FILE_SUFFIX`].
pub const ASSUMER_SECRETS: [&str; 2] = [ASSUMER_ACCESS_KEY_ID, ASSUMER_SECRET_ACCESS_KEY];

/// All of these settings that belong to the operator.
pub const ASSUMER_SETTINGS: [&str; 8] = [
    ASSUMER_ACCESS_KEY_ID,
    ASSUMER_SECRET_ACCESS_KEY,
    ASSUMER_POD_IDENTITY,
    ASSUMER_ALLOWED_ROLES,
    ASSUMER_EXTERNAL_ID,
    ASSUMER_REGION,
    ASSUMER_DURATION_SECONDS,
    ASSUMER_DELIVERY,
];

/// Listen address of the launcher's HTTP service.
pub const LISTEN: &str = "MAYFLY_LISTEN";
/// Listen address of the launcher's health checks and metrics.
pub const HEALTH_LISTEN: &str = "MAYFLY_HEALTH_LISTEN";
/// Where accepted steps run: `process` starts executors on the launcher's own machine.
pub const TARGET: &str = "MAYFLY_TARGET";
/// How many executors the `process` target runs at a time.
pub const CONCURRENCY: &str = "MAYFLY_CONCURRENCY";
/// `true` disables the check of tokens on a loopback address, `everywhere` on any address.
pub const ALLOW_UNAUTHENTICATED: &str = "MAYFLY_ALLOW_UNAUTHENTICATED";
/// `all` launches every dispatch, `flag` only those of workspaces with the flag.
pub const ROUTE: &str = "MAYFLY_ROUTE";
/// Full URL of the executor that gets the dispatches of workspaces without the flag.
pub const PERSISTENT_EXECUTOR_URL: &str = "MAYFLY_PERSISTENT_EXECUTOR_URL";
/// The longest time in which the launcher stops, in seconds.
pub const SHUTDOWN_SECONDS: &str = "MAYFLY_SHUTDOWN_SECONDS";
/// Seconds for which a stopping launcher still accepts dispatches, although it is no longer ready.
pub const DRAIN_SECONDS: &str = "MAYFLY_DRAIN_SECONDS";
/// YAML file of the pools whose agents take runs from the launcher.
pub const POOLS_FILE: &str = "MAYFLY_POOLS_FILE";
/// URL of the database with the runs of pools. It may hold a password.
pub const POOL_STORE: &str = "MAYFLY_POOL_STORE";
/// One or two keys of job tokens, base64. The first one signs.
pub const JOB_TOKEN_KEYS: &str = "MAYFLY_JOB_TOKEN_KEYS";
/// File with what [`JOB_TOKEN_KEYS`] has.
pub const JOB_TOKEN_KEYS_FILE: &str = "MAYFLY_JOB_TOKEN_KEYS_FILE";
/// Seconds without a heartbeat of an executor and its agent after which the hub gives up the run of a pool.
pub const POOL_LOST_SECONDS: &str = "MAYFLY_POOL_LOST_SECONDS";
/// Seconds that the run of a pool may wait for an executor.
pub const POOL_QUEUE_SECONDS: &str = "MAYFLY_POOL_QUEUE_SECONDS";
/// What a stopping launcher does with executors on its machine: `interrupt` or `leave`.
pub const RUNS_ON_STOP: &str = "MAYFLY_RUNS_ON_STOP";
/// How many released Jobs may run at a time; 0 means no limit.
pub const MAX_JOBS_IN_FLIGHT: &str = "MAYFLY_MAX_JOBS_IN_FLIGHT";
/// How many completed Jobs are kept within their time to live.
pub const HISTORY_SUCCEEDED: &str = "MAYFLY_HISTORY_SUCCEEDED";
/// How many failed Jobs are kept within their time to live.
pub const HISTORY_FAILED: &str = "MAYFLY_HISTORY_FAILED";
/// Seconds without a node after which the launcher gives up a run.
pub const UNSCHEDULABLE_SECONDS: &str = "MAYFLY_UNSCHEDULABLE_SECONDS";
/// Seconds without image or configuration after which the launcher gives up a run.
pub const CONTAINER_ERROR_SECONDS: &str = "MAYFLY_CONTAINER_ERROR_SECONDS";
/// Seconds from a node to the executor's start after which the launcher gives up a run.
pub const START_SECONDS: &str = "MAYFLY_START_SECONDS";

// Settings of a run's Job, as workspace variables (contract 3.3); the launcher takes the same names as defaults.

/// Presence routes a workspace's runs to Jobs. Contract 2.1.
pub const EPHEMERAL_SWITCH: &str = "TERRAKUBE_ENABLE_EPHEMERAL_EXECUTOR";
/// Pairs; replaces the default node selector, also when blank.
pub const EPHEMERAL_NODE_SELECTOR: &str = "EPHEMERAL_CONFIG_NODE_SELECTOR_TAGS";
/// Tolerations. Contract 3.5.
pub const EPHEMERAL_TOLERATIONS: &str = "EPHEMERAL_CONFIG_TOLERATIONS";
/// Service account of the pod.
pub const EPHEMERAL_SERVICE_ACCOUNT: &str = "EPHEMERAL_CONFIG_SERVICE_ACCOUNT";
/// Pairs: annotations of the Job.
pub const EPHEMERAL_ANNOTATIONS: &str = "EPHEMERAL_CONFIG_ANNOTATIONS";
/// Pairs: annotations of the pod.
pub const EPHEMERAL_POD_ANNOTATIONS: &str = "EPHEMERAL_CONFIG_POD_ANNOTATIONS";
/// Pairs: labels of the Job and its pod.
pub const EPHEMERAL_LABELS: &str = "EPHEMERAL_CONFIG_LABELS";
/// A `ConfigMap` to mount.
pub const EPHEMERAL_CONFIG_MAP: &str = "EPHEMERAL_CONFIG_MAP_NAME";
/// The mount path of the `ConfigMap`.
pub const EPHEMERAL_CONFIG_MAP_PATH: &str = "EPHEMERAL_CONFIG_MAP_MOUNT_PATH";
/// Prefix of variables in the executor's environment that are only for the tool and scripts.
pub const FOR_CHILDREN_PREFIX: &str = "MAYFLY_RUN_ENV_";
/// Comma list of `ConfigMap`s that become environment.
pub const EPHEMERAL_ENV_CONFIG_MAPS: &str = "EPHEMERAL_CONFIG_ENVFROM_CONFIG_MAP";
/// Pairs: security context of the pod.
pub const EPHEMERAL_POD_SECURITY: &str = "EPHEMERAL_CONFIG_POD_SECURITY_CONTEXT";
/// Pairs: security context of the container.
pub const EPHEMERAL_SECURITY: &str = "EPHEMERAL_CONFIG_SECURITY_CONTEXT";
/// Requests and limits, as Kubernetes quantities.
pub const EPHEMERAL_CPU_REQUEST: &str = "EPHEMERAL_CPU_REQUEST";
/// See [`EPHEMERAL_CPU_REQUEST`].
pub const EPHEMERAL_CPU_LIMIT: &str = "EPHEMERAL_CPU_LIMIT";
/// See [`EPHEMERAL_CPU_REQUEST`].
pub const EPHEMERAL_MEMORY_REQUEST: &str = "EPHEMERAL_MEMORY_REQUEST";
/// See [`EPHEMERAL_CPU_REQUEST`].
pub const EPHEMERAL_MEMORY_LIMIT: &str = "EPHEMERAL_MEMORY_LIMIT";
/// See [`EPHEMERAL_CPU_REQUEST`].
pub const EPHEMERAL_STORAGE_REQUEST: &str = "EPHEMERAL_STORAGE_REQUEST";
/// See [`EPHEMERAL_CPU_REQUEST`].
pub const EPHEMERAL_STORAGE_LIMIT: &str = "EPHEMERAL_STORAGE_LIMIT";
/// Pairs: extra environment of the container.
pub const EPHEMERAL_ENV: &str = "EPHEMERAL_JOB_ENV_VARS";
/// Another executor image for this workspace. Mayfly's own; refused unless the policy names its registry.
pub const EPHEMERAL_IMAGE: &str = "EPHEMERAL_CONFIG_IMAGE";
/// Folder of the tool for providers. On a workspace it also mounts the volume claim there.
pub const PLUGIN_CACHE_DIR: &str = "TF_PLUGIN_CACHE_DIR";
/// The `PersistentVolumeClaim` of the plugin cache.
pub const PLUGIN_CACHE_CLAIM: &str = "PVC_CLAIM_NAME";

// Settings of the launcher for the Jobs it makes. Contract 3.1, 13.1.

/// Namespace of Jobs.
pub const NAMESPACE: &str = "ExecutorEphemeralNamespace";
/// Image of the executor.
pub const IMAGE: &str = "ExecutorEphemeralImage";
/// Comma list of Secrets that become environment.
pub const ENV_SECRETS: &str = "ExecutorEphemeralSecret";
/// Comma list of `ConfigMap`s that become environment.
pub const ENV_CONFIG_MAPS: &str = "ExecutorEphemeralConfigMap";
/// Annotations of every pod, as a JSON object or as pairs.
pub const POD_ANNOTATIONS: &str = "ExecutorEphemeralPodAnnotations";
/// `activeDeadlineSeconds` of Jobs.
pub const ACTIVE_DEADLINE_SECONDS: &str = "ExecutorEphemeralActiveDeadlineSeconds";
/// `backoffLimit` of Jobs.
pub const BACKOFF_LIMIT: &str = "ExecutorEphemeralBackoffLimit";
/// `terminationGracePeriodSeconds` of pods, for every type of step.
pub const TERMINATION_GRACE_PERIOD_SECONDS: &str = "ExecutorEphemeralTerminationGracePeriodSeconds";
/// `ttlSecondsAfterFinished` of Jobs.
pub const TTL_SECONDS_AFTER_FINISHED: &str = "ExecutorEphemeralTtlSecondsAfterFinished";
/// The launcher reads node selectors, the executor proxies.
pub const JAVA_TOOL_OPTIONS: &str = "JAVA_TOOL_OPTIONS";
/// Grace period of steps that change infrastructure. It overrides the one for every type of step.
pub const APPLY_GRACE_PERIOD_SECONDS: &str = "MAYFLY_APPLY_GRACE_PERIOD_SECONDS";
/// `secret` or `env`: how the job document reaches the pod.
pub const JOB_DATA_MODE: &str = "MAYFLY_JOB_DATA_MODE";
/// `mayfly`, `stock` or `auto`: the executor in the image.
pub const EXECUTOR_KIND: &str = "MAYFLY_EXECUTOR_KIND";
/// Registry, or registry and path, that replaces the registry of images.
pub const IMAGE_REGISTRY: &str = "MAYFLY_IMAGE_REGISTRY";
/// Comma list of pull secrets.
pub const IMAGE_PULL_SECRETS: &str = "MAYFLY_IMAGE_PULL_SECRETS";
/// `Always`, `IfNotPresent` or `Never`.
pub const IMAGE_PULL_POLICY: &str = "MAYFLY_IMAGE_PULL_POLICY";
/// Priority class of pods.
pub const PRIORITY_CLASS: &str = "MAYFLY_PRIORITY_CLASS";
/// YAML or JSON file: a pod template that is merged over the built one.
pub const POD_TEMPLATE_FILE: &str = "MAYFLY_POD_TEMPLATE_FILE";
/// YAML or JSON file: the policy of workspace overrides.
pub const POLICY_FILE: &str = "MAYFLY_POLICY_FILE";
/// `claim` or `empty-dir`: the volume that is mounted as plugin cache.
pub const PLUGIN_CACHE: &str = "MAYFLY_PLUGIN_CACHE";
/// Mounts the plugin cache for every workspace; the launcher's counterpart of [`PLUGIN_CACHE_DIR`].
pub const DEPLOYMENT_PLUGIN_CACHE_DIR: &str = "MAYFLY_PLUGIN_CACHE_DIR";
/// The launcher's counterpart of [`PLUGIN_CACHE_CLAIM`].
pub const DEPLOYMENT_PLUGIN_CACHE_CLAIM: &str = "MAYFLY_PLUGIN_CACHE_CLAIM";
/// Size of the volume for a run's work folder.
pub const WORK_SIZE_LIMIT: &str = "MAYFLY_WORK_SIZE_LIMIT";
/// Size of the volume of temporary files.
pub const TMP_SIZE_LIMIT: &str = "MAYFLY_TMP_SIZE_LIMIT";

// Settings of an agent of a pool.

/// The configuration file of an agent.
pub const AGENT_CONFIG: &str = "MAYFLY_AGENT_CONFIG";
/// Token of the pool. A secret.
pub const AGENT_TOKEN: &str = "MAYFLY_AGENT_TOKEN";
/// File with that token.
pub const AGENT_TOKEN_FILE: &str = "MAYFLY_AGENT_TOKEN_FILE";
/// File with the token of an OpenID provider, which is exchanged for a token of the pool.
pub const AGENT_OIDC_TOKEN_FILE: &str = "MAYFLY_AGENT_OIDC_TOKEN_FILE";
/// Id of an organization of the pool, for the exchange.
pub const AGENT_ORGANIZATION_NAME: &str = "MAYFLY_AGENT_ORGANIZATION_NAME";
/// Name of the pool, for the exchange.
pub const AGENT_RUNNER_POOL_ID: &str = "MAYFLY_AGENT_RUNNER_POOL_ID";
/// Lifetime of the tokens that the exchange gives, in seconds.
pub const AGENT_TOKEN_EXPIRATION: &str = "MAYFLY_AGENT_TOKEN_EXPIRATION";
/// Address of the hub.
pub const AGENT_SERVICE_URL: &str = "MAYFLY_AGENT_SERVICE_URL";
/// Name of the agent.
pub const AGENT_NAME: &str = "MAYFLY_AGENT_NAME";
/// How many tasks an agent runs at a time.
pub const AGENT_SLOTS: &str = "MAYFLY_AGENT_SLOTS";
/// Where an agent's executors run.
pub const AGENT_DEPLOY_TARGET: &str = "MAYFLY_AGENT_DEPLOY_TARGET";
/// `true` ends the agent with its first task.
pub const AGENT_SINGLE_RUN: &str = "MAYFLY_AGENT_SINGLE_RUN";
/// Seconds without a run after which an agent ends.
pub const AGENT_IDLE_TIMEOUT: &str = "MAYFLY_AGENT_IDLE_TIMEOUT";
/// What happens to the runs when an agent stops.
pub const AGENT_ON_STOP: &str = "MAYFLY_AGENT_ON_STOP";
/// How long an agent that stops waits for its runs, in seconds.
pub const AGENT_DRAIN_TIMEOUT: &str = "MAYFLY_AGENT_DRAIN_TIMEOUT";
/// How long it then waits after it has interrupted them, in seconds.
pub const AGENT_GRACE_TIMEOUT: &str = "MAYFLY_AGENT_GRACE_TIMEOUT";
/// Whether a stopped agent leaves the list of its pool at once.
pub const AGENT_DISCONNECT_ON_STOP: &str = "MAYFLY_AGENT_DISCONNECT_ON_STOP";
/// Variables of the agent that executors get, separated by blanks.
pub const AGENT_ENV_FORWARD_ALLOWLIST: &str = "MAYFLY_AGENT_ENV_FORWARD_ALLOWLIST";
/// Where an agent keeps runs that are processes.
pub const AGENT_WORKING_DIRECTORY: &str = "MAYFLY_AGENT_WORKING_DIRECTORY";
/// Address on which an agent answers health checks.
pub const AGENT_LISTEN: &str = "MAYFLY_AGENT_LISTEN";

// Stores of secrets. The names that do not begin with `MAYFLY_` are those of other agents. Each can end with [`FILE_SUFFIX`].

/// The end of a name whose variable has the path of a file with the value.
pub const FILE_SUFFIX: &str = "_FILE";
/// `auto`, `on` or `off`: whether values of runs may refer to secrets. `auto` is on if there is a store.
pub const SECRET_REFERENCES: &str = "MAYFLY_SECRET_REFERENCES";
/// Patterns of the secrets that runs may name, separated by commas or blanks.
pub const SECRET_REFERENCES_ALLOW: &str = "MAYFLY_SECRET_REFERENCES_ALLOW";
/// `true` refuses runs with sensitive values that are no references.
pub const ONLY_SECRET_REFERENCES: &str = "MAYFLY_ONLY_SECRET_REFERENCES";
/// Comma list of stores: `ssm`, `gcp`, `azure`, `vault`. Without it, those with settings.
pub const SECRET_STORES: &str = "MAYFLY_SECRET_STORES";
/// JSON list of logins for some organizations or workspaces.
pub const SECRET_LOGINS: &str = "MAYFLY_SECRET_LOGINS";
/// The beginning of names of variables with secrets of these logins. Executors on machines get no others.
pub const SECRET_LOGIN_PREFIX: &str = "MAYFLY_SECRET_LOGIN_";
/// `true` lets the executor log in with the identity of its node.
pub const SECRETS_NODE_IDENTITY: &str = "MAYFLY_SECRETS_NODE_IDENTITY";
/// Keys for AWS Secrets Manager.
pub const CUSTOMER_AWS_ACCESS_KEY_ID: &str = "CUSTOMER_AWS_ACCESS_KEY_ID";
/// See [`CUSTOMER_AWS_ACCESS_KEY_ID`].
pub const CUSTOMER_AWS_SECRET_ACCESS_KEY: &str = "CUSTOMER_AWS_SECRET_ACCESS_KEY";
/// Region of AWS Secrets Manager.
pub const AWS_SECRETS_REGION: &str = "AWS_SECRETS_REGION";
/// `true` exchanges the pod's web identity for a session of [`CUSTOM_ROLE_FOR_OIDC_AWS_SSM`].
pub const USE_OIDC_FOR_AWS_SSM: &str = "USE_OIDC_FOR_AWS_SSM";
/// ARN of that role.
pub const CUSTOM_ROLE_FOR_OIDC_AWS_SSM: &str = "CUSTOM_ROLE_FOR_OIDC_AWS_SSM";
/// Seconds of that session.
pub const CUSTOM_DURATION_FOR_OIDC_AWS_SSM: &str = "CUSTOM_DURATION_FOR_OIDC_AWS_SSM";
/// ARN of a role that the login assumes.
pub const AWS_SECRETS_ROLE_ARN: &str = "MAYFLY_AWS_SECRETS_ROLE_ARN";
/// External id for that role.
pub const AWS_SECRETS_EXTERNAL_ID: &str = "MAYFLY_AWS_SECRETS_EXTERNAL_ID";
/// Project of secrets of Google.
pub const CUSTOMER_GOOGLE_PROJECT: &str = "CUSTOMER_GOOGLE_PROJECT";
/// JSON of a service account's key, or of a federated account.
pub const CUSTOMER_GOOGLE_CREDENTIALS: &str = "CUSTOMER_GOOGLE_CREDENTIALS";
/// Client for Azure Key Vault.
pub const CUSTOMER_AZURE_CLIENT_ID: &str = "CUSTOMER_AZURE_CLIENT_ID";
/// See [`CUSTOMER_AZURE_CLIENT_ID`].
pub const CUSTOMER_AZURE_CLIENT_SECRET: &str = "CUSTOMER_AZURE_CLIENT_SECRET";
/// See [`CUSTOMER_AZURE_CLIENT_ID`].
pub const CUSTOMER_AZURE_TENANT_ID: &str = "CUSTOMER_AZURE_TENANT_ID";
/// Domain of the vaults of another cloud.
pub const AZURE_SECRETS_SUFFIX: &str = "MAYFLY_AZURE_SECRETS_SUFFIX";
/// Address of Vault or `OpenBao`.
pub const CUSTOMER_VAULT_ADDRESS: &str = "CUSTOMER_VAULT_ADDRESS";
/// Token of Vault.
pub const CUSTOMER_VAULT_TOKEN: &str = "CUSTOMER_VAULT_TOKEN";
/// User of Vault.
pub const CUSTOMER_VAULT_USERNAME: &str = "CUSTOMER_VAULT_USERNAME";
/// Password of that user.
pub const CUSTOMER_VAULT_PASSWORD: &str = "CUSTOMER_VAULT_PASSWORD";
/// Role of a login at Vault.
pub const CUSTOMER_VAULT_ROLE_NAME: &str = "CUSTOMER_VAULT_ROLE_NAME";
/// Mount of the login at Vault.
pub const CUSTOMER_VAULT_LOGIN_PATH: &str = "CUSTOMER_VAULT_LOGIN_PATH";
/// `token`, `password`, `certificate`, `kubernetes`, `jwt`, `approle` or `aws`.
pub const VAULT_METHOD: &str = "MAYFLY_VAULT_METHOD";
/// Namespace of references that name none.
pub const VAULT_NAMESPACE: &str = "MAYFLY_VAULT_NAMESPACE";
/// Namespace of the login, if it is not that of the reference.
pub const VAULT_LOGIN_NAMESPACE: &str = "MAYFLY_VAULT_LOGIN_NAMESPACE";
/// File with the token of the methods `kubernetes` and `jwt`.
pub const VAULT_JWT_FILE: &str = "MAYFLY_VAULT_JWT_FILE";
/// The method `approle`.
pub const VAULT_ROLE_ID: &str = "MAYFLY_VAULT_ROLE_ID";
/// The method `approle`.
pub const VAULT_SECRET_ID: &str = "MAYFLY_VAULT_SECRET_ID";
/// Certificate of the method `certificate`, in PEM.
pub const VAULT_CLIENT_CERT: &str = "MAYFLY_VAULT_CLIENT_CERT";
/// Its key, in PEM.
pub const VAULT_CLIENT_KEY: &str = "MAYFLY_VAULT_CLIENT_KEY";
/// Value of the header that the method `aws` signs.
pub const VAULT_AWS_SERVER_ID: &str = "MAYFLY_VAULT_AWS_SERVER_ID";
/// PEM file with the authorities of Vault, beside the system's.
pub const VAULT_CA_FILE: &str = "MAYFLY_VAULT_CA_FILE";
/// `auto`, `1` or `2`: the key-value engine of paths of which Vault does not say how they are mounted.
pub const VAULT_KV_VERSION: &str = "MAYFLY_VAULT_KV_VERSION";
/// The mount of these paths.
pub const VAULT_KV_MOUNT: &str = "MAYFLY_VAULT_KV_MOUNT";

/// The secrets among the settings of stores of secrets.
pub const SECRET_STORE_SECRETS: [&str; 9] = [
    CUSTOMER_AWS_ACCESS_KEY_ID,
    CUSTOMER_AWS_SECRET_ACCESS_KEY,
    CUSTOMER_GOOGLE_CREDENTIALS,
    CUSTOMER_AZURE_CLIENT_SECRET,
    CUSTOMER_VAULT_TOKEN,
    CUSTOMER_VAULT_PASSWORD,
    VAULT_ROLE_ID,
    VAULT_SECRET_ID,
    VAULT_CLIENT_KEY,
];

/// All settings of stores of secrets.
pub const SECRET_STORE_SETTINGS: [&str; 38] = [
    SECRET_REFERENCES,
    SECRET_REFERENCES_ALLOW,
    ONLY_SECRET_REFERENCES,
    SECRET_STORES,
    SECRET_LOGINS,
    SECRETS_NODE_IDENTITY,
    CUSTOMER_AWS_ACCESS_KEY_ID,
    CUSTOMER_AWS_SECRET_ACCESS_KEY,
    AWS_SECRETS_REGION,
    USE_OIDC_FOR_AWS_SSM,
    CUSTOM_ROLE_FOR_OIDC_AWS_SSM,
    CUSTOM_DURATION_FOR_OIDC_AWS_SSM,
    AWS_SECRETS_ROLE_ARN,
    AWS_SECRETS_EXTERNAL_ID,
    CUSTOMER_GOOGLE_PROJECT,
    CUSTOMER_GOOGLE_CREDENTIALS,
    CUSTOMER_AZURE_CLIENT_ID,
    CUSTOMER_AZURE_CLIENT_SECRET,
    CUSTOMER_AZURE_TENANT_ID,
    AZURE_SECRETS_SUFFIX,
    CUSTOMER_VAULT_ADDRESS,
    CUSTOMER_VAULT_TOKEN,
    CUSTOMER_VAULT_USERNAME,
    CUSTOMER_VAULT_PASSWORD,
    CUSTOMER_VAULT_ROLE_NAME,
    CUSTOMER_VAULT_LOGIN_PATH,
    VAULT_METHOD,
    VAULT_NAMESPACE,
    VAULT_LOGIN_NAMESPACE,
    VAULT_JWT_FILE,
    VAULT_ROLE_ID,
    VAULT_SECRET_ID,
    VAULT_CLIENT_CERT,
    VAULT_CLIENT_KEY,
    VAULT_AWS_SERVER_ID,
    VAULT_CA_FILE,
    VAULT_KV_VERSION,
    VAULT_KV_MOUNT,
];

/// The variables with secrets of the platform, of its storage and of Mayfly (contract 10.1), beside those of the job data.
pub const SECRETS: [&str; 11] = [
    INTERNAL_SECRET,
    LEASE_TOKEN,
    REPORT_KEY,
    AGENT_TOKEN,
    AWS_ACCESS_KEY,
    AWS_SECRET_KEY,
    AZURE_ACCESS_KEY,
    GCP_CREDENTIALS,
    REDIS_PASSWORD,
    REDIS_SENTINEL_PASSWORD,
    REDIS_TRUSTSTORE_PASSWORD,
];

/// Whether the variable contains a secret of the platform, of its storage, of Mayfly, of hooks, of a login to a store of secrets
/// or to a git server, or of the assumer of roles, or job data.
#[must_use]
pub fn is_secret(name: &str) -> bool {
    SECRETS.contains(&name)
        || SECRET_STORE_SECRETS.contains(&name)
        || ASSUMER_SECRETS.contains(&name)
        || name.starts_with(FOR_HOOKS_PREFIX)
        || name.starts_with(GIT_LOGIN_PREFIX)
        || name.starts_with(SECRET_LOGIN_PREFIX)
        || is_job_data(name)
}

/// The largest environment string that Linux accepts at `execve`, with name, `=` and NUL (`MAX_ARG_STRLEN`).
pub const MAX_ENV_STRING_BYTES: usize = 131_072;

/// The variable of a part of job data: `EphemeralJobData`, `EphemeralJobData_1` and so on. Large job data has several parts.
#[must_use]
pub fn job_data_part(index: usize) -> String {
    match index {
        0 => JOB_DATA.to_owned(),
        index => format!("{JOB_DATA}_{index}"),
    }
}

/// Whether the variable contains job data, a part of it, or the path of its file.
#[must_use]
pub fn is_job_data(name: &str) -> bool {
    name == JOB_DATA_FILE
        || name
            .strip_prefix(JOB_DATA)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('_'))
}
