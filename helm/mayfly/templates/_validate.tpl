{{/* What no schema can say: keys that contradict each other. Each message begins with the path of the value. */}}
{{- define "mayfly.validate" -}}
{{- $values := .Values -}}
{{- $launcher := .Values.launcher -}}
{{- $executor := .Values.executor -}}
{{- if and $executor.hooks.existingConfigMap (or $executor.hooks.files $values.costEstimation.infracost.existingSecret) -}}
{{- fail "executor.hooks.existingConfigMap: excludes executor.hooks.files and costEstimation.infracost; copy their files into the ConfigMap" -}}
{{- end -}}
{{- if and (hasKey $executor.hooks.files "post-plan") $values.costEstimation.infracost.existingSecret -}}
{{- fail "costEstimation.infracost.existingSecret: makes Infracost's hook the hook `post-plan`, which executor.hooks.files has too; call its file from yours" -}}
{{- end -}}
{{- if and $values.costEstimation.required (not $values.costEstimation.infracost.existingSecret) -}}
{{- fail "costEstimation.required: needs costEstimation.infracost.existingSecret" -}}
{{- end -}}
{{- $assumer := $values.credentials.awsAssumer -}}
{{- if and $assumer.podIdentity $assumer.existingSecret -}}
{{- fail "credentials.awsAssumer.podIdentity: excludes existingSecret, whose keys would assume the roles" -}}
{{- end -}}
{{- $hasKeys := or $assumer.existingSecret $executor.extraEnvFrom -}}
{{- range concat $values.global.extraEnv $executor.extraEnv -}}
{{- if hasPrefix "ASSUMER_ACCESS_KEY_ID" .name }}{{- $hasKeys = true -}}{{- end -}}
{{- end -}}
{{- if and $assumer.allowedRoles (not (or $hasKeys $assumer.podIdentity)) -}}
{{- fail "credentials.awsAssumer: allowedRoles need existingSecret, a Secret with keys; or podIdentity, if code of runs may use all that the identity of the pod may" -}}
{{- end -}}
{{- if $launcher.enabled -}}
{{- $isOpen := false -}}
{{- range concat $values.global.extraEnv $launcher.extraEnv -}}
{{- if and (eq .name "MAYFLY_ALLOW_UNAUTHENTICATED") (or .valueFrom (eq (toString .value) "everywhere")) }}{{- $isOpen = true -}}{{- end -}}
{{- end -}}
{{- if not (or $values.auth.internalSecret.existingSecret $launcher.extraEnvFrom (include "mayfly.launcher.names" (list . "InternalSecret")) (include "mayfly.launcher.names" (list . "InternalSecretFile")) $isOpen) -}}
{{- fail "auth.internalSecret.existingSecret: name the Secret with the platform's shared secret, or give the launcher `InternalSecret` or `InternalSecretFile` by launcher.extraEnv or launcher.extraEnvFrom" -}}
{{- end -}}
{{- if le (int $launcher.terminationGracePeriodSeconds) (int $launcher.shutdown.timeoutSeconds) -}}
{{- fail (printf "launcher.terminationGracePeriodSeconds: must be longer than launcher.shutdown.timeoutSeconds, which is %d" (int $launcher.shutdown.timeoutSeconds)) -}}
{{- end -}}
{{- if and (gt (int $launcher.shutdown.drainSeconds) 0) (ge (int $launcher.shutdown.drainSeconds) (int $launcher.shutdown.timeoutSeconds)) -}}
{{- fail (printf "launcher.shutdown.drainSeconds: must be shorter than launcher.shutdown.timeoutSeconds, which is %d" (int $launcher.shutdown.timeoutSeconds)) -}}
{{- end -}}
{{- if and (gt (int $launcher.replicaCount) 1) (include "mayfly.launcher.runs" .) (not (include "mayfly.elects" .)) -}}
{{- fail "launcher.replicaCount: more than one replica needs launcher.leaderElection.enabled and rbac.profile `least`, so that one of them watches" -}}
{{- end -}}
{{- if and (eq $values.rbac.profile "terrakube") (ne $executor.jobData.mode "env") -}}
{{- fail "executor.jobData.mode: has to be `env` with rbac.profile `terrakube`, which has no right to create Secrets" -}}
{{- end -}}
{{- if and $launcher.jobs.requireWorkspaceFlag (not $launcher.jobs.persistentExecutorUrl) -}}
{{- fail "launcher.jobs.persistentExecutorUrl: is required with launcher.jobs.requireWorkspaceFlag" -}}
{{- end -}}
{{- with $launcher.podDisruptionBudget -}}
{{- if and .enabled (not (kindIs "invalid" .minAvailable)) (not (kindIs "invalid" .maxUnavailable)) -}}
{{- fail "launcher.podDisruptionBudget.minAvailable: excludes maxUnavailable; set one of them to null" -}}
{{- end -}}
{{- end -}}
{{- $paths := list -}}
{{- range $launcher.extraVolumeMounts }}{{- $paths = append $paths .mountPath -}}{{- end -}}
{{- if not (or $launcher.serviceAccount.automountToken (not (include "mayfly.launcher.runs" .)) (include "mayfly.launcher.names" (list . "KUBECONFIG")) (has "/var/run/secrets/kubernetes.io/serviceaccount" $paths)) -}}
{{- fail "launcher.serviceAccount.automountToken: the launcher cannot do without a token; mount another at /var/run/secrets/kubernetes.io/serviceaccount by launcher.extraVolumeMounts, or name a KUBECONFIG in launcher.extraEnv" -}}
{{- end -}}
{{- if and $executor.extraNamespaces (not $launcher.serviceAccount.create) -}}
{{- fail "launcher.serviceAccount.create: has to be true with executor.extraNamespaces, where each launcher has an account of its own" -}}
{{- end -}}
{{- end -}}
{{- include "mayfly.validate.hub" . -}}
{{- include "mayfly.validate.agent" . -}}
{{- $namespaces := (fromJson (include "mayfly.runsNamespaces" .)).items -}}
{{- if ne (len $namespaces) (len (uniq $namespaces)) -}}
{{- fail "executor.extraNamespaces: names a namespace twice, or the one of executor.namespace" -}}
{{- end -}}
{{- if and $executor.extraNamespaces (not (include "mayfly.launcher.runs" .)) -}}
{{- fail "executor.extraNamespaces: needs launcher.enabled and launcher.target `kubernetes`" -}}
{{- end -}}
{{- range $path, $env := dict "global.extraEnv" $values.global.extraEnv "launcher.extraEnv" $launcher.extraEnv "executor.extraEnv" $executor.extraEnv "agent.extraEnv" $values.agent.extraEnv -}}
{{- $seen := dict -}}
{{- range $env -}}
{{- if hasKey $seen .name }}{{- fail (printf "%s: names `%s` twice" $path .name) -}}{{- end -}}
{{- $_ := set $seen .name true -}}
{{- end -}}
{{- end -}}
{{- with $values.platform -}}
{{- if and .apiUrl (not .publicApiUrl) -}}
{{- fail "platform.publicApiUrl: is required with platform.apiUrl" -}}
{{- end -}}
{{- if and .redis.sentinel.nodes (not .redis.sentinel.master) -}}
{{- fail "platform.redis.sentinel.master: is required with platform.redis.sentinel.nodes" -}}
{{- end -}}
{{- if and (eq .storage.type "aws") (not (and .storage.aws.bucket .storage.aws.region)) -}}
{{- fail "platform.storage.aws: bucket and region are required with platform.storage.type `aws`" -}}
{{- end -}}
{{- if and (eq .storage.type "azure") (not (and .storage.azure.accountName .storage.azure.container)) -}}
{{- fail "platform.storage.azure: accountName and container are required with platform.storage.type `azure`" -}}
{{- end -}}
{{- if and (eq .storage.type "gcp") (not .storage.gcp.bucket) -}}
{{- fail "platform.storage.gcp.bucket: is required with platform.storage.type `gcp`" -}}
{{- end -}}
{{- end -}}
{{- with $values.global.tls -}}
{{- if gt (len (compact (list .caBundle .caBundleExistingSecret.name .caBundleConfigMap.name))) 1 -}}
{{- fail "global.tls: caBundle, caBundleExistingSecret and caBundleConfigMap exclude each other" -}}
{{- end -}}
{{- end -}}
{{- if le (int64 $executor.job.activeDeadlineSeconds) (max (int64 $executor.terminationGracePeriodSeconds) (int64 $executor.applyTerminationGracePeriodSeconds)) -}}
{{- fail "executor.job.activeDeadlineSeconds: must be longer than both termination grace periods" -}}
{{- end -}}
{{- range $path, $labels := dict "executor.job.labels" $executor.job.labels "executor.podLabels" $executor.podLabels "global.podLabels" $values.global.podLabels -}}
{{- if hasKey $labels "app.kubernetes.io/instance" -}}
{{- fail (printf "%s: must not hold app.kubernetes.io/instance, by which Argo CD would remove runs" $path) -}}
{{- end -}}
{{- end -}}
{{- range $path, $pairs := dict "executor.job.annotations" $executor.job.annotations "executor.job.labels" $executor.job.labels -}}
{{- range $key, $value := $pairs -}}
{{- if contains ";" (toString $value) -}}
{{- fail (printf "%s.%s: must not hold a semicolon; use executor.podTemplate.metadata" $path $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with $values.persistence -}}
{{- if and .cache.enabled .cache.hostPath (ne (default "restricted" $executor.policy.podSecurity) "privileged") -}}
{{- fail "persistence.cache.hostPath: needs executor.policy.podSecurity `privileged`; a claim does not" -}}
{{- end -}}
{{- if .cache.enabled -}}
{{- $volumes := list -}}
{{- range $name, $value := dict "existingClaim" .cache.existingClaim "csi.driver" .cache.csi.driver "hostPath" .cache.hostPath "emptyDir" .cache.emptyDir -}}
{{- if $value }}{{- $volumes = append $volumes $name -}}{{- end -}}
{{- end -}}
{{- if and (has "emptyDir" $volumes) (gt (len $volumes) 1) -}}
{{- fail (printf "persistence.cache.emptyDir: excludes persistence.cache.%s" (first (without $volumes "emptyDir"))) -}}
{{- end -}}
{{- if and .cache.hostPath .cache.existingClaim -}}
{{- fail "persistence.cache.hostPath: excludes persistence.cache.existingClaim" -}}
{{- end -}}
{{- if and (eq .cache.mode "fill") .cache.emptyDir -}}
{{- fail "persistence.cache.mode: `fill` needs a volume that pods share, and persistence.cache.emptyDir is none" -}}
{{- end -}}
{{- if and (eq .cache.mode "fill") (eq $executor.image.kind "stock") -}}
{{- fail "persistence.cache.mode: `fill` needs Mayfly's executor, and executor.image.kind is `stock`" -}}
{{- end -}}
{{- if and (eq .cache.mode "fill") (not (include "mayfly.ownRuns" $)) -}}
{{- fail "persistence.cache.mode: `fill` needs a launcher or an agent, which make the Jobs" -}}
{{- end -}}
{{- if and .cache.prune.enabled (or .cache.hostPath .cache.emptyDir) -}}
{{- fail "persistence.cache.prune.enabled: needs a claim, since a CronJob does not reach a folder of each node" -}}
{{- end -}}
{{- if and .cache.prune.enabled (eq .cache.mode "fill") -}}
{{- fail "persistence.cache.prune.enabled: is for mode `runs`; the Jobs of mode `fill` make space themselves" -}}
{{- end -}}
{{- end -}}
{{- range $kind, $of := dict "cache" .cache "state" .state -}}
{{- if and $of.enabled (not $of.existingClaim) (not $of.hostPath) (not $of.emptyDir) (not (or (has "ReadWriteMany" $of.accessModes) (has "ReadWriteOnce" $of.accessModes))) -}}
{{- fail (printf "persistence.%s.accessModes: must hold ReadWriteMany, since the pods of several runs write to the claim at a time; on a single node ReadWriteOnce is enough" $kind) -}}
{{- end -}}
{{- if and $of.enabled $of.csi.driver (not $of.csi.volumeHandle) -}}
{{- fail (printf "persistence.%s.csi.volumeHandle: is required with persistence.%s.csi.driver" $kind $kind) -}}
{{- end -}}
{{- if and $of.enabled $of.csi.driver $of.existingClaim -}}
{{- fail (printf "persistence.%s.csi: excludes persistence.%s.existingClaim, which has a volume already" $kind $kind) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $values.networkPolicy.enabled $values.networkPolicy.launcher.restrictEgress (include "mayfly.launcher.runs" .) (not $values.networkPolicy.launcher.apiServerCidrs) -}}
{{- fail "networkPolicy.launcher.apiServerCidrs: are required with networkPolicy.launcher.restrictEgress" -}}
{{- end -}}
{{- if eq (int $launcher.service.port) (int $launcher.service.healthPort) -}}
{{- fail "launcher.service.healthPort: must differ from launcher.service.port" -}}
{{- end -}}
{{- if and $values.admissionPolicy.enabled (not (include "mayfly.launcher.runs" .)) (not $values.agent.enabled) -}}
{{- fail "admissionPolicy.enabled: needs a launcher with target `kubernetes` or an agent, since it knows their runs by what only they have" -}}
{{- end -}}
{{- if and $values.metrics.serviceMonitor.enabled $values.metrics.podMonitor.enabled -}}
{{- fail "metrics.podMonitor.enabled: excludes metrics.serviceMonitor.enabled, or every launcher is counted twice" -}}
{{- end -}}
{{- range $kind := list "serviceMonitor" "podMonitor" -}}
{{- $of := get $values.metrics $kind -}}
{{- if and $of.enabled (gt (int64 (include "mayfly.milliseconds" $of.scrapeTimeout)) (int64 (include "mayfly.milliseconds" $of.interval))) -}}
{{- fail (printf "metrics.%s.scrapeTimeout: must not be longer than metrics.%s.interval, or the Prometheus operator leaves the monitor out" $kind $kind) -}}
{{- end -}}
{{- end -}}
{{- if and $values.tests.enabled $values.tests.canary.enabled (include "mayfly.launcher.runs" .) (eq $values.rbac.profile "terrakube") -}}
{{- fail "tests.canary.enabled: needs rbac.profile `least`, since the test follows its run" -}}
{{- end -}}
{{- end -}}

{{/* The hub: what it needs, and what cannot be shared. */}}
{{- define "mayfly.validate.hub" -}}
{{- $launcher := .Values.launcher -}}
{{- $hub := .Values.hub -}}
{{- if and $launcher.enabled (eq $launcher.target "none") (not $hub.enabled) -}}
{{- fail "launcher.target: `none` needs hub.enabled, or there is nothing that runs a step" -}}
{{- end -}}
{{- if $hub.enabled -}}
{{- if not $launcher.enabled -}}
{{- fail "hub.enabled: needs launcher.enabled, since the launcher is the hub; for a hub alone set launcher.target to `none`" -}}
{{- end -}}
{{- if .Values.executor.extraNamespaces -}}
{{- fail "hub.enabled: excludes executor.extraNamespaces, whose launchers would all be hubs; install the hub as a release of its own" -}}
{{- end -}}
{{- $files := compact (list (ternary "" "config" (empty $hub.config)) $hub.poolsExistingConfigMap.name $hub.poolsExistingSecret.name) -}}
{{- if not $files -}}
{{- fail "hub.config: is required with hub.enabled: `pools`, or another file in hub.poolsExistingConfigMap or hub.poolsExistingSecret" -}}
{{- end -}}
{{- if gt (len $files) 1 -}}
{{- fail "hub.config: excludes hub.poolsExistingConfigMap and hub.poolsExistingSecret, and these exclude each other" -}}
{{- end -}}
{{- if not (or .Values.platform.apiUrl $launcher.extraEnvFrom (include "mayfly.launcher.names" (list . "AzBuilderApiUrl"))) -}}
{{- fail "platform.apiUrl: is required with hub.enabled, since a hub reports runs to the platform; or give the launcher `AzBuilderApiUrl` by launcher.extraEnv or launcher.extraEnvFrom" -}}
{{- end -}}
{{- if eq $hub.store.type "sqlite" -}}
{{- if gt (int $launcher.replicaCount) 1 -}}
{{- fail "launcher.replicaCount: has to be 1 with hub.store.type `sqlite`, whose file one hub uses; several need `postgres`" -}}
{{- end -}}
{{- if not (or (has "ReadWriteOnce" $hub.store.sqlite.accessModes) (has "ReadWriteOncePod" $hub.store.sqlite.accessModes)) -}}
{{- fail "hub.store.sqlite.accessModes: must hold ReadWriteOnce or ReadWriteOncePod, since SQLite needs a volume that is no network file system" -}}
{{- end -}}
{{- else -}}
{{- if not $hub.store.postgres.existingSecret -}}
{{- fail "hub.store.postgres.existingSecret: is required with hub.store.type `postgres`: the Secret with the database's URL" -}}
{{- end -}}
{{- if not $hub.jobTokenKeys.existingSecret -}}
{{- fail "hub.jobTokenKeys.existingSecret: is required with hub.store.type `postgres`, since hubs that share a database share the keys" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The agent: one hub, one kind of token, and time to stop. */}}
{{- define "mayfly.validate.agent" -}}
{{- $agent := .Values.agent -}}
{{- $executor := .Values.executor -}}
{{- if $agent.enabled -}}
{{- if not $agent.serviceUrl -}}
{{- fail "agent.serviceUrl: is required with agent.enabled: the address of the hub" -}}
{{- end -}}
{{- if and $agent.oidc.enabled $agent.token.existingSecret -}}
{{- fail "agent.token.existingSecret: excludes agent.oidc.enabled: an agent has a token of the pool, or exchanges one of its account" -}}
{{- end -}}
{{- if not (or $agent.oidc.enabled $agent.token.existingSecret) -}}
{{- fail "agent.token.existingSecret: name the Secret with the token of the pool, or set agent.oidc.enabled" -}}
{{- end -}}
{{- if and $agent.oidc.enabled (not (and $agent.oidc.organizationName $agent.oidc.runnerPoolId)) -}}
{{- fail "agent.oidc: organizationName and runnerPoolId are required with agent.oidc.enabled" -}}
{{- end -}}
{{- $needed := int64 (include "mayfly.agent.stopSeconds" .) -}}
{{- if and (not (kindIs "invalid" $agent.terminationGracePeriodSeconds)) (lt (int64 $agent.terminationGracePeriodSeconds) $needed) -}}
{{- fail (printf "agent.terminationGracePeriodSeconds: must be at least %d, as long as agent.onStop `%s` takes" $needed $agent.onStop) -}}
{{- end -}}
{{- if ne $executor.jobData.mode "secret" -}}
{{- fail "executor.jobData.mode: has to be `secret` with agent.enabled, since the token of a lease has to be in a Secret" -}}
{{- end -}}
{{- if eq .Values.rbac.profile "terrakube" -}}
{{- fail "rbac.profile: has to be `least` with agent.enabled, which creates Secrets" -}}
{{- end -}}
{{- if eq $executor.image.kind "stock" -}}
{{- fail "executor.image.kind: must not be `stock` with agent.enabled: other executors know no leases" -}}
{{- end -}}
{{- if and $executor.envForwardAllowlist (not (include "mayfly.launcher.runs" .)) -}}
{{- fail "executor.envForwardAllowlist: has no effect behind an agent; use agent.envForwardAllowlist, with the variables in agent.extraEnv" -}}
{{- end -}}
{{- if eq $agent.boundary "relay" -}}
{{- if and .Values.platform.storage.type (not (or (include "mayfly.launcher.runs" .) .Values.hub.enabled)) -}}
{{- fail "platform.storage: has no effect with agent.boundary `relay`; runs use the store of their hub, so set it there" -}}
{{- end -}}
{{- if and $executor.secretNames (include "mayfly.launcher.runs" .) -}}
{{- fail "executor.secretNames: runs of the agent would get the Secrets of the launcher's runs too; install the agent as a release of its own, or set agent.boundary to `direct`" -}}
{{- end -}}
{{- else if not (or $executor.secretNames $executor.extraEnvFrom (and .Values.platform.apiUrl .Values.auth.internalSecret.existingSecret)) -}}
{{- fail "agent.boundary: `direct` needs platform.apiUrl and auth.internalSecret.existingSecret, or executor.secretNames that hold both" -}}
{{- end -}}
{{- $egress := .Values.networkPolicy.agent -}}
{{- if and .Values.networkPolicy.enabled $egress.restrictEgress (not (and $egress.apiServerCidrs $egress.extraEgress)) -}}
{{- fail "networkPolicy.agent: apiServerCidrs, and a rule for the hub in extraEgress, are required with networkPolicy.agent.restrictEgress" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A duration as Prometheus writes it. */}}
{{- define "mayfly.milliseconds" -}}
{{- $units := dict "y" 31536000000 "w" 604800000 "d" 86400000 "h" 3600000 "m" 60000 "s" 1000 "ms" 1 -}}
{{- $all := 0 -}}
{{- range regexFindAll "[0-9]+[a-z]+" . -1 -}}
{{- $count := regexFind "^[0-9]+" . -}}
{{- $all = add $all (mul (int64 $count) (get $units (trimPrefix $count .))) -}}
{{- end -}}
{{- $all -}}
{{- end -}}
