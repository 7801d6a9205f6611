{{- define "omnipipeline.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 53 | trimSuffix "-" -}}
{{- end -}}

{{- define "omnipipeline.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 53 | trimSuffix "-" -}}
{{- else if contains (include "omnipipeline.name" .) .Release.Name -}}
{{- .Release.Name | trunc 53 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "omnipipeline.name" .) | trunc 53 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* The full name as that of a Service, or of a pipeline: a release's may have dots, and begin with a digit. */}}
{{- define "omnipipeline.service" -}}
{{- regexReplaceAll "^([0-9])" (include "omnipipeline.fullname" . | replace "." "-") "r${1}" -}}
{{- end -}}

{{/* The Service and the Secret of the conversion webhook. */}}
{{- define "omnipipeline.conversion" -}}
{{- printf "%s-conversion" (include "omnipipeline.service" . | trunc 52 | trimSuffix "-") -}}
{{- end -}}

{{- define "omnipipeline.selector" -}}
app.kubernetes.io/name: {{ include "omnipipeline.name" . }}-operator
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "omnipipeline.labels" -}}
{{ include "omnipipeline.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: omnipipeline
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | quote }}
{{- end -}}

{{- define "omnipipeline.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "omnipipeline.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name is needed when serviceAccount.create is false" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* An image reference from {repository, tag, digest}; called with (list . "image"). */}}
{{- define "omnipipeline.image" -}}
{{- $root := index . 0 -}}
{{- $image := index $root.Values (index . 1) -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository (default $root.Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end -}}

{{/* The lines of a pod's securityContext that name its user and groups; whole numbers, which toYaml may write as floats. */}}
{{- define "omnipipeline.users" -}}
{{- range $field, $id := .Values.podSecurityContext }}
{{ $field }}: {{ int64 $id }}
{{- end }}
{{- end -}}

{{- define "omnipipeline.testNamespace" -}}
{{- if .Values.tests.namespace -}}
{{- .Values.tests.namespace -}}
{{- else if .Values.watchNamespaces -}}
{{- first .Values.watchNamespaces -}}
{{- else -}}
{{- .Release.Namespace -}}
{{- end -}}
{{- end -}}

{{/* Peers that may read :8081 of a pipeline's pods: the operator's own pods, then `scrapers`. */}}
{{- define "omnipipeline.scrapers" -}}
{{- $own := dict
  "namespaceSelector" (dict "matchLabels" (dict "kubernetes.io/metadata.name" .Release.Namespace))
  "podSelector" (dict "matchLabels" (include "omnipipeline.selector" . | fromYaml)) -}}
{{- prepend (default list .Values.scrapers) $own | toJson -}}
{{- end -}}

{{/* The operator's rights on a pipeline's children; the same in a ClusterRole and in a Role. */}}
{{- define "omnipipeline.rules" -}}
- apiGroups: [omnipipeline.dev]
  resources: [omnipipelines]
  verbs: [get, list, watch]
- apiGroups: [omnipipeline.dev]
  resources: [omnipipelines/status]
  verbs: [patch]
# OwnerReferencesPermissionEnforcement requires it for owner references that block deletion.
- apiGroups: [omnipipeline.dev]
  resources: [omnipipelines/finalizers]
  verbs: [update]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
# The history of pipelines.
- apiGroups: [apps]
  resources: [controllerrevisions]
  verbs: [get, list, create, patch, delete]
- apiGroups: [""]
  resources: [configmaps, services]
  verbs: [get, list, watch, create, patch, delete]
# The control plane's key: created once, never read.
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, patch]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, list, watch, create, patch]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [ingresses, networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
{{- if ternary .Values.rbac.gatewayAPI (not .Values.watchNamespaces) (kindIs "bool" .Values.rbac.gatewayAPI) }}
- apiGroups: [gateway.networking.k8s.io]
  resources: [httproutes]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
{{- if ternary .Values.rbac.deviceClaims (not .Values.watchNamespaces) (kindIs "bool" .Values.rbac.deviceClaims) }}
- apiGroups: [resource.k8s.io]
  resources: [resourceclaimtemplates]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
{{- if .Values.podGroupScheduler }}
- apiGroups: [scheduling.x-k8s.io, scheduling.k8s.io]
  resources: [podgroups]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
# Kubelets' Events about pods that cannot start: nothing else reports a missing volume or key.
- apiGroups: [""]
  resources: [events]
  verbs: [list]
{{- end -}}
