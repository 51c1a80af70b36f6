{{/* Where distributions keep things, over what is usual. Each row is what differs. */}}
{{- define "nobypass.platforms" -}}
usual:
  cniConfDir: /etc/cni/net.d
  cniBinDir: /opt/cni/bin
  runtimeDir: /run/containerd
  runtimeSocket: containerd.sock
  cgroup: /sys/fs/cgroup
  cgroupLevel: ""
  seLinuxOptions: {type: spc_t}
  resourceQuota: false
generic: {}
eks: {}
aks: {}
talos: {}
# A node is a container: what it mounts as its cgroup hierarchy begins two levels down.
kind: {cgroupLevel: 2}
k3s:
  cniConfDir: /var/lib/rancher/k3s/agent/etc/cni/net.d
  cniBinDir: /var/lib/rancher/k3s/data/cni
  runtimeDir: /run/k3s/containerd
gke: {cniBinDir: /home/kubernetes/bin, resourceQuota: true}
bottlerocket: {seLinuxOptions: {user: system_u, role: system_r, type: super_t, level: s0}}
microk8s:
  cniConfDir: /var/snap/microk8s/current/args/cni-network
  cniBinDir: /var/snap/microk8s/current/opt/cni/bin
  runtimeDir: /var/snap/microk8s/common/run
openshift:
  cniConfDir: /etc/cni/multus/net.d
  cniBinDir: /var/lib/cni/bin
  runtimeDir: /run/crio
  runtimeSocket: crio.sock
{{- end -}}

{{/* The paths in effect, as YAML. */}}
{{- define "nobypass.paths" -}}
{{- $platforms := include "nobypass.platforms" . | fromYaml -}}
{{- $paths := merge (deepCopy (get $platforms .Values.platform)) $platforms.usual -}}
{{- range $name, $value := .Values.paths -}}
{{- if ne (toString $value) "" -}}{{- $_ := set $paths $name $value -}}{{- end -}}
{{- end -}}
{{- $paths | toYaml -}}
{{- end -}}
