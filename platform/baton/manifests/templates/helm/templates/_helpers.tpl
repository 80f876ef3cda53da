{{/* The deployment's name: the prefix of every object's name. */}}
{{- define "baton.fullname" -}}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride }}
{{- else if .Values.nameOverride }}{{ .Release.Name }}-{{ .Values.nameOverride }}
{{- else }}{{ .Release.Name }}{{ end -}}
{{- end }}

{{- define "baton.labels" -}}
app.kubernetes.io/name: {{ default "baton" .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* By which services, policies and monitors find the pods of a group. */}}
{{- define "baton.podLabels" -}}
{{ include "baton.labels" .root }}
baton/group: {{ .group }}
{{- end }}

{{- define "baton.image" -}}
{{- .Values.image.repository }}{{ with .Values.image.tag }}:{{ . }}{{ end }}{{ with .Values.image.digest }}@{{ . }}{{ end -}}
{{- end }}

{{/* The service account of all pods; empty where KubeRay makes one for the head alone. */}}
{{- define "baton.serviceAccount" -}}
{{- with .Values.serviceAccount -}}
{{- if .name }}{{ .name }}{{ else if .create }}{{ include "baton.fullname" $ }}{{ end -}}
{{- end -}}
{{- end }}

{{/* Says something where metrics or console are served, which a token protects. */}}
{{- define "baton.token" -}}
{{- with .Values.config.observability -}}
{{- if or .metrics.enabled .console.enabled }}yes{{ end -}}
{{- end -}}
{{- end }}

{{/* A size as the configuration writes it, in bytes. */}}
{{- define "baton.bytes" -}}
{{- $binary := dict "B" 1 "KiB" 1024 "MiB" 1048576 "GiB" 1073741824 "TiB" 1099511627776 -}}
{{- $decimal := dict "kB" 1000 "KB" 1000 "MB" 1000000 "GB" 1000000000 "TB" 1000000000000 -}}
{{- $bytes := merge $binary $decimal -}}
{{- $text := . | toString -}}
{{- $unit := regexFind "[A-Za-z]+$" $text -}}
{{- $number := trimSuffix $unit $text | trim -}}
{{- if not (and (hasKey $bytes $unit) (regexMatch "^[0-9]+([.][0-9]+)?$" $number)) -}}
{{- fail (printf "got %q, expected a size such as 512KiB, 4MiB or 1GB" $text) -}}
{{- end -}}
{{- mulf ($number | float64) (get $bytes $unit) | ceil | int64 -}}
{{- end }}

{{/* The same, in whole MiB. */}}
{{- define "baton.mib" -}}
{{- divf (include "baton.bytes" . | float64) 1048576 | ceil | int64 -}}
{{- end }}

{{/* Main memory of each node of a replica, in MiB, as `replica_bytes` of baton has it. Wants: root, pool, model, gpus, hosts. */}}
{{- define "baton.memory" -}}
{{- $bytes := (.root.Files.Get "files/export.yaml" | fromYaml).bytes -}}
{{- $engine := include "baton.engine" . | fromYaml -}}
{{- $parallel := default dict .pool.parallel -}}
{{- $workers := mul (dig "tp" 1 $parallel) (dig "pp" 1 $parallel) -}}
{{- $weights := get .root.Values.memory.weights (include "baton.source" .) -}}
{{- $all := 0 -}}
{{- if eq (dig "kind" "vllm" $engine) "sim" -}}
{{- $all = int64 $bytes.simulated -}}
{{- else if .gpus -}}
{{- $staging := int64 $bytes.shard -}}
{{- with $weights }}{{ $staging = min $staging (include "baton.bytes" . | int64) }}{{ end -}}
{{- $all = add (mul $workers (int64 $bytes.worker)) (mul .hosts $staging) -}}
{{- with dig "offload" "host_memory" "" $engine }}{{ $all = add $all (include "baton.bytes" . | int64) }}{{ end -}}
{{- else -}}
{{- $cache := int64 $bytes.cpuKv -}}
{{- with $engine.kv_cache }}{{ $cache = include "baton.bytes" . | int64 }}{{ end -}}
{{- $all = add (int64 $bytes.worker) (mul $workers $cache) -}}
{{- with $weights }}{{ $all = add $all (include "baton.bytes" . | int64) }}{{ end -}}
{{- end -}}
{{- with .pool.resources }}{{ with .memory }}{{ $all = include "baton.bytes" . | int64 }}{{ end }}{{ end -}}
{{- add (divf (float64 $all) .hosts 1048576 | ceil) (divf $bytes.ray 1048576 | ceil) -}}
{{- end }}

{{/* Where a model comes from. Wants: root, model. */}}
{{- define "baton.source" -}}
{{- dig .model "source" "" (default dict .root.Values.config.models) -}}
{{- end }}

{{/* Engine options of a pool: its own, over those of its model; YAML. Wants: root, pool, model. */}}
{{- define "baton.engine" -}}
{{- $model := dig .model dict (default dict .root.Values.config.models) -}}
{{- merge (deepCopy (default dict .pool.engine)) (default dict $model.engine) | toYaml -}}
{{- end }}

{{/* The disk for a pool's model where each pod downloads it; empty: none, or unknown. Wants: root, pool, model. */}}
{{- define "baton.download" -}}
{{- $cache := include "baton.cache" .root | fromYaml -}}
{{- $simulated := eq (dig "kind" "vllm" (include "baton.engine" . | fromYaml)) "sim" -}}
{{- $source := include "baton.source" . -}}
{{- $store := regexMatch "^(?i:s3|gs|az)://" $source -}}
{{- $path := or (regexMatch "^[./~]" $source) (and (not (contains "://" $source)) (gt (len (splitList "/" $source)) 2)) -}}
{{- if not (or $simulated $store $path (eq $source "tiny") $cache.path (include "baton.claim" .root)) -}}
{{- with get .root.Values.memory.weights $source }}{{ include "baton.mib" . }}{{ end -}}
{{- end -}}
{{- end }}

{{/* Where pods of a group may run: nodeSelector, tolerations, affinity; YAML. Wants: root, group, role, gpu. */}}
{{- define "baton.scheduling" -}}
{{- $scheduling := .root.Values.scheduling -}}
{{- $sources := list -}}
{{- if .gpu }}{{ $sources = append $sources .root.Values.gpu }}{{ end -}}
{{- $sources = append $sources (get $scheduling .role) -}}
{{- with get $scheduling.pools .group }}{{ $sources = append $sources . }}{{ end -}}
{{- $found := dict "nodeSelector" dict "tolerations" list "affinity" dict -}}
{{- range $sources -}}
{{- $_ := mergeOverwrite $found.nodeSelector (default dict .nodeSelector) -}}
{{- $_ := set $found "tolerations" (concat $found.tolerations (default list .tolerations)) -}}
{{- with .affinity }}{{ $_ := set $found "affinity" . }}{{ end -}}
{{- end -}}
{{- range $key, $value := $found }}{{ if not $value }}{{ $_ := unset $found $key }}{{ end }}{{ end -}}
{{- with $found }}{{ toYaml . }}{{ end -}}
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

{{/* Says something where a tenant has keys, so that pods need their secret. */}}
{{- define "baton.keys" -}}
{{- range $_, $tenant := .Values.config.tenants -}}
{{- if (default dict $tenant).keys_file }}yes{{ end -}}
{{- end -}}
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
{{- if $cache.size }}{{ include "baton.fullname" . }}-models
{{- else }}{{ with $cache.claim }}{{ . }}{{ end }}{{ end -}}
{{- end }}

{{/* A pod. Wants: root, group, role (head, ingress or a pool's), gpu, rdma (bools), resources. */}}
{{- define "baton.pod" -}}
{{- $values := .root.Values -}}
{{- $head := eq .role "head" -}}
{{- $front := eq .role "ingress" -}}
{{- $name := include "baton.fullname" .root -}}
{{- $token := include "baton.token" .root -}}
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
  {{- with include "baton.serviceAccount" .root }}
  serviceAccountName: {{ . }}
  {{- end }}
  {{- with include "baton.scheduling" . }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- if $front }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels: {{- include "baton.podLabels" . | nindent 10 }}
  {{- end }}
  {{- with $values.image.pullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ ternary "ray-head" "ray-worker" $head }}
      image: {{ include "baton.image" .root | quote }}
      {{- with $values.image.pullPolicy }}
      imagePullPolicy: {{ . }}
      {{- end }}
      env:
        {{- range $name, $value := $values.environment }}
        - name: {{ $name }}
          value: {{ eq $name "HF_HOME" | ternary (default $value $cache.path) $value | quote }}
        {{- end }}
        - name: HF_TOKEN
          valueFrom:
            secretKeyRef:
              name: {{ $name }}-hub
              key: token
              optional: true
        {{- with $values.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      envFrom:
        - secretRef:
            name: {{ $name }}-environment
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
        {{- if $token }}
        - name: observe
          containerPort: {{ $values.config.observability.metrics.port }}
        {{- end }}
        {{- end }}
        {{- if $front }}
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
      {{- if $front }}
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
        {{- if $token }}
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
        secretName: {{ $name }}-keys
        defaultMode: 288
    {{- end }}
    {{- if $token }}
    - name: console
      secret:
        secretName: {{ $name }}-console
        defaultMode: 288
    {{- end }}
{{- end }}

{{/* What Ray Serve runs. */}}
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
