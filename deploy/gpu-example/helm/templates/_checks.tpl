{{/* Fails where baton refuses to export, and where this chart was exported for something else. */}}
{{- define "baton.checks" -}}
{{- $checks := .Files.Get "files/export.yaml" | fromYaml -}}
{{- include "baton.checkExported" (dict "config" .Values.config "exported" $checks.exported) -}}
{{- include "baton.checkPorts" (dict "values" .Values "taken" $checks.taken) -}}
{{- include "baton.checkNames" . -}}
{{- include "baton.checkPools" .Values -}}
{{- include "baton.checkEnvironment" .Values -}}
{{- include "baton.checkSecrets" .Values.config -}}
{{- end }}

{{/* Variables and objects of this chart were made from these keys. Wants: config, exported. */}}
{{- define "baton.checkExported" -}}
{{- range $key, $wanted := .exported -}}
{{- $found := $.config -}}
{{- range $part := splitList "." $key -}}
{{- $found = get (default dict $found) $part -}}
{{- end -}}
{{- if ne (toString $found) (toString $wanted) -}}
{{- fail (printf "config.%s: got %q, expected %q, which this chart was exported for: export it again" $key (toString $found) (toString $wanted)) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* The processes of one pod share its ports. Wants: values, taken. */}}
{{- define "baton.checkPorts" -}}
{{- $ports := dict "server.port" .values.config.server.port -}}
{{- if include "baton.token" (dict "Values" .values) -}}
{{- $_ := set $ports "observability.metrics.port" .values.config.observability.metrics.port -}}
{{- end -}}
{{- range $key, $port := $ports -}}
{{- if lt (int $port) 1 -}}
{{- fail (printf "config.%s: got %d, expected a port that objects can name" $key (int $port)) -}}
{{- end -}}
{{- range $one := $.taken -}}
{{- if and (le (int $one.first) (int $port)) (le (int $port) (int $one.last)) -}}
{{- fail (printf "config.%s: got %d, on which %s listens in the same pod: choose another port" $key (int $port) $one.by) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if lt (len (values $ports | uniq)) (len $ports) -}}
{{- fail "config.observability.metrics.port: got server.port: choose another port" -}}
{{- end -}}
{{- end }}

{{/* Names of objects are longer than the deployment's, and Kubernetes limits them. */}}
{{- define "baton.checkNames" -}}
{{- $name := include "baton.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$" $name) -}}
{{- fail (printf "the deployment's name: got %q, expected lower-case letters, digits and '-', 40 at most: set fullnameOverride" $name) -}}
{{- end -}}
{{- end }}

{{/* Each variable has one place. Wants: the values. */}}
{{- define "baton.checkEnvironment" -}}
{{- range .extraEnv -}}
{{- if or (hasKey $.environment .name) (eq .name "HF_TOKEN") -}}
{{- fail (printf "extraEnv: got %s, which pods have already: change it in environment, HF_TOKEN in its secret" .name) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Groups of nodes are called as pools are. Wants: the values. */}}
{{- define "baton.checkPools" -}}
{{- range $name, $_ := .scheduling.pools -}}
{{- if not (hasKey (default dict $.config.pools) $name) -}}
{{- fail (printf "scheduling.pools.%s: got no such pool, expected one of config.pools: %s" $name (keys (default dict $.config.pools) | sortAlpha | join ", ")) -}}
{{- end -}}
{{- end -}}
{{- range $name, $_ := .config.pools -}}
{{- if or (contains "_" $name) (has $name (list "head" "ingress" "controller")) -}}
{{- fail (printf "config.pools.%s: groups of nodes can be called so in no cluster: use '-' for '_', and no pool 'head', 'ingress' or 'controller'" $name) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Pods see the files of their image and of mounted secrets. Wants: the configuration. */}}
{{- define "baton.checkSecrets" -}}
{{- range $key, $value := dig "tls" dict (default dict .security) -}}
{{- if $value -}}
{{- fail (printf "config.security.tls.%s is set, and the front of a cluster does not use TLS: end TLS before baton, in the cluster's gateway, and remove security.tls" $key) -}}
{{- end -}}
{{- end -}}
{{- range $name, $tenant := .tenants -}}
{{- with (default dict $tenant).keys_file -}}
{{- if not (regexMatch "^/etc/baton/keys/[^/]+$" .) -}}
{{- fail (printf "config.tenants.%s.keys_file: got %q, expected /etc/baton/keys/ and the file's name in the secret of keys" $name .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- include "baton.checkEnv" (dict "at" "transfer.env" "env" (dig "env" dict (default dict .transfer))) -}}
{{- range $name, $pool := .pools -}}
{{- include "baton.checkEnv" (dict "at" (printf "pools.%s.env" $name) "env" (dig "env" dict $pool)) -}}
{{- end -}}
{{- end }}

{{/* No variable may be read from a file. Wants: at, env. */}}
{{- define "baton.checkEnv" -}}
{{- range $name, $value := .env -}}
{{- if and (kindIs "map" $value) (hasKey $value "file") -}}
{{- fail (printf "config.%s.%s is read from the file %s, and no pod has that file: name a variable instead, as {env: NAME}, and give that to the pods from a secret" $.at $name $value.file) -}}
{{- end -}}
{{- end -}}
{{- end }}
