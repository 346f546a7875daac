{{/* Metadata of a pod of `helm test`, which stays until the next test: `helm test --logs` reads it. Takes root and name. */}}
{{- define "mayfly.test.metadata" -}}
{{- include "mayfly.metadata" (dict "root" .root "name" .name "namespace" (include "mayfly.namespace" .root) "component" "test" "annotations" (dict
  "helm.sh/hook" "test"
  "helm.sh/hook-delete-policy" "before-hook-creation"
)) -}}
{{- end -}}

{{/* What every such pod has in common. Takes root, and of: the values of an agent, where it is not for the launcher. */}}
{{- define "mayfly.test.pod" -}}
{{- $of := default .root.Values.launcher .of -}}
restartPolicy: Never
enableServiceLinks: false
activeDeadlineSeconds: 900
{{- with include "mayfly.pullSecretNames" .root }}
imagePullSecrets:
  {{- range splitList "," . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with $of.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $of.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- toYaml $of.podSecurityContext | nindent 2 }}
{{- end -}}

{{/* What every container of them has in common. Takes root. */}}
{{- define "mayfly.test.container" -}}
resources:
  {{- toYaml .root.Values.tests.resources | nindent 2 }}
securityContext:
  {{- toYaml .root.Values.launcher.securityContext | nindent 2 }}
{{- end -}}
