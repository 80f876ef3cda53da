{{/* By which services, policies and monitors find the pods of a group. */}}
{{- define "baton.podLabels" -}}
app.kubernetes.io/name: baton
app.kubernetes.io/instance: {{ .root.Release.Name }}
baton/group: {{ .group }}
{{- end }}

{{- define "baton.labels" -}}
app.kubernetes.io/name: baton
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* A size as the configuration writes it, in whole MiB. */}}
{{- define "baton.mib" -}}
{{- $binary := dict "B" 1 "KiB" 1024 "MiB" 1048576 "GiB" 1073741824 "TiB" 1099511627776 -}}
{{- $decimal := dict "kB" 1000 "KB" 1000 "MB" 1000000 "GB" 1000000000 "TB" 1000000000000 -}}
{{- $bytes := merge $binary $decimal -}}
{{- $text := . | toString -}}
{{- $unit := regexFind "[A-Za-z]+$" $text -}}
{{- $number := trimSuffix $unit $text | trim -}}
{{- if not (and (hasKey $bytes $unit) (regexMatch "^[0-9]+([.][0-9]+)?$" $number)) -}}
{{- fail (printf "got %q, expected a size such as 512KiB, 4MiB or 1GB" $text) -}}
{{- end -}}
{{- divf (mulf ($number | float64) (get $bytes $unit)) 1048576 | ceil | int -}}
{{- end }}

{{/* Labels of a node that the selectors of a pool choose: a value that each of them wants. */}}
{{- define "baton.nodeLabels" -}}
{{- $found := dict -}}
{{- range $name, $selector := . -}}
{{- if not (hasPrefix "!" $selector) -}}
{{- $_ := set $found $name ($selector | trimPrefix "in(" | trimSuffix ")" | splitList "," | first) -}}
{{- end -}}
{{- end -}}
{{- with $found }}{{ toYaml . }}{{ end -}}
{{- end }}

{{/* Says something where pods need the secret of keys: where a tenant has some, or it is asked for. */}}
{{- define "baton.keys" -}}
{{- $found := .Values.keys -}}
{{- range $_, $tenant := .Values.config.tenants -}}
{{- if (default dict $tenant).keys_file }}{{ $found = true }}{{ end -}}
{{- end -}}
{{- if $found }}yes{{ end -}}
{{- end }}

{{/* The probe by which a node's raylet is known to live. */}}
{{- define "baton.alive" -}}
exec:
  command: {{ toJson .Values.probe.command }}
periodSeconds: 10
timeoutSeconds: 5
{{- end }}

{{/* Where models of a hub are kept, as the configuration says it; YAML. */}}
{{- define "baton.cache" -}}
{{- dig "cluster" "model_cache" dict .Values.config | default dict | toYaml -}}
{{- end }}

{{/* The claim by which pods share their models; empty where they have none. */}}
{{- define "baton.claim" -}}
{{- $cache := include "baton.cache" . | fromYaml -}}
{{- if $cache.size }}{{ .Release.Name }}-models
{{- else }}{{ with coalesce $cache.claim .Values.models.claim }}{{ . }}{{ end }}{{ end -}}
{{- end }}

{{/* A pod. Wants: root, group, front (bool), requests, limits (YAML texts), rdma (bool). */}}
{{- define "baton.pod" -}}
{{- $values := .root.Values -}}
{{- $head := eq .group "head" -}}
{{- $keys := include "baton.keys" .root -}}
{{- $cache := include "baton.cache" .root | fromYaml -}}
{{- $claim := include "baton.claim" .root -}}
metadata:
  labels: {{- include "baton.podLabels" . | nindent 4 }}
spec:
  {{- if not $head }}
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: 60
  {{- end }}
  securityContext: {{- toYaml $values.podSecurityContext | nindent 4 }}
  {{- if .gpu }}
  {{- with $values.gpu.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.gpu.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  {{- if .front }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels: {{- include "baton.podLabels" . | nindent 10 }}
  {{- end }}
  {{- with $values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ ternary "ray-head" "ray-worker" $head }}
      image: {{ $values.image | quote }}
      env:
        {{- range $name, $value := $values.environment }}
        - name: {{ $name }}
          value: {{ eq $name "HF_HOME" | ternary (default $value $cache.path) $value | quote }}
        {{- end }}
        - name: HF_TOKEN
          valueFrom:
            secretKeyRef:
              name: {{ .root.Release.Name }}-hub
              key: token
              optional: true
      envFrom:
        - secretRef:
            name: {{ .root.Release.Name }}-environment
            optional: true
      ports:
        - name: metrics
          containerPort: 8080
        {{- if $head }}
        - name: gcs
          containerPort: 6379
        - name: dashboard
          containerPort: 8265
        - name: client
          containerPort: 10001
        {{- if $values.console }}
        - name: observe
          containerPort: {{ $values.config.observability.metrics.port }}
        {{- end }}
        {{- end }}
        {{- if .front }}
        - name: api
          containerPort: {{ $values.config.server.port }}
        {{- end }}
      resources: {{- toYaml .resources | nindent 8 }}
      securityContext:
        allowPrivilegeEscalation: false
        capabilities:
          drop: [ALL]
          {{- if .rdma }}
          add: [IPC_LOCK]
          {{- end }}
      startupProbe: {{- include "baton.alive" .root | nindent 8 }}
        failureThreshold: 30
      livenessProbe: {{- include "baton.alive" .root | nindent 8 }}
        failureThreshold: 6
      {{- if .front }}
      readinessProbe:
        httpGet:
          path: /-/healthz
          port: {{ $values.config.server.port }}
        periodSeconds: 5
        timeoutSeconds: 3
        failureThreshold: 2
      {{- else }}
      readinessProbe: {{- include "baton.alive" .root | nindent 8 }}
        failureThreshold: 6
      {{- end }}
      volumeMounts:
        - name: models
          mountPath: {{ default "/models" $cache.path }}
        - name: shared-memory
          mountPath: /dev/shm
        {{- if $keys }}
        - name: keys
          mountPath: /etc/baton/keys
          readOnly: true
        {{- end }}
        {{- if $values.console }}
        - name: console
          mountPath: /etc/baton/console
          readOnly: true
        {{- end }}
  volumes:
    - name: models
      {{- if $cache.path }}
      hostPath:
        path: {{ $cache.path }}
        type: DirectoryOrCreate
      {{- else if $claim }}
      persistentVolumeClaim:
        claimName: {{ $claim }}
      {{- else }}
      emptyDir: {}
      {{- end }}
    - name: shared-memory
      emptyDir:
        medium: Memory
    {{- if $keys }}
    - name: keys
      secret:
        secretName: {{ .root.Release.Name }}-keys
        defaultMode: 288
    {{- end }}
    {{- if $values.console }}
    - name: console
      secret:
        secretName: {{ .root.Release.Name }}-console
        defaultMode: 288
    {{- end }}
{{- end }}

{{/* What Ray Serve is told to run. */}}
{{- define "baton.serve" -}}
{{- $config := .Values.config -}}
{{- $gate := eq (toString $config.server.listener) "ingress" -}}
{{- if $gate -}}
proxy_location: HeadOnly
http_options:
  host: 127.0.0.1
  port: 21002
{{- else -}}
proxy_location: EveryNode
http_options:
  host: {{ ternary "::0" $config.server.host (eq $config.server.host "::") | quote }}
  port: {{ $config.server.port }}
{{- end }}
applications:
  - name: baton
    route_prefix: /
    import_path: baton.serving.app_builder:application
    external_scaler_enabled: true
    args:
      config: {{- toYaml $config | nindent 8 }}
    deployments:
      - name: ingress
        ray_actor_options: {num_cpus: 0, resources: {baton_front: 0.5}}
      - name: controller
        ray_actor_options: {num_cpus: 0, resources: {baton_head: 0.001}}
{{- end }}
