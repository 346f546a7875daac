{{/*
Environment is built as {"items": [EnvVar, ...]}, so that the lists of several levels can be joined without a name twice:
server-side apply refuses a container with one.
*/}}

{{/* Joins lists, given as `levels` from the lowest: of those with the same `key`, the last wins, at the place of the first. */}}
{{- define "mayfly.join" -}}
{{- $key := .key -}}
{{- $found := dict -}}
{{- $order := list -}}
{{- range .levels -}}
{{- range . -}}
{{- $is := get . $key -}}
{{- if not (hasKey $found $is) -}}{{- $order = append $order $is -}}{{- end -}}
{{- $_ := set $found $is . -}}
{{- end -}}
{{- end -}}
{{- $all := list -}}
{{- range $order -}}{{- $all = append $all (get $found .) -}}{{- end -}}
{{- dict "items" $all | toJson -}}
{{- end -}}

{{/* One EnvVar from a Secret. Takes name, secret and key. */}}
{{- define "mayfly.env.fromSecret" -}}
{{- dict "name" .name "valueFrom" (dict "secretKeyRef" (dict "name" .secret "key" .key)) | toJson -}}
{{- end -}}

{{/*
What launcher and executor are told alike: how to reach the platform, Redis and the store; proxy and authorities. Takes root and
relay: executors behind the relay of a hub get no way to the platform and its store, and no secret of them.
*/}}
{{- define "mayfly.env.shared" -}}
{{- $all := list -}}
{{- if .relay -}}
{{- with .root.Values.platform.publicApiUrl }}{{- $all = append $all (dict "name" "TerrakubeApiUrl" "value" .) -}}{{- end -}}
{{- else -}}
{{- $all = concat (fromJson (include "mayfly.env.platform" .root)).items (fromJson (include "mayfly.env.storage" .root)).items -}}
{{- end -}}
{{- $all = concat $all (fromJson (include "mayfly.env.common" .root)).items -}}
{{- dict "items" $all | toJson -}}
{{- end -}}

{{/* How to reach the platform and Redis, with the platform's secret. */}}
{{- define "mayfly.env.platform" -}}
{{- $env := list -}}
{{- $platform := .Values.platform -}}
{{- with $platform.apiUrl -}}
{{- $env = append $env (dict "name" "AzBuilderApiUrl" "value" .) -}}
{{- $env = append $env (dict "name" "TerrakubeApiUrl" "value" $platform.publicApiUrl) -}}
{{- if not $platform.security -}}
{{- $env = append $env (dict "name" "TerrakubeEnableSecurity" "value" "false") -}}
{{- end -}}
{{- end -}}
{{- with $platform.registryDomain }}{{- $env = append $env (dict "name" "TerrakubeRegistryDomain" "value" .) -}}{{- end -}}
{{- if $platform.logViaApi }}{{- $env = append $env (dict "name" "LogViaApi" "value" "true") -}}{{- end -}}
{{- $redis := $platform.redis -}}
{{- if or $redis.host $redis.clusterNodes $redis.sentinel.nodes -}}
{{- with $redis.host -}}
{{- $env = append $env (dict "name" "TerrakubeRedisHostname" "value" .) -}}
{{- $env = append $env (dict "name" "TerrakubeRedisPort" "value" (toString $redis.port)) -}}
{{- end -}}
{{- with $redis.clusterNodes }}{{- $env = append $env (dict "name" "TerrakubeRedisClusterNodes" "value" (join "," .)) -}}{{- end -}}
{{- with $redis.sentinel -}}
{{- if .nodes -}}
{{- $env = append $env (dict "name" "TerrakubeRedisSentinelMaster" "value" .master) -}}
{{- $env = append $env (dict "name" "TerrakubeRedisSentinelNodes" "value" (join "," .nodes)) -}}
{{- with .username }}{{- $env = append $env (dict "name" "TerrakubeRedisSentinelUsername" "value" .) -}}{{- end -}}
{{- if .existingSecret -}}
{{- $env = append $env (fromJson (include "mayfly.env.fromSecret" (dict "name" "TerrakubeRedisSentinelPassword" "secret" .existingSecret "key" .key))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with $redis.username }}{{- $env = append $env (dict "name" "TerrakubeRedisUsername" "value" .) -}}{{- end -}}
{{- with $redis.existingSecret -}}
{{- $env = append $env (fromJson (include "mayfly.env.fromSecret" (dict "name" "TerrakubeRedisPassword" "secret" . "key" $redis.key))) -}}
{{- end -}}
{{- $env = append $env (dict "name" "TerrakubeRedisTimeout" "value" (toString (int64 $redis.timeoutMilliseconds))) -}}
{{- if $redis.tls -}}
{{- $env = append $env (dict "name" "TerrakubeRedisSSL" "value" "true") -}}
{{- with include "mayfly.caFile" $ }}{{- $env = append $env (dict "name" "MAYFLY_REDIS_CA_FILE" "value" .) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- with .Values.auth.internalSecret -}}
{{- if and .existingSecret $platform.apiUrl -}}
{{- $env = append $env (fromJson (include "mayfly.env.fromSecret" (dict "name" "InternalSecret" "secret" .existingSecret "key" .key))) -}}
{{- end -}}
{{- end -}}
{{- dict "items" $env | toJson -}}
{{- end -}}

{{/* How to reach the artifact store. */}}
{{- define "mayfly.env.storage" -}}
{{- $env := list -}}
{{- $storage := .Values.platform.storage -}}
{{- /* The store itself may come from a Secret of the platform's chart. */ -}}
{{- with $storage.backendCredentials }}{{- $env = append $env (dict "name" "MAYFLY_BACKEND_CREDENTIALS" "value" .) -}}{{- end -}}
{{- if $storage.type -}}
{{- $types := dict "local" "LocalTerraformStateImpl" "aws" "AwsTerraformStateImpl" "azure" "AzureTerraformStateImpl" "gcp" "GcpTerraformStateImpl" -}}
{{- $env = append $env (dict "name" "TerraformStateType" "value" (get $types $storage.type)) -}}
{{- if eq $storage.type "aws" -}}
{{- $aws := $storage.aws -}}
{{- $env = append $env (dict "name" "AwsTerraformStateBucketName" "value" $aws.bucket) -}}
{{- $env = append $env (dict "name" "AwsTerraformStateRegion" "value" $aws.region) -}}
{{- with $aws.endpoint }}{{- $env = append $env (dict "name" "AwsEndpoint" "value" .) -}}{{- end -}}
{{- with $aws.endpointRegion }}{{- $env = append $env (dict "name" "AwsEndpointRegion" "value" .) -}}{{- end -}}
{{- if eq (toString $aws.pathStyle) "false" }}{{- $env = append $env (dict "name" "AwsPathStyleAccess" "value" "false") -}}{{- end -}}
{{- if $aws.useLockfile }}{{- $env = append $env (dict "name" "AwsUseLockfile" "value" "true") -}}{{- end -}}
{{- if $aws.roleAuth }}{{- $env = append $env (dict "name" "AwsEnableRoleAuth" "value" "true") -}}{{- end -}}
{{- with $aws.roleArn }}{{- $env = append $env (dict "name" "MAYFLY_STORE_AWS_ROLE_ARN" "value" .) -}}{{- end -}}
{{- with $aws.existingSecret -}}
{{- $env = append $env (fromJson (include "mayfly.env.fromSecret" (dict "name" "AwsTerraformStateAccessKey" "secret" . "key" $aws.accessKeyKey))) -}}
{{- $env = append $env (fromJson (include "mayfly.env.fromSecret" (dict "name" "AwsTerraformStateSecretKey" "secret" . "key" $aws.secretKeyKey))) -}}
{{- end -}}
{{- else if eq $storage.type "azure" -}}
{{- $azure := $storage.azure -}}
{{- $env = append $env (dict "name" "AzureTerraformStateStorageAccountName" "value" $azure.accountName) -}}
{{- $env = append $env (dict "name" "AzureTerraformStateStorageContainerName" "value" $azure.container) -}}
{{- with $azure.resourceGroup }}{{- $env = append $env (dict "name" "AzureTerraformStateResourceGroup" "value" .) -}}{{- end -}}
{{- if $azure.useIdentity }}{{- $env = append $env (dict "name" "MAYFLY_STORE_AZURE_IDENTITY" "value" "true") -}}{{- end -}}
{{- with $azure.existingSecret -}}
{{- $env = append $env (fromJson (include "mayfly.env.fromSecret" (dict "name" "AzureTerraformStateStorageAccessKey" "secret" . "key" $azure.key))) -}}
{{- end -}}
{{- else if eq $storage.type "gcp" -}}
{{- $gcp := $storage.gcp -}}
{{- $env = append $env (dict "name" "GcpTerraformStateBucketName" "value" $gcp.bucket) -}}
{{- with $gcp.projectId }}{{- $env = append $env (dict "name" "GcpTerraformStateProjectId" "value" .) -}}{{- end -}}
{{- if $gcp.useIdentity }}{{- $env = append $env (dict "name" "MAYFLY_STORE_GCP_IDENTITY" "value" "true") -}}{{- end -}}
{{- with $gcp.existingSecret -}}
{{- $env = append $env (fromJson (include "mayfly.env.fromSecret" (dict "name" "GcpTerraformStateCredentials" "secret" . "key" $gcp.key))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- dict "items" $env | toJson -}}
{{- end -}}

{{/* The stores of secrets, as executors are told of them. */}}
{{- define "mayfly.env.secretStores" -}}
{{- $stores := .Values.secretStores -}}
{{- $env := list -}}
{{- $vault := $stores.vault -}}
{{- range $name, $value := dict
  "AWS_SECRETS_REGION" $stores.aws.region
  "CUSTOMER_AZURE_CLIENT_ID" $stores.azure.clientId
  "CUSTOMER_AZURE_TENANT_ID" $stores.azure.tenantId
  "CUSTOMER_GOOGLE_PROJECT" $stores.gcp.project
  "CUSTOMER_VAULT_ADDRESS" $vault.address
  "CUSTOMER_VAULT_LOGIN_PATH" $vault.loginPath
  "CUSTOMER_VAULT_ROLE_NAME" $vault.role
  "CUSTOMER_VAULT_USERNAME" $vault.username
  "CUSTOM_ROLE_FOR_OIDC_AWS_SSM" $stores.aws.webIdentity.roleArn
  "CUSTOM_DURATION_FOR_OIDC_AWS_SSM" (ternary (toString (int $stores.aws.webIdentity.durationSeconds)) "" (gt (int $stores.aws.webIdentity.durationSeconds) 0))
  "MAYFLY_AWS_SECRETS_EXTERNAL_ID" $stores.aws.externalId
  "MAYFLY_AWS_SECRETS_ROLE_ARN" $stores.aws.roleArn
  "MAYFLY_AZURE_SECRETS_SUFFIX" $stores.azure.vaultDomain
  "MAYFLY_ONLY_SECRET_REFERENCES" (ternary "true" "" $stores.onlyReferences)
  "MAYFLY_SECRETS_NODE_IDENTITY" (ternary "true" "" $stores.nodeIdentity)
  "MAYFLY_SECRET_LOGINS" (empty $stores.logins | ternary "" (toJson $stores.logins))
  "MAYFLY_SECRET_REFERENCES" (eq $stores.references "auto" | ternary "" $stores.references)
  "MAYFLY_SECRET_REFERENCES_ALLOW" (join " " $stores.allow)
  "MAYFLY_SECRET_STORES" (join "," $stores.enabled)
  "MAYFLY_VAULT_CA_FILE" $vault.caFile
  "MAYFLY_VAULT_JWT_FILE" $vault.jwtFile
  "MAYFLY_VAULT_KV_MOUNT" $vault.kvMount
  "MAYFLY_VAULT_KV_VERSION" (eq $vault.kvVersion "auto" | ternary "" $vault.kvVersion)
  "MAYFLY_VAULT_LOGIN_NAMESPACE" $vault.loginNamespace
  "MAYFLY_VAULT_METHOD" $vault.authMethod
  "MAYFLY_VAULT_NAMESPACE" $vault.namespace
  "USE_OIDC_FOR_AWS_SSM" (empty $stores.aws.webIdentity.roleArn | ternary "" "true")
-}}
{{- if $value }}{{- $env = append $env (dict "name" $name "value" $value) -}}{{- end -}}
{{- end -}}
{{- $secrets := list -}}
{{- with $stores.aws.existingSecret -}}
{{- $secrets = append $secrets (dict "name" "CUSTOMER_AWS_ACCESS_KEY_ID" "secret" . "key" $stores.aws.accessKeyIdKey) -}}
{{- $secrets = append $secrets (dict "name" "CUSTOMER_AWS_SECRET_ACCESS_KEY" "secret" . "key" $stores.aws.secretAccessKeyKey) -}}
{{- end -}}
{{- with $stores.gcp.existingSecret -}}
{{- $secrets = append $secrets (dict "name" "CUSTOMER_GOOGLE_CREDENTIALS" "secret" . "key" $stores.gcp.credentialsKey) -}}
{{- end -}}
{{- with $stores.azure.existingSecret -}}
{{- $secrets = append $secrets (dict "name" "CUSTOMER_AZURE_CLIENT_SECRET" "secret" . "key" $stores.azure.clientSecretKey) -}}
{{- end -}}
{{- with $vault.existingSecret -}}
{{- $byMethod := dict
  "token" (dict "CUSTOMER_VAULT_TOKEN" "token")
  "password" (dict "CUSTOMER_VAULT_PASSWORD" "password")
  "approle" (dict "MAYFLY_VAULT_ROLE_ID" "roleId" "MAYFLY_VAULT_SECRET_ID" "secretId")
  "certificate" (dict "MAYFLY_VAULT_CLIENT_CERT" "tls.crt" "MAYFLY_VAULT_CLIENT_KEY" "tls.key")
-}}
{{- range $name, $key := get $byMethod $vault.authMethod | default dict -}}
{{- $secrets = append $secrets (dict "name" $name "secret" $vault.existingSecret "key" $key) -}}
{{- end -}}
{{- end -}}
{{- range $secrets }}{{- $env = append $env (fromJson (include "mayfly.env.fromSecret" .)) -}}{{- end -}}
{{- dict "items" $env | toJson -}}
{{- end -}}

{{/* The operator's logins for git servers, for executors: a list that names variables, and these. */}}
{{- define "mayfly.env.gitLogins" -}}
{{- $list := list -}}
{{- $env := list -}}
{{- range $number, $login := .Values.vcs.logins -}}
{{- $variable := printf "MAYFLY_GIT_LOGIN_%d" $number -}}
{{- $list = append $list (merge (dict "variable" $variable) (omit $login "existingSecret" "key")) -}}
{{- $env = append $env (fromJson (include "mayfly.env.fromSecret" (dict "name" $variable "secret" $login.existingSecret "key" $login.key))) -}}
{{- end -}}
{{- with $list }}{{- $env = prepend $env (dict "name" "MAYFLY_GIT_LOGINS" "value" (toJson .)) -}}{{- end -}}
{{- dict "items" $env | toJson -}}
{{- end -}}

{{/* What every program is told: proxy, authorities, and the key of final reports. */}}
{{- define "mayfly.env.common" -}}
{{- $env := list -}}
{{- $proxy := .Values.global.proxy -}}
{{- if or $proxy.httpProxy $proxy.httpsProxy -}}
{{- /* Kubernetes gives every container the API server's address, and expands it here. */ -}}
{{- $direct := join "," (concat (compact (list $proxy.noProxy)) (list "localhost,127.0.0.1,::1,.svc,.cluster.local,$(KUBERNETES_SERVICE_HOST)")) -}}
{{- range $name, $value := dict "HTTP_PROXY" $proxy.httpProxy "HTTPS_PROXY" $proxy.httpsProxy "NO_PROXY" $direct -}}
{{- if $value -}}
{{- $env = append $env (dict "name" $name "value" $value) -}}
{{- $env = append $env (dict "name" (lower $name) "value" $value) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with include "mayfly.caFile" . }}{{- $env = append $env (dict "name" "SSL_CERT_FILE" "value" .) -}}{{- end -}}
{{- with .Values.auth.reportKey -}}
{{- if .existingSecret -}}
{{- $env = append $env (fromJson (include "mayfly.env.fromSecret" (dict "name" "MAYFLY_REPORT_KEY" "secret" .existingSecret "key" .key))) -}}
{{- end -}}
{{- end -}}
{{- dict "items" $env | toJson -}}
{{- end -}}

{{/* What launcher and agent are told of Jobs, and of the cluster. Takes root and runsIn. */}}
{{- define "mayfly.env.jobs" -}}
{{- $root := .root -}}
{{- $launcher := .root.Values.launcher -}}
{{- $executor := .root.Values.executor -}}
{{- $jobs := $launcher.jobs -}}
{{- /* The launcher itself puts the registry of every image in front of it. */ -}}
{{- $image := include "mayfly.image" (dict "root" .root "image" $executor.image "leaveRegistry" true) -}}
{{- $env := list
  (dict "name" "ExecutorEphemeralNamespace" "value" .runsIn)
  (dict "name" "ExecutorEphemeralImage" "value" $image)
  (dict "name" "ExecutorEphemeralSecret" "value" (join "," $executor.secretNames))
  (dict "name" "MAYFLY_EXECUTOR_KIND" "value" $executor.image.kind)
  (dict "name" "MAYFLY_IMAGE_PULL_POLICY" "value" $executor.image.pullPolicy)
  (dict "name" "MAYFLY_JOB_DATA_MODE" "value" $executor.jobData.mode)
  (dict "name" "ExecutorEphemeralActiveDeadlineSeconds" "value" (toString (int64 $executor.job.activeDeadlineSeconds)))
  (dict "name" "ExecutorEphemeralTtlSecondsAfterFinished" "value" (toString (int64 $executor.job.ttlSecondsAfterFinished)))
  (dict "name" "ExecutorEphemeralTerminationGracePeriodSeconds" "value" (toString (int64 $executor.terminationGracePeriodSeconds)))
  (dict "name" "MAYFLY_APPLY_GRACE_PERIOD_SECONDS" "value" (toString (int64 $executor.applyTerminationGracePeriodSeconds)))
  (dict "name" "MAYFLY_WORK_SIZE_LIMIT" "value" (toString $executor.workspace.sizeLimit))
  (dict "name" "MAYFLY_TMP_SIZE_LIMIT" "value" (toString $executor.workspace.tmpSizeLimit))
  (dict "name" "MAYFLY_HISTORY_SUCCEEDED" "value" (toString $executor.job.historyLimit.successful))
  (dict "name" "MAYFLY_HISTORY_FAILED" "value" (toString $executor.job.historyLimit.failed))
  (dict "name" "MAYFLY_UNSCHEDULABLE_SECONDS" "value" (toString (int64 $jobs.schedulingTimeoutSeconds)))
  (dict "name" "MAYFLY_CONTAINER_ERROR_SECONDS" "value" (toString (int64 $jobs.containerErrorTimeoutSeconds)))
  (dict "name" "MAYFLY_START_SECONDS" "value" (toString (int64 $jobs.startTimeoutSeconds)))
-}}
{{- with .root.Values.global.imageRegistry }}{{- $env = append $env (dict "name" "MAYFLY_IMAGE_REGISTRY" "value" .) -}}{{- end -}}
{{- with include "mayfly.pullSecretNames" .root }}{{- $env = append $env (dict "name" "MAYFLY_IMAGE_PULL_SECRETS" "value" .) -}}{{- end -}}
{{- with $executor.configMapNames }}{{- $env = append $env (dict "name" "ExecutorEphemeralConfigMap" "value" (join "," .)) -}}{{- end -}}
{{- if not (kindIs "invalid" $executor.job.backoffLimit) -}}
{{- $env = append $env (dict "name" "ExecutorEphemeralBackoffLimit" "value" (toString (int64 $executor.job.backoffLimit))) -}}
{{- end -}}
{{- $identity := .root.Values.identity -}}
{{- range $name, $value := dict
  "MAYFLY_IDENTITY_AWS_ROLE_ARN" $identity.aws.roleArn
  "MAYFLY_IDENTITY_GCP_PROVIDER" $identity.gcp.provider
  "MAYFLY_IDENTITY_GCP_SERVICE_ACCOUNT" $identity.gcp.serviceAccount
  "MAYFLY_IDENTITY_AZURE_CLIENT_ID" $identity.azure.clientId
  "MAYFLY_IDENTITY_AZURE_TENANT_ID" $identity.azure.tenantId
  "MAYFLY_IDENTITY_AZURE_SUBSCRIPTION_ID" $identity.azure.subscriptionId
-}}
{{- if $value }}{{- $env = append $env (dict "name" $name "value" $value) -}}{{- end -}}
{{- end -}}
{{- range $name, $pairs := dict "EPHEMERAL_CONFIG_ANNOTATIONS" $executor.job.annotations "EPHEMERAL_CONFIG_LABELS" $executor.job.labels -}}
{{- if $pairs -}}
{{- $text := list -}}
{{- range $key, $value := $pairs }}{{- $text = append $text (printf "%s=%s" $key $value) -}}{{- end -}}
{{- $env = append $env (dict "name" $name "value" (join ";" $text)) -}}
{{- end -}}
{{- end -}}
{{- with .root.Values.persistence.cache -}}
{{- if and .enabled (or (not .hostPath) (eq .mode "fill")) -}}
{{- $env = append $env (dict "name" "MAYFLY_PLUGIN_CACHE_DIR" "value" .mountPath) -}}
{{- end -}}
{{- if and .enabled .emptyDir -}}
{{- $env = append $env (dict "name" "MAYFLY_PLUGIN_CACHE" "value" "empty-dir") -}}
{{- end -}}
{{- if and .enabled (eq .mode "fill") -}}
{{- $env = append $env (dict "name" "MAYFLY_PROVIDER_CACHE_MODE" "value" .mode) -}}
{{- with .registries }}{{- $env = append $env (dict "name" "MAYFLY_PROVIDER_CACHE_REGISTRIES" "value" (join "," .)) -}}{{- end -}}
{{- end -}}
{{- if and .enabled (not .hostPath) (not .emptyDir) -}}
{{- $env = append $env (dict "name" "MAYFLY_PLUGIN_CACHE_CLAIM" "value" (include "mayfly.claimName" (dict "root" $root "kind" "cache"))) -}}
{{- end -}}
{{- end -}}
{{- dict "items" $env | toJson -}}
{{- end -}}

{{/* Environment of the launcher of a namespace of runs, and of the pods of `helm test`. Takes root and runsIn. */}}
{{- define "mayfly.launcher.env" -}}
{{- $root := .root -}}
{{- $launcher := .root.Values.launcher -}}
{{- $executor := .root.Values.executor -}}
{{- $jobs := $launcher.jobs -}}
{{- $env := list
  (dict "name" "MAYFLY_TARGET" "value" $launcher.target)
  (dict "name" "MAYFLY_LISTEN" "value" (printf "%s:%d" $launcher.listenAddress (int $launcher.service.port)))
  (dict "name" "MAYFLY_HEALTH_LISTEN" "value" (printf "%s:%d" $launcher.listenAddress (int $launcher.service.healthPort)))
  (dict "name" "MAYFLY_LOG" "value" .root.Values.log.level)
  (dict "name" "MAYFLY_POD_NAME" "valueFrom" (dict "fieldRef" (dict "fieldPath" "metadata.name")))
  (dict "name" "MAYFLY_DRAIN_SECONDS" "value" (toString (int $launcher.shutdown.drainSeconds)))
  (dict "name" "MAYFLY_SHUTDOWN_SECONDS" "value" (toString (int $launcher.shutdown.timeoutSeconds)))
-}}
{{- if include "mayfly.launcher.runs" .root -}}
{{- $env = concat $env (fromJson (include "mayfly.env.jobs" .)).items (list
  (dict "name" "MAYFLY_RECORDS" "value" $executor.records)
  (dict "name" "MAYFLY_MAX_JOBS_IN_FLIGHT" "value" (toString (int64 $jobs.maxConcurrent)))
  (dict "name" "MAYFLY_POD_TEMPLATE_FILE" "value" "/etc/mayfly/launcher/pod-template.yaml")
  (dict "name" "MAYFLY_POLICY_FILE" "value" "/etc/mayfly/launcher/policy.yaml")
) -}}
{{- end -}}
{{- with .root.Values.log.format }}{{- $env = append $env (dict "name" "MAYFLY_LOG_FORMAT" "value" .) -}}{{- end -}}
{{- $env = concat $env (fromJson (include "mayfly.env.vcs" .root)).items -}}
{{- with .root.Values.auth.internalSecret.existingSecret -}}
{{- $env = append $env (fromJson (include "mayfly.env.fromSecret" (dict "name" "InternalSecret" "secret" . "key" $root.Values.auth.internalSecret.key))) -}}
{{- end -}}
{{- if include "mayfly.launcher.mountsState" . -}}
{{- $env = append $env (dict "name" "MAYFLY_DATA_DIR" "value" .root.Values.persistence.state.mountPath) -}}
{{- end -}}
{{- if $jobs.requireWorkspaceFlag -}}
{{- $env = append $env (dict "name" "MAYFLY_ROUTE" "value" "flag") -}}
{{- $env = append $env (dict "name" "MAYFLY_PERSISTENT_EXECUTOR_URL" "value" $jobs.persistentExecutorUrl) -}}
{{- end -}}
{{- with $launcher.compatJavaToolOptions }}{{- $env = append $env (dict "name" "JAVA_TOOL_OPTIONS" "value" .) -}}{{- end -}}
{{- $shared := (fromJson (include "mayfly.env.shared" (dict "root" .root))).items -}}
{{- include "mayfly.join" (dict "key" "name" "levels" (list $env $shared .root.Values.global.extraEnv $launcher.extraEnv)) -}}
{{- end -}}

{{/* What a launcher is told as a hub. Nothing without one. */}}
{{- define "mayfly.hub.env" -}}
{{- $hub := .Values.hub -}}
{{- $env := list -}}
{{- if $hub.enabled -}}
{{- $env = list
  (dict "name" "MAYFLY_POOLS_FILE" "value" "/etc/mayfly/pools/pools.yaml")
  (dict "name" "MAYFLY_POOL_LOST_SECONDS" "value" (toString (int64 $hub.lostSeconds)))
  (dict "name" "MAYFLY_POOL_QUEUE_SECONDS" "value" (toString (int64 $hub.queueSeconds)))
-}}
{{- if include "mayfly.hub.claim" . -}}
{{- /* In a folder of its own, which the hub makes for itself alone. */ -}}
{{- $env = append $env (dict "name" "MAYFLY_POOL_STORE" "value" "sqlite:/var/lib/mayfly-hub/pools/pools.db") -}}
{{- else -}}
{{- with $hub.store.postgres -}}
{{- $env = append $env (fromJson (include "mayfly.env.fromSecret" (dict "name" "MAYFLY_POOL_STORE" "secret" .existingSecret "key" .key))) -}}
{{- end -}}
{{- end -}}
{{- if $hub.jobTokenKeys.existingSecret -}}
{{- $env = append $env (dict "name" "MAYFLY_JOB_TOKEN_KEYS_FILE" "value" "/etc/mayfly/job-token-keys/keys") -}}
{{- end -}}
{{- end -}}
{{- dict "items" $env | toJson -}}
{{- end -}}

{{/*
Volumes and mounts of a hub. What is replaced without a restart is mounted as a folder: a file that is mounted by `subPath` never
changes.
*/}}
{{- define "mayfly.hub.volumes" -}}
{{- $hub := .Values.hub -}}
- name: pools
  {{- if $hub.poolsExistingSecret.name }}
  secret:
    secretName: {{ $hub.poolsExistingSecret.name }}
    items:
      - key: {{ $hub.poolsExistingSecret.key }}
        path: pools.yaml
  {{- else }}
  configMap:
    name: {{ default (printf "%s-pools" (include "mayfly.fullname" .)) $hub.poolsExistingConfigMap.name }}
    items:
      - key: {{ ternary $hub.poolsExistingConfigMap.key "pools.yaml" (not (empty $hub.poolsExistingConfigMap.name)) }}
        path: pools.yaml
  {{- end }}
{{- with $hub.jobTokenKeys.existingSecret }}
- name: job-token-keys
  secret:
    secretName: {{ . }}
    items:
      - key: {{ $hub.jobTokenKeys.key }}
        path: keys
{{- end }}
{{- with include "mayfly.hub.claim" . }}
- name: hub
  persistentVolumeClaim:
    claimName: {{ . }}
{{- end }}
{{- end -}}

{{- define "mayfly.hub.volumeMounts" -}}
- name: pools
  mountPath: /etc/mayfly/pools
  readOnly: true
{{- if .Values.hub.jobTokenKeys.existingSecret }}
- name: job-token-keys
  mountPath: /etc/mayfly/job-token-keys
  readOnly: true
{{- end }}
{{- if include "mayfly.hub.claim" . }}
- name: hub
  mountPath: /var/lib/mayfly-hub
{{- end }}
{{- end -}}

{{/* Environment of the agent. It needs nothing of the platform. */}}
{{- define "mayfly.agent.env" -}}
{{- $agent := .Values.agent -}}
{{- $env := list
  (dict "name" "MAYFLY_AGENT_SERVICE_URL" "value" $agent.serviceUrl)
  (dict "name" "MAYFLY_AGENT_DEPLOY_TARGET" "value" "kubernetes")
  (dict "name" "MAYFLY_AGENT_SLOTS" "value" (toString (int64 $agent.slots)))
  (dict "name" "MAYFLY_AGENT_ON_STOP" "value" $agent.onStop)
  (dict "name" "MAYFLY_AGENT_DRAIN_TIMEOUT" "value" (toString (int64 $agent.drainTimeoutSeconds)))
  (dict "name" "MAYFLY_AGENT_GRACE_TIMEOUT" "value" (toString (int64 $agent.graceTimeoutSeconds)))
  (dict "name" "MAYFLY_AGENT_DISCONNECT_ON_STOP" "value" (toString $agent.disconnectOnStop))
  (dict "name" "MAYFLY_AGENT_LISTEN" "value" (printf "%s:%d" $agent.listenAddress (int $agent.port)))
  (dict "name" "MAYFLY_LOG" "value" .Values.log.level)
  (dict "name" "MAYFLY_POD_TEMPLATE_FILE" "value" "/etc/mayfly/agent/pod-template.yaml")
  (dict "name" "MAYFLY_POLICY_FILE" "value" "/etc/mayfly/agent/policy.yaml")
-}}
{{- with .Values.log.format }}{{- $env = append $env (dict "name" "MAYFLY_LOG_FORMAT" "value" .) -}}{{- end -}}
{{- if $agent.name -}}
{{- $index := dict "fieldRef" (dict "fieldPath" "metadata.labels['apps.kubernetes.io/pod-index']") -}}
{{- $env = append $env (dict "name" "AGENT_INDEX" "valueFrom" $index) -}}
{{- $env = append $env (dict "name" "MAYFLY_AGENT_NAME" "value" (printf "%s-$(AGENT_INDEX)" $agent.name)) -}}
{{- else -}}
{{- $env = append $env (dict "name" "MAYFLY_AGENT_NAME" "valueFrom" (dict "fieldRef" (dict "fieldPath" "metadata.name"))) -}}
{{- end -}}
{{- if $agent.oidc.enabled -}}
{{- $env = concat $env (list
  (dict "name" "MAYFLY_AGENT_OIDC_TOKEN_FILE" "value" "/etc/mayfly/oidc/token")
  (dict "name" "MAYFLY_AGENT_ORGANIZATION_NAME" "value" $agent.oidc.organizationName)
  (dict "name" "MAYFLY_AGENT_RUNNER_POOL_ID" "value" $agent.oidc.runnerPoolId)
  (dict "name" "MAYFLY_AGENT_TOKEN_EXPIRATION" "value" (toString (int64 $agent.oidc.tokenExpirationSeconds)))
) -}}
{{- else -}}
{{- $env = append $env (dict "name" "MAYFLY_AGENT_TOKEN_FILE" "value" "/etc/mayfly/token/token") -}}
{{- end -}}
{{- with $agent.envForwardAllowlist -}}
{{- $env = append $env (dict "name" "MAYFLY_AGENT_ENV_FORWARD_ALLOWLIST" "value" (join " " .)) -}}
{{- end -}}
{{- $jobs := (fromJson (include "mayfly.env.jobs" (dict "root" . "runsIn" (include "mayfly.runsNamespace" .)))).items -}}
{{- $common := (fromJson (include "mayfly.env.common" .)).items -}}
{{- include "mayfly.join" (dict "key" "name" "levels" (list $env $jobs $common .Values.global.extraEnv $agent.extraEnv)) -}}
{{- end -}}

{{/* Whether the launcher can reach the claim of state: only in the namespace of its runs. Takes root and runsIn. */}}
{{- define "mayfly.launcher.mountsState" -}}
{{- $state := .root.Values.persistence.state -}}
{{- $isThere := or $state.existingClaim (fromJson (include "mayfly.runsNamespaces" .root)).items -}}
{{- if and $state.enabled $isThere (eq .runsIn (include "mayfly.namespace" .root)) }}true{{ end -}}
{{- end -}}

{{/* Volumes and mounts of the launcher, and of the pods of `helm test`. Take root and runsIn. */}}
{{- define "mayfly.launcher.volumes" -}}
{{- if include "mayfly.launcher.runs" .root -}}
- name: config
  configMap:
    name: {{ include "mayfly.fullname" .root }}
    items:
      - key: pod-template.yaml
        path: pod-template.yaml
      - key: policy.yaml
        path: policy.yaml
{{ end -}}
- name: tmp
  emptyDir:
    sizeLimit: {{ .root.Values.launcher.tmpSizeLimit }}
{{- if include "mayfly.caFile" .root }}
- {{- include "mayfly.caVolume" (dict "root" .root "configMap" (include "mayfly.fullname" .root)) | nindent 2 }}
{{- end }}
{{- if include "mayfly.launcher.mountsState" . }}
- name: state
  persistentVolumeClaim:
    claimName: {{ include "mayfly.claimName" (dict "root" .root "kind" "state") }}
{{- end }}
{{- end -}}

{{- define "mayfly.launcher.volumeMounts" -}}
{{- if include "mayfly.launcher.runs" .root -}}
- name: config
  mountPath: /etc/mayfly/launcher
  readOnly: true
{{ end -}}
- name: tmp
  mountPath: /tmp
{{- if include "mayfly.caFile" .root }}
- name: tls
  mountPath: /etc/mayfly/tls
  readOnly: true
{{- end }}
{{- if include "mayfly.launcher.mountsState" . }}
- name: state
  mountPath: {{ .root.Values.persistence.state.mountPath }}
{{- end }}
{{- end -}}

{{/* The rule for addresses of repositories, for launcher and executors. Takes the root. */}}
{{- define "mayfly.env.vcs" -}}
{{- $env := list -}}
{{- with .Values.vcs -}}
{{- if .allowedUrlRegex -}}
{{- $env = append $env (dict "name" "ALLOWED_VCS_URL_REGEX" "value" .allowedUrlRegex) -}}
{{- $env = append $env (dict "name" "MAYFLY_ALLOWED_VCS_URL_MATCH" "value" .allowedUrlMatch) -}}
{{- end -}}
{{- end -}}
{{- dict "items" $env | toJson -}}
{{- end -}}
