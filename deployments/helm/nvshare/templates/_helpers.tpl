{{- /* What names each object of the release: two releases, for two pools of nodes, share none. */}}
{{- define "nvshare.name" -}}
{{- $release := ternary .Release.Name (printf "%s-nvshare" .Release.Name) (contains "nvshare" .Release.Name) -}}
{{ .Values.fullnameOverride | default $release | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "nvshare.selector" -}}
{app.kubernetes.io/name: nvshare, app.kubernetes.io/instance: {{ .Release.Name }}}
{{- end }}

{{- /* A container's image, and when to pull it. */}}
{{- define "nvshare.image" -}}
image: {{ .Values.image.repository }}{{ if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- with .Values.image.pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
{{- end }}

{{- /* Root without capabilities; the argument is a list of those to add. */}}
{{- define "nvshare.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  add: {{ toJson . }}
{{- end }}

{{- /* Which nodes have GPUs: those that one of these labels says so of. Not while the GPU Operator replaces the driver. */}}
{{- define "nvshare.gpuNodes" -}}
nodeAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    nodeSelectorTerms:
    - matchExpressions: [{key: nvidia.com/gpu.present, operator: In, values: ["true"]}, {key: nvidia.com/gpu.deploy.operator-validator, operator: NotIn, values: [paused-for-driver-upgrade]}]
    - matchExpressions: [{key: feature.node.kubernetes.io/pci-10de.present, operator: In, values: ["true"]}, {key: nvidia.com/gpu.deploy.operator-validator, operator: NotIn, values: [paused-for-driver-upgrade]}]
    - matchExpressions: [{key: feature.node.kubernetes.io/pci-0300_10de.present, operator: In, values: ["true"]}, {key: nvidia.com/gpu.deploy.operator-validator, operator: NotIn, values: [paused-for-driver-upgrade]}]
    - matchExpressions: [{key: feature.node.kubernetes.io/pci-0302_10de.present, operator: In, values: ["true"]}, {key: nvidia.com/gpu.deploy.operator-validator, operator: NotIn, values: [paused-for-driver-upgrade]}]
    - matchExpressions: [{key: cloud.google.com/gke-accelerator, operator: Exists}, {key: nvidia.com/gpu.deploy.operator-validator, operator: NotIn, values: [paused-for-driver-upgrade]}]
    - matchExpressions: [{key: kubernetes.azure.com/accelerator, operator: In, values: [nvidia]}, {key: nvidia.com/gpu.deploy.operator-validator, operator: NotIn, values: [paused-for-driver-upgrade]}]
{{- end }}

{{- /* The nodes of the pods of the DaemonSet and of helm test. A nodeAffinity of the values comes in the place of the default one. */}}
{{- define "nvshare.nodes" -}}
{{- with .Values.nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- $affinity := .Values.affinity | default dict }}
{{- if and .Values.gpuNodesOnly (not (hasKey $affinity "nodeAffinity")) }}
{{- $affinity = merge (include "nvshare.gpuNodes" . | fromYaml) $affinity }}
{{- end }}
{{- with $affinity }}
affinity: {{ toJson . }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- end }}

{{- /* Fails where the cluster lacks what a value needs; the argument: root, the value's name, the version from which on a cluster has it, and a hint. */}}
{{- define "nvshare.needs" -}}
{{- $root := index . 0 }}
{{- if semverCompare (printf "<%s-0" (index . 2)) $root.Capabilities.KubeVersion.Version }}
{{- fail (printf "%s needs Kubernetes %s, and the cluster has %s%s (helm template: give --kube-version)" (index . 1) (index . 2) $root.Capabilities.KubeVersion.Version (index . 3)) }}
{{- end }}
{{- end }}

{{- /* Whether to make the Prometheus operator's objects: not in a cluster that lacks their kinds, which would refuse the release. helm template asks no cluster, and makes them. */}}
{{- define "nvshare.monitors" -}}
{{- if or (.Capabilities.APIVersions.Has "monitoring.coreos.com/v1") (not (lookup "v1" "Namespace" "" "kube-system")) }}true{{ end }}
{{- end }}

{{- /* What a PodMonitor or ServiceMonitor asks for. */}}
{{- define "nvshare.endpoints" -}}
{{- range ternary (list "metrics" "metrics-dra") (list "metrics") .Values.dra.enabled }}
- port: {{ . }}
  {{- with $.Values.metrics.interval }}
  interval: {{ . }}
  {{- end }}
  honorLabels: true
  relabelings:
  - sourceLabels: [__meta_kubernetes_pod_node_name]
    targetLabel: node
{{- end }}
{{- end }}

{{- /* An object of kustomize's, of this release and its namespace; the argument: root, and the file in objects. <name> is in no namespace, so nothing is replaced twice. */}}
{{- define "nvshare.object" -}}
{{- $root := index . 0 }}{{ $name := include "nvshare.name" $root }}
{{- $text := $root.Files.Get (printf "objects/%s" (index . 1)) | replace "nvshare-system:nvshare" "nvshare-system:<name>" | replace "nvshare-system" $root.Release.Namespace | replace "<name>" $name }}
{{- regexReplaceAll "(?m)^( *(?:name|policyName): )nvshare(-[a-z-]+)?$" $text (printf "${1}%s${2}" $name) }}
{{- end }}

{{- /* What the policy host-paths refuses besides, where paths are not the default ones. */}}
{{- define "nvshare.otherPaths" -}}
{{- range without (list .Values.paths.lib .Values.paths.run) "/var/lib/nvshare" "/run/nvshare" }}
  - expression: >-
      object.spec.volumes.all(v, !has(v.hostPath) || !v.hostPath.path.matches(
      '^{{ . | replace "." "[.]" | replace "/" "(/+[.])*/+" | replace "/+run(" "/+(var(/+[.])*/+)?run(" }}(/|$)'))
    message: A hostPath to {{ . }} would make the pod root on the node.
    reason: Forbidden
{{- end }}
{{- end }}
