{{- define "kvoy.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "kvoy.operatorName" -}}
{{ include "kvoy.fullname" . }}-operator
{{- end -}}

{{- define "kvoy.routerRole" -}}
{{ include "kvoy.fullname" . }}-router
{{- end -}}

{{- define "kvoy.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (ternary (include "kvoy.operatorName" .) "default" .Values.serviceAccount.create) }}
{{- end -}}

{{/* By which the operator's pods are selected: never changes. */}}
{{- define "kvoy.selector" -}}
app.kubernetes.io/name: kvoy
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "kvoy.labels" -}}
app.kubernetes.io/name: kvoy
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name (.Chart.Version | replace "+" "_") }}
{{- end -}}

{{/* Arguments: context, name of the image, suffix of its tag, a reference that replaces it. */}}
{{- define "kvoy.image" -}}
{{- $root := index . 0 -}}
{{- $tag := $root.Values.image.tag | default $root.Chart.AppVersion -}}
{{- index . 3 | default (printf "%s/%s:%s%s" $root.Values.image.registry (index . 1) $tag (index . 2)) -}}
{{- end -}}

{{- define "kvoy.operatorImage" -}}
{{ include "kvoy.image" (list . "operator" "" .Values.images.operator) }}
{{- end -}}

{{/* The restricted level of PodSecurity: the pod's half, then the container's. */}}
{{- define "kvoy.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "kvoy.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}
