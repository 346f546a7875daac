{{/* Names */}}

{{- define "mayfly.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{/* Cut to 52, so that there is room for suffixes. */}}
{{- define "mayfly.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "mayfly.namespace" -}}
{{- default .Release.Namespace .Values.namespaceOverride -}}
{{- end -}}

{{/* The namespace of runs of the first launcher. */}}
{{- define "mayfly.runsNamespace" -}}
{{- default (include "mayfly.namespace" .) .Values.executor.namespace -}}
{{- end -}}

{{/* Whether the launcher makes Jobs itself: "true" or nothing. */}}
{{- define "mayfly.launcher.runs" -}}
{{- if and .Values.launcher.enabled (eq .Values.launcher.target "kubernetes") }}true{{ end -}}
{{- end -}}

{{/* Whether runs of the release are made by launcher or agent, and not by Terrakube's API: "true" or nothing. */}}
{{- define "mayfly.ownRuns" -}}
{{- if or .Values.launcher.enabled .Values.agent.enabled }}true{{ end -}}
{{- end -}}

{{/* Whether the release has rights of a launcher: its own, or Terrakube's API. "true" or nothing. */}}
{{- define "mayfly.launcher.hasRights" -}}
{{- if or (include "mayfly.launcher.runs" .) (not (include "mayfly.ownRuns" .)) }}true{{ end -}}
{{- end -}}

{{/* Every namespace of runs, the first launcher's first: {"items": [...]}. A hub alone has none. */}}
{{- define "mayfly.runsNamespaces" -}}
{{- $all := list -}}
{{- if or (include "mayfly.launcher.hasRights" .) .Values.agent.enabled -}}
{{- $all = prepend .Values.executor.extraNamespaces (include "mayfly.runsNamespace" .) -}}
{{- end -}}
{{- dict "items" $all | toJson -}}
{{- end -}}

{{/* The namespaces of runs in which a launcher has rights, the first launcher's first: {"items": [...]}. */}}
{{- define "mayfly.launcherNamespaces" -}}
{{- $all := list -}}
{{- if include "mayfly.launcher.hasRights" . -}}
{{- $all = (fromJson (include "mayfly.runsNamespaces" .)).items -}}
{{- end -}}
{{- dict "items" $all | toJson -}}
{{- end -}}

{{/* What each launcher is named for: its namespace of runs, and the first one's for a hub alone. {"items": [...]}. */}}
{{- define "mayfly.launchers" -}}
{{- $all := (fromJson (include "mayfly.launcherNamespaces" .)).items -}}
{{- if and .Values.launcher.enabled (not $all) -}}{{- $all = list (include "mayfly.runsNamespace" .) -}}{{- end -}}
{{- dict "items" $all | toJson -}}
{{- end -}}

{{/* Name of the launcher of a namespace of runs, and of what belongs to it. Takes root and runsIn. */}}
{{- define "mayfly.launcher.name" -}}
{{- $name := include "mayfly.fullname" .root -}}
{{- if ne .runsIn (include "mayfly.runsNamespace" .root) -}}
{{- $long := printf "%s-%s" $name .runsIn -}}
{{- if gt (len $long) 63 -}}
{{- $name = printf "%s-%s" ($long | trunc 54 | trimSuffix "-") (sha256sum $long | trunc 8) -}}
{{- else -}}
{{- $name = $long -}}
{{- end -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{/* Name of the launcher's account for a namespace of runs. Takes root and runsIn. */}}
{{- define "mayfly.launcher.serviceAccountName" -}}
{{- $values := .root.Values.launcher.serviceAccount -}}
{{- if ne .runsIn (include "mayfly.runsNamespace" .root) -}}
{{- include "mayfly.launcher.name" . -}}
{{- else if $values.create -}}
{{- default (include "mayfly.fullname" .root) $values.name -}}
{{- else -}}
{{- default "default" $values.name -}}
{{- end -}}
{{- end -}}

{{/* Cut to 52: a StatefulSet puts its name and a hash into a label. */}}
{{- define "mayfly.agent.name" -}}
{{- $name := include "mayfly.fullname" . -}}
{{- if gt (len $name) 46 -}}
{{- $name = printf "%s-%s" ($name | trunc 37 | trimSuffix "-") (sha256sum $name | trunc 8) -}}
{{- end -}}
{{- printf "%s-agent" $name -}}
{{- end -}}

{{- define "mayfly.agent.serviceAccountName" -}}
{{- if .Values.agent.serviceAccount.create -}}
{{- default (include "mayfly.agent.name" .) .Values.agent.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.agent.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "mayfly.executor.name" -}}
{{- printf "%s-executor" (include "mayfly.fullname" .) -}}
{{- end -}}

{{- define "mayfly.executor.serviceAccountName" -}}
{{- if .Values.executor.serviceAccount.create -}}
{{- default (include "mayfly.executor.name" .) .Values.executor.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.executor.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "mayfly.pullSecretName" -}}
{{- printf "%s-pull" (include "mayfly.fullname" .) -}}
{{- end -}}

{{/* The claim of a kind of persistence. Takes root and kind. */}}
{{- define "mayfly.claimName" -}}
{{- $values := index .root.Values.persistence .kind -}}
{{- default (printf "%s-%s" (include "mayfly.fullname" .root) .kind) $values.existingClaim -}}
{{- end -}}

{{/* The static volume of a claim; cluster-wide, so the release's namespace is in it. Takes root, kind, runsIn. */}}
{{- define "mayfly.volumeName" -}}
{{- $long := printf "%s-%s-%s" .runsIn (include "mayfly.fullname" .root) .kind -}}
{{- if gt (len $long) 63 -}}
{{- printf "%s-%s" ($long | trunc 54 | trimSuffix "-") (sha256sum $long | trunc 8) -}}
{{- else -}}
{{- $long -}}
{{- end -}}
{{- end -}}

{{/* Labels */}}

{{- define "mayfly.labels" -}}
{{- $own := dict
  "helm.sh/chart" (printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-")
  "app.kubernetes.io/name" (include "mayfly.name" .)
  "app.kubernetes.io/instance" .Release.Name
  "app.kubernetes.io/version" .Chart.AppVersion
  "app.kubernetes.io/managed-by" .Release.Service
  "app.kubernetes.io/part-of" "mayfly" -}}
{{- toYaml (mergeOverwrite (deepCopy .Values.commonLabels) $own) -}}
{{- end -}}

{{/* Metadata of an object. Takes root, name, and may take namespace, component, labels, annotations. */}}
{{- define "mayfly.metadata" -}}
{{- $labels := fromYaml (include "mayfly.labels" .root) -}}
{{- with .component }}{{- $_ := set $labels "app.kubernetes.io/component" . -}}{{- end -}}
{{- $labels = mergeOverwrite (deepCopy (default (dict) .labels)) $labels -}}
{{- $annotations := mergeOverwrite (deepCopy .root.Values.commonAnnotations) (default (dict) .annotations) -}}
name: {{ .name }}
{{- with .namespace }}
namespace: {{ . }}
{{- end }}
labels:
  {{- toYaml $labels | nindent 2 }}
{{- with $annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/*
What selects the pods of one launcher. The first launcher's does not name its namespace of runs, so that it can change;
the components differ, so that no launcher's selector takes in another's pods. Takes root and runsIn.
*/}}
{{- define "mayfly.launcher.selectorLabels" -}}
app.kubernetes.io/name: {{ include "mayfly.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- if eq .runsIn (include "mayfly.runsNamespace" .root) }}
app.kubernetes.io/component: launcher
{{- else }}
app.kubernetes.io/component: namespace-launcher
mayfly.dev/runs-in: {{ .runsIn }}
{{- end }}
{{- end -}}

{{/* What selects the pods of every launcher of the release. */}}
{{- define "mayfly.launchers.selector" -}}
matchLabels:
  app.kubernetes.io/name: {{ include "mayfly.name" . }}
  app.kubernetes.io/instance: {{ .Release.Name }}
matchExpressions:
  - key: app.kubernetes.io/component
    operator: In
    values: [launcher, namespace-launcher]
{{- end -}}

{{/* What selects the pods of the agent. */}}
{{- define "mayfly.agent.selectorLabels" -}}
app.kubernetes.io/name: {{ include "mayfly.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: agent
{{- end -}}

{{/* What selects pods of runs: the launcher's own labels, see docs/kubernetes-manifest.md. */}}
{{- define "mayfly.executor.selectorLabels" -}}
app.kubernetes.io/name: mayfly-executor
app.kubernetes.io/managed-by: mayfly
{{- end -}}

{{/* The same as a selector. Runs of Terrakube's own API carry fewer labels. */}}
{{- define "mayfly.executor.selector" -}}
{{- if include "mayfly.ownRuns" . }}
matchLabels:
  {{- include "mayfly.executor.selectorLabels" . | nindent 2 }}
{{- else }}
matchExpressions:
  - key: terrakube.io/organization
    operator: Exists
  - key: terrakube.io/workspace
    operator: Exists
{{- end }}
{{- end -}}

{{/* Who may reach the launcher: the pods of `helm test`, and these peers or every pod. Takes root, peers, and runs, whether these too. */}}
{{- define "mayfly.launcher.peers" -}}
{{- $test := dict "app.kubernetes.io/instance" .root.Release.Name "app.kubernetes.io/component" "test" -}}
{{- $peers := list (dict "namespaceSelector" dict) -}}
{{- with .peers }}{{ $peers = append . (dict "podSelector" (dict "matchLabels" $test)) }}{{ end -}}
{{- $all := list -}}
{{- range $peers -}}
{{- $peer := deepCopy . -}}
{{- if not (or $.runs (hasKey $peer "ipBlock")) -}}
{{- $selector := default dict $peer.podSelector -}}
{{- $noRun := dict "key" "app.kubernetes.io/name" "operator" "NotIn" "values" (list "mayfly-executor") -}}
{{- $_ := set $selector "matchExpressions" (append (default list $selector.matchExpressions) $noRun) -}}
{{- $_ := set $peer "podSelector" $selector -}}
{{- end -}}
{{- $all = append $all $peer -}}
{{- end -}}
{{- toYaml $all -}}
{{- end -}}

{{/* Topology spread with the selector filled in. Takes constraints and selector. */}}
{{- define "mayfly.topologySpread" -}}
{{- $all := list -}}
{{- range .constraints -}}
{{- $all = append $all (mergeOverwrite (dict "labelSelector" (dict "matchLabels" (fromYaml $.selector))) (deepCopy .)) -}}
{{- end -}}
{{- toYaml $all -}}
{{- end -}}

{{/* Images */}}

{{/* An image without tag and digest. Takes root and image; leaveRegistry leaves `global.imageRegistry` to somebody else. */}}
{{- define "mayfly.imageRepository" -}}
{{- $everywhere := .root.Values.global.imageRegistry -}}
{{- $registry := ternary (ternary "" $everywhere (default false .leaveRegistry)) .image.registry (not (empty $everywhere)) -}}
{{- with $registry }}{{ trimSuffix "/" . }}/{{ end -}}
{{- .image.repository -}}
{{- end -}}

{{/* Takes the same. */}}
{{- define "mayfly.image" -}}
{{- include "mayfly.imageRepository" . -}}
{{- if .image.digest }}@{{ .image.digest }}{{ else }}:{{ default .root.Chart.AppVersion .image.tag }}{{ end -}}
{{- end -}}

{{/* Names of pull secrets, joined by commas. */}}
{{- define "mayfly.pullSecretNames" -}}
{{- $names := list -}}
{{- range .Values.global.imagePullSecrets }}{{- $names = append $names .name -}}{{- end -}}
{{- if .Values.imagePullSecretDockerConfig }}{{- $names = append $names (include "mayfly.pullSecretName" .) -}}{{- end -}}
{{- join "," $names -}}
{{- end -}}

{{/* Rights */}}

{{/* Whether one replica is chosen by a Lease: "true" or nothing. */}}
{{- define "mayfly.elects" -}}
{{- if and .Values.launcher.leaderElection.enabled (eq .Values.rbac.profile "least") (include "mayfly.launcher.runs" .) }}true{{ end -}}
{{- end -}}

{{/* Whether a launcher may run while the next one starts: "true" or nothing. */}}
{{- define "mayfly.launcher.overlaps" -}}
{{- $elects := or (include "mayfly.elects" .) (not (include "mayfly.launcher.runs" .)) -}}
{{- if and $elects (not (include "mayfly.hub.claim" .)) }}true{{ end -}}
{{- end -}}

{{/* The hub */}}

{{/* The claim of the hub's database; empty without one. */}}
{{- define "mayfly.hub.claim" -}}
{{- if and .Values.hub.enabled (eq .Values.hub.store.type "sqlite") -}}
{{- default (printf "%s-hub" (include "mayfly.fullname" .)) .Values.hub.store.sqlite.existingClaim -}}
{{- end -}}
{{- end -}}

{{/* The agent */}}

{{/* Seconds that the pod of an agent needs to stop. */}}
{{- define "mayfly.agent.stopSeconds" -}}
{{- $agent := .Values.agent -}}
{{- $seconds := 30 -}}
{{- if has $agent.onStop (list "drain" "grace") }}{{- $seconds = add $seconds (int64 $agent.graceTimeoutSeconds) -}}{{- end -}}
{{- if eq $agent.onStop "drain" }}{{- $seconds = add $seconds (int64 $agent.drainTimeoutSeconds) -}}{{- end -}}
{{- $seconds -}}
{{- end -}}

{{/* TLS */}}

{{/* Where the authorities lie in a pod; empty without any. */}}
{{- define "mayfly.caFile" -}}
{{- $tls := .Values.global.tls -}}
{{- if or $tls.caBundle $tls.caBundleExistingSecret.name $tls.caBundleConfigMap.name }}/etc/mayfly/tls/ca.crt{{ end -}}
{{- end -}}

{{/* The volume of the authorities. Takes root and configMap, that of the pod's own namespace. */}}
{{- define "mayfly.caVolume" -}}
{{- $tls := .root.Values.global.tls -}}
name: tls
{{- if $tls.caBundleExistingSecret.name }}
secret:
  secretName: {{ $tls.caBundleExistingSecret.name }}
  items:
    - key: {{ $tls.caBundleExistingSecret.key }}
      path: ca.crt
{{- else }}
configMap:
  {{- if $tls.caBundleConfigMap.name }}
  name: {{ $tls.caBundleConfigMap.name }}
  items:
    - key: {{ $tls.caBundleConfigMap.key }}
      path: ca.crt
  {{- else }}
  name: {{ .configMap }}
  items:
    - key: ca.crt
      path: ca.crt
  {{- end }}
{{- end }}
{{- end -}}

{{/* Whether the launcher has an extra variable of this name: (list . NAME) */}}
{{- define "mayfly.launcher.names" -}}
{{- $values := (index . 0).Values -}}
{{- $name := index . 1 -}}
{{- range concat $values.global.extraEnv $values.launcher.extraEnv }}{{ if eq .name $name }}true{{ end }}{{ end -}}
{{- end -}}

{{/* Mounts of an agent's container, and of the pod of `helm test` for agents. */}}
{{- define "mayfly.agent.volumeMounts" -}}
{{- $agent := .Values.agent -}}
- name: config
  mountPath: /etc/mayfly/agent
  readOnly: true
- name: tmp
  mountPath: /tmp
{{- if $agent.oidc.enabled }}
- name: oidc
  mountPath: /etc/mayfly/oidc
  readOnly: true
{{- else }}
- name: token
  mountPath: /etc/mayfly/token
  readOnly: true
{{- end }}
{{- if include "mayfly.caFile" . }}
- name: tls
  mountPath: /etc/mayfly/tls
  readOnly: true
{{- end }}
{{- with $agent.extraVolumeMounts }}
{{- toYaml . | nindent 0 }}
{{- end }}
{{- end -}}

{{/* Volumes of both. */}}
{{- define "mayfly.agent.volumes" -}}
{{- $agent := .Values.agent -}}
{{- $name := include "mayfly.agent.name" . -}}
- name: config
  configMap:
    name: {{ $name }}
    items:
      - key: pod-template.yaml
        path: pod-template.yaml
      - key: policy.yaml
        path: policy.yaml
- name: tmp
  emptyDir:
    sizeLimit: 64Mi
# Folders, so that a token or a key can be replaced without a restart.
{{- if $agent.oidc.enabled }}
- name: oidc
  projected:
    sources:
      - serviceAccountToken:
          path: token
          audience: {{ default $agent.serviceUrl $agent.oidc.audience | quote }}
          expirationSeconds: {{ int64 $agent.oidc.serviceAccountTokenSeconds }}
{{- else }}
- name: token
  secret:
    secretName: {{ $agent.token.existingSecret }}
    items:
      - key: {{ $agent.token.key }}
        path: token
{{- end }}
{{- if include "mayfly.caFile" . }}
- {{- include "mayfly.caVolume" (dict "root" . "configMap" $name) | nindent 2 }}
{{- end }}
{{- with $agent.extraVolumes }}
{{- toYaml . | nindent 0 }}
{{- end }}
{{- end -}}
