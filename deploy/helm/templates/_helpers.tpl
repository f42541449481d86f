{{- define "labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- /* The proxy's configuration: what the chart knows, under what the user has written. */}}
{{- define "config" -}}
{{- $kubernetes := dict
      "namespace" .Values.sandboxes.namespace
      "image" .Values.sandboxes.image
      "agent_image" .Values.sandboxes.agentImage
      "runtime_class" .Values.sandboxes.runtimeClass }}
{{- $config := dict
      "server" (dict "host" "0.0.0.0" "port" 8080 "data_dir" "/var/lib/sandbox-proxy")
      "keys" (list (dict "name" "default" "env" "SANDBOX_PROXY_KEY"))
      "backend" (dict "api_key_env" "BACKEND_KEY")
      "sandbox" (dict "backend" "kubernetes" "kubernetes" $kubernetes) }}
{{- mergeOverwrite $config (deepCopy .Values.config) | toYaml }}
{{- end }}

{{- define "check" -}}
{{- if gt (int .Values.replicas) 1 }}
{{- $store := .Values.config.store | default dict }}
{{- if not (and $store.database_url $store.blobs_url) }}
{{- fail "replicas: more than one needs config.store.database_url (PostgreSQL) and config.store.blobs_url (S3)" }}
{{- end }}
{{- end }}
{{- end }}
