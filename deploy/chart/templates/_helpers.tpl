{{- define "nobypass.name" -}}
{{- .Values.fullnameOverride | default (contains "nobypass" .Release.Name | ternary .Release.Name (printf "%s-nobypass" .Release.Name)) | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "nobypass.selector" -}}
app.kubernetes.io/name: nobypass
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "nobypass.labels" -}}
{{ include "nobypass.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/component: agent
{{- end -}}

{{- define "nobypass.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{/* What the features that are switched on need of the kernel, as a list. */}}
{{- define "nobypass.capabilities" -}}
{{- $all := .Values.capabilities.base -}}
{{- $repair := ne .Values.remedies.repair "off" -}}
{{- if or .Values.probe.enabled $repair -}}{{- $all = concat $all .Values.capabilities.probe -}}{{- end -}}
{{- if $repair -}}{{- $all = concat $all .Values.capabilities.repair -}}{{- end -}}
{{- $all | uniq | toYaml -}}
{{- end -}}
