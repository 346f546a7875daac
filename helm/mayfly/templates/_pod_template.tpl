{{/*
The pod template the launcher lays over what it builds (`MAYFLY_POD_TEMPLATE_FILE`). What the chart's keys come to is
below, `executor.podTemplate` above. Takes root, canary when it is for the run of `helm test`, and relay when the runs reach the
platform through the relay of a hub.
*/}}

{{/* Environment of the executor. Takes the same. */}}
{{- define "mayfly.executor.env" -}}
{{- $executor := .root.Values.executor -}}
{{- $cli := $executor.cli -}}
{{- $tools := .root.Values.platform.tools -}}
{{- $env := list
  (dict "name" "MAYFLY_LOG" "value" .root.Values.log.level)
  (dict "name" "MAYFLY_MEMORY_STOP_PERCENT" "value" (toString (int $executor.memorySoftLimitPercent)))
  (dict "name" "MAYFLY_SILENCE_SECONDS" "value" (toString (int64 $executor.silenceTimeoutSeconds)))
-}}
{{- range $name, $value := dict
  "CustomTerraformReleasesUrl" $cli.terraformReleasesUrl
  "MAYFLY_ENV_FORWARD" (join "," $executor.envForwardAllowlist)
  "MAYFLY_IDENTITY_PASS_THROUGH" (ternary "" "false" .root.Values.identity.passThrough)
  "MAYFLY_MIXED_FLEET" (ternary "true" "" $executor.mixedFleet)
  "MAYFLY_PLAN_FILES" (ternary "" "false" $executor.planFiles)
  "MAYFLY_RELEASE_MIRROR_URL" $cli.releaseMirrorUrl
  "MAYFLY_RELEASE_SIGNATURES" $cli.releaseSignatures
  "MAYFLY_TOFU_RELEASES_URL" $cli.tofuReleasesUrl
  "MAYFLY_TOOL_SELECTION" $cli.toolSelection
  "TerrakubeToolsBranch" $tools.branch
  "TerrakubeToolsRepository" $tools.repository
-}}
{{- if $value }}{{- $env = append $env (dict "name" $name "value" $value) -}}{{- end -}}
{{- end -}}
{{- $assumer := .root.Values.credentials.awsAssumer -}}
{{- if $assumer.allowedRoles -}}
{{- range $name, $value := dict
  "MAYFLY_ASSUMER_ALLOWED_ROLES" (join "," $assumer.allowedRoles)
  "MAYFLY_ASSUMER_DELIVERY" $assumer.delivery
  "MAYFLY_ASSUMER_DURATION_SECONDS" (toString (int64 $assumer.durationSeconds))
  "MAYFLY_ASSUMER_EXTERNAL_ID" $assumer.externalId
  "MAYFLY_ASSUMER_POD_IDENTITY" (ternary "true" "" $assumer.podIdentity)
  "MAYFLY_ASSUMER_REGION" $assumer.region
-}}
{{- if $value }}{{- $env = append $env (dict "name" $name "value" $value) -}}{{- end -}}
{{- end -}}
{{- with $assumer.existingSecret -}}
{{- $env = append $env (fromJson (include "mayfly.env.fromSecret" (dict "name" "ASSUMER_ACCESS_KEY_ID" "secret" . "key" $assumer.accessKeyIdKey))) -}}
{{- $env = append $env (fromJson (include "mayfly.env.fromSecret" (dict "name" "ASSUMER_SECRET_ACCESS_KEY" "secret" . "key" $assumer.secretAccessKeyKey))) -}}
{{- end -}}
{{- end -}}
{{- if $cli.releaseKeys -}}
{{- $env = append $env (dict "name" "MAYFLY_RELEASE_KEYS_FILE" "value" "/etc/mayfly/executor/release-keys.asc") -}}
{{- end -}}
{{- if $executor.caBundle -}}
{{- $env = append $env (dict "name" "MAYFLY_RUN_CA_FILE" "value" "/etc/mayfly/executor/runs.crt") -}}
{{- end -}}
{{- if include "mayfly.hooks" .root -}}
{{- $env = append $env (dict "name" "MAYFLY_HOOKS_DIR" "value" "/etc/mayfly/hooks") -}}
{{- end -}}
{{- with .root.Values.costEstimation -}}
{{- if .infracost.existingSecret -}}
{{- $env = append $env (fromJson (include "mayfly.env.fromSecret" (dict "name" "MAYFLY_HOOK_ENV_INFRACOST_API_KEY" "secret" .infracost.existingSecret "key" .infracost.key))) -}}
{{- range $name, $value := dict
  "COST_ESTIMATION_REQUIRED" (ternary "true" "" .required)
  "INFRACOST_CURRENCY" .infracost.currency
  "INFRACOST_PRICING_API_ENDPOINT" .infracost.pricingEndpoint
-}}
{{- if $value }}{{- $env = append $env (dict "name" (printf "MAYFLY_HOOK_ENV_%s" $name) "value" $value) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $executor.ssh.knownHosts -}}
{{- $env = append $env (dict "name" "MAYFLY_SSH_KNOWN_HOSTS_FILE" "value" "/etc/mayfly/executor/known_hosts") -}}
{{- end -}}
{{- $env = concat $env (fromJson (include "mayfly.env.vcs" .root)).items -}}
{{- with include "mayfly.caFile" .root -}}
{{- range $name := list "CURL_CA_BUNDLE" "NODE_EXTRA_CA_CERTS" "REQUESTS_CA_BUNDLE" -}}
{{- $env = append $env (dict "name" $name "value" (include "mayfly.caFile" $.root)) -}}
{{- end -}}
{{- end -}}
{{- with .root.Values.persistence -}}
{{- if and .cache.enabled .cache.limitGiB -}}
{{- $env = append $env (dict "name" "MAYFLY_PROVIDER_CACHE_MAX_BYTES" "value" (toString (mul (int64 .cache.limitGiB) 1073741824))) -}}
{{- end -}}
{{- if and .cache.enabled (eq .cache.mode "runs") (not .cache.emptyDir) -}}
{{- if .cache.modules -}}
{{- $env = append $env (dict "name" "MAYFLY_MODULE_CACHE" "value" "true") -}}
{{- end -}}
{{- /* Beside the providers, where the tool does not look: it takes no name with a dot in front for a host. */ -}}
{{- $env = append $env (dict "name" "MAYFLY_TOOL_CACHE_DIR" "value" (printf "%s/.tools" .cache.mountPath)) -}}
{{- if .cache.hostPath -}}
{{- $env = append $env (dict "name" "TF_PLUGIN_CACHE_DIR" "value" .cache.mountPath) -}}
{{- end -}}
{{- end -}}
{{- if .state.enabled -}}
{{- $env = append $env (dict "name" "MAYFLY_DATA_DIR" "value" .state.mountPath) -}}
{{- end -}}
{{- end -}}
{{- $shared := (fromJson (include "mayfly.env.shared" .)).items -}}
{{- $canary := list -}}
{{- if .canary -}}
{{- /* It is not visible outside the pod. */ -}}
{{- range $name := list "AzBuilderApiUrl" "TerrakubeRedisHostname" "TerrakubeRedisClusterNodes" "TerrakubeRedisSentinelNodes" "TerrakubeToolsRepository" -}}
{{- $canary = append $canary (dict "name" $name "value" "") -}}
{{- end -}}
{{- $canary = append $canary (dict "name" "TerraformStateType" "value" "LocalTerraformStateImpl") -}}
{{- $canary = append $canary (dict "name" "MAYFLY_DATA_DIR" "value" "/home/mayfly/canary") -}}
{{- end -}}
{{- $user := get (fromJson (include "mayfly.podTemplate.executor" .root)) "env" | default list -}}
{{- include "mayfly.join" (dict "key" "name" "levels" (list $env $shared (fromJson (include "mayfly.env.secretStores" .root)).items (fromJson (include "mayfly.env.gitLogins" .root)).items .root.Values.global.extraEnv $executor.extraEnv $user $canary)) -}}
{{- end -}}

{{/* The executor's container in `executor.podTemplate`, as JSON. */}}
{{- define "mayfly.podTemplate.executor" -}}
{{- $found := dict -}}
{{- $spec := default (dict) .Values.executor.podTemplate.spec -}}
{{- range (default (list) (get $spec "containers")) -}}
{{- if eq .name "executor" -}}
{{- $found = . -}}
{{- else -}}
{{- fail (printf "executor.podTemplate.spec.containers: `%s` would keep a run alive after its executor has ended; put it into executor.sidecars" .name) -}}
{{- end -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}

{{/* The files of hooks, by name, as JSON. Infracost's hook is one of them if there is a key for it. */}}
{{- define "mayfly.hooks.files" -}}
{{- $files := deepCopy .Values.executor.hooks.files -}}
{{- if .Values.costEstimation.infracost.existingSecret -}}
{{- $_ := set $files "post-plan" (.Files.Get "files/infracost/post-plan") -}}
{{- $settings := fromJson (default "{}" (get $files "settings.json")) -}}
{{- $own := fromJson (.Files.Get "files/infracost/settings.json") -}}
{{- if .Values.costEstimation.required }}{{- $_ := set (get $own "post-plan") "onFailure" "fail" -}}{{- end -}}
{{- $_ := set $files "settings.json" (toJson (mergeOverwrite $own $settings)) -}}
{{- end -}}
{{- toJson $files -}}
{{- end -}}

{{/* Whether runs have hooks: "true" or nothing. */}}
{{- define "mayfly.hooks" -}}
{{- if or .Values.executor.hooks.existingConfigMap (fromJson (include "mayfly.hooks.files" .)) }}true{{ end -}}
{{- end -}}

{{/* Secrets that become environment of hooks, as a list of EnvFromSource. */}}
{{- define "mayfly.hooks.envFrom" -}}
{{- $sources := list -}}
{{- range .Values.executor.hooks.secretNames -}}
{{- $sources = append $sources (dict "prefix" "MAYFLY_HOOK_ENV_" "secretRef" (dict "name" .)) -}}
{{- end -}}
{{- dict "items" $sources | toJson -}}
{{- end -}}

{{/* Whether pods of runs mount the executor's ConfigMap for more than authorities: "true" or nothing. */}}
{{- define "mayfly.executor.hasFiles" -}}
{{- if or .Values.executor.caBundle .Values.executor.cli.releaseKeys .Values.executor.ssh.knownHosts }}true{{ end -}}
{{- end -}}

{{- define "mayfly.executor.volumes" -}}
{{- $volumes := list -}}
{{- if include "mayfly.executor.hasFiles" . -}}
{{- $items := list -}}
{{- if .Values.executor.cli.releaseKeys }}{{- $items = append $items (dict "key" "release-keys.asc" "path" "release-keys.asc") -}}{{- end -}}
{{- if .Values.executor.caBundle }}{{- $items = append $items (dict "key" "runs.crt" "path" "runs.crt") -}}{{- end -}}
{{- if .Values.executor.ssh.knownHosts }}{{- $items = append $items (dict "key" "known_hosts" "path" "known_hosts") -}}{{- end -}}
{{- $volumes = append $volumes (dict "name" "files" "configMap" (dict "name" (include "mayfly.executor.name" .) "items" $items)) -}}
{{- end -}}
{{- if .Values.executor.cli.config -}}
{{- $items := list (dict "key" "terraformrc" "path" "terraformrc") -}}
{{- $volumes = append $volumes (dict "name" "cli" "configMap" (dict "name" (include "mayfly.executor.name" .) "items" $items)) -}}
{{- end -}}
{{- if include "mayfly.hooks" . -}}
{{- /* Mode 0555: everybody may read and execute them, and nobody may write. */ -}}
{{- with .Values.executor.hooks.existingConfigMap -}}
{{- $volumes = append $volumes (dict "name" "hooks" "configMap" (dict "name" . "defaultMode" 365)) -}}
{{- else -}}
{{- $items := list -}}
{{- range $name, $text := (fromJson (include "mayfly.hooks.files" .)) -}}
{{- $items = append $items (dict "key" (printf "hook.%s" $name) "path" $name "mode" 365) -}}
{{- end -}}
{{- $volumes = append $volumes (dict "name" "hooks" "configMap" (dict "name" (include "mayfly.executor.name" .) "items" $items)) -}}
{{- end -}}
{{- end -}}
{{- if include "mayfly.caFile" . -}}
{{- $volumes = append $volumes (fromYaml (include "mayfly.caVolume" (dict "root" . "configMap" (include "mayfly.executor.name" .)))) -}}
{{- end -}}
{{- with .Values.executor.workspace -}}
{{- if eq .type "memory" -}}
{{- $volumes = append $volumes (dict "name" "work" "emptyDir" (dict "medium" "Memory" "sizeLimit" .sizeLimit)) -}}
{{- else if eq .type "ephemeral" -}}
{{- $claim := dict "accessModes" (list "ReadWriteOnce") "resources" (dict "requests" (dict "storage" .sizeLimit)) -}}
{{- with .storageClassName }}{{- $_ := set $claim "storageClassName" . -}}{{- end -}}
{{- $volumes = append $volumes (dict "name" "work" "ephemeral" (dict "volumeClaimTemplate" (dict "spec" $claim))) -}}
{{- end -}}
{{- end -}}
{{- with .Values.persistence -}}
{{- if and .cache.enabled .cache.hostPath -}}
{{- $volumes = append $volumes (dict "name" "cache" "hostPath" (dict "path" .cache.hostPath "type" "Directory")) -}}
{{- end -}}
{{- if .state.enabled -}}
{{- $volumes = append $volumes (dict "name" "state" "persistentVolumeClaim" (dict "claimName" (include "mayfly.claimName" (dict "root" $ "kind" "state")))) -}}
{{- end -}}
{{- end -}}
{{- dict "items" $volumes | toJson -}}
{{- end -}}

{{- define "mayfly.executor.volumeMounts" -}}
{{- $mounts := list -}}
{{- if include "mayfly.executor.hasFiles" . -}}
{{- $mounts = append $mounts (dict "name" "files" "mountPath" "/etc/mayfly/executor" "readOnly" true) -}}
{{- end -}}
{{- if .Values.executor.cli.config -}}
{{- /* Where both tools look for it. `TF_CLI_CONFIG_FILE` would keep the executor from adding the platform's token. */ -}}
{{- $mounts = append $mounts (dict "name" "cli" "mountPath" "/home/mayfly/.terraformrc" "subPath" "terraformrc" "readOnly" true) -}}
{{- end -}}
{{- if include "mayfly.hooks" . -}}
{{- $mounts = append $mounts (dict "name" "hooks" "mountPath" "/etc/mayfly/hooks" "readOnly" true) -}}
{{- end -}}
{{- if include "mayfly.caFile" . -}}
{{- $mounts = append $mounts (dict "name" "tls" "mountPath" "/etc/mayfly/tls" "readOnly" true) -}}
{{- end -}}
{{- with .Values.persistence -}}
{{- if and .cache.enabled .cache.hostPath -}}
{{- $mounts = append $mounts (dict "name" "cache" "mountPath" .cache.mountPath) -}}
{{- end -}}
{{- if .state.enabled -}}
{{- $mounts = append $mounts (dict "name" "state" "mountPath" .state.mountPath) -}}
{{- end -}}
{{- end -}}
{{- dict "items" $mounts | toJson -}}
{{- end -}}

{{- define "mayfly.podTemplate" -}}
{{- $root := .root -}}
{{- $executor := .root.Values.executor -}}
{{- $user := deepCopy $executor.podTemplate -}}
{{- $userSpec := default (dict) $user.spec -}}
{{- $userExecutor := fromJson (include "mayfly.podTemplate.executor" .root) -}}
{{- $container := dict "name" "executor" "resources" (deepCopy $executor.resources) -}}
{{- with $executor.securityContext }}{{- $_ := set $container "securityContext" (deepCopy .) -}}{{- end -}}
{{- $container = mergeOverwrite $container (omit $userExecutor "env" "envFrom" "volumeMounts") -}}
{{- $_ := set $container "env" (fromJson (include "mayfly.executor.env" .)).items -}}
{{- with concat $executor.extraEnvFrom (default (list) $userExecutor.envFrom) (fromJson (include "mayfly.hooks.envFrom" .root)).items }}{{- $_ := set $container "envFrom" . -}}{{- end -}}
{{- $mounts := (fromJson (include "mayfly.executor.volumeMounts" .root)).items -}}
{{- $mounts = (fromJson (include "mayfly.join" (dict "key" "mountPath" "levels" (list $mounts $executor.extraVolumeMounts (default (list) $userExecutor.volumeMounts))))).items -}}
{{- with $mounts }}{{- $_ := set $container "volumeMounts" . -}}{{- end -}}
{{- $spec := dict "serviceAccountName" (include "mayfly.executor.serviceAccountName" .root) -}}
{{- if $executor.serviceAccount.automountToken }}{{- $_ := set $spec "automountServiceAccountToken" true -}}{{- end -}}
{{- range $field, $value := dict
  "affinity" $executor.affinity
  "nodeSelector" $executor.nodeSelector
  "priorityClassName" $executor.priorityClassName
  "runtimeClassName" $executor.runtimeClassName
  "securityContext" $executor.podSecurityContext
  "tolerations" $executor.tolerations
-}}
{{- if $value }}{{- $_ := set $spec $field $value -}}{{- end -}}
{{- end -}}
{{- with $executor.topologySpreadConstraints -}}
{{- $selector := include "mayfly.executor.selectorLabels" $root -}}
{{- $_ := set $spec "topologySpreadConstraints" (fromYamlArray (include "mayfly.topologySpread" (dict "constraints" . "selector" $selector))) -}}
{{- end -}}
{{- $spec = mergeOverwrite (deepCopy $spec) (omit $userSpec "containers" "initContainers" "volumes") -}}
{{- $_ := set $spec "containers" (list $container) -}}
{{- $before := $executor.initContainers -}}
{{- range $executor.sidecars }}{{- $before = append $before (mergeOverwrite (deepCopy .) (dict "restartPolicy" "Always")) -}}{{- end -}}
{{- if .canary }}{{- $before = append $before (fromYaml (include "mayfly.canary.source" .root)) -}}{{- end -}}
{{- $before = (fromJson (include "mayfly.join" (dict "key" "name" "levels" (list $before (default (list) $userSpec.initContainers))))).items -}}
{{- with $before }}{{- $_ := set $spec "initContainers" . -}}{{- end -}}
{{- $volumes := (fromJson (include "mayfly.executor.volumes" .root)).items -}}
{{- $volumes = (fromJson (include "mayfly.join" (dict "key" "name" "levels" (list $volumes $executor.extraVolumes (default (list) $userSpec.volumes))))).items -}}
{{- with $volumes }}{{- $_ := set $spec "volumes" . -}}{{- end -}}
{{- $metadata := dict -}}
{{- with mergeOverwrite (deepCopy .root.Values.global.podLabels) $executor.podLabels }}{{- $_ := set $metadata "labels" . -}}{{- end -}}
{{- with mergeOverwrite (deepCopy .root.Values.global.podAnnotations) $executor.podAnnotations }}{{- $_ := set $metadata "annotations" . -}}{{- end -}}
{{- $metadata = mergeOverwrite (deepCopy $metadata) (default (dict) $user.metadata) -}}
{{- $template := dict "spec" $spec -}}
{{- with $metadata }}{{- $_ := set $template "metadata" . -}}{{- end -}}
{{- toYaml (mergeOverwrite (omit $user "metadata" "spec") $template) -}}
{{- end -}}

{{/* What the run of `helm test` takes its source from: a repository made beside it. */}}
{{- define "mayfly.canary.source" -}}
name: canary-source
image: {{ include "mayfly.image" (dict "root" . "image" .Values.executor.image) }}
imagePullPolicy: {{ .Values.executor.image.pullPolicy }}
command:
  - /bin/bash
  - -ec
  - |
    export HOME=/home/mayfly/canary
    mkdir -p "$HOME/source"
    cd "$HOME/source"
    git init --quiet --initial-branch=main
    git -c user.name=canary -c user.email=canary@localhost commit --quiet --allow-empty --message=canary
volumeMounts:
  - name: work
    mountPath: /home/mayfly
resources:
  {{- toYaml .Values.tests.resources | nindent 2 }}
securityContext:
  allowPrivilegeEscalation: false
  capabilities:
    drop: [ALL]
  readOnlyRootFilesystem: true
{{- end -}}
