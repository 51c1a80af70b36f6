{{/* What each feature that is switched on asks of the API server, and nothing more. */}}
{{- define "nobypass.rules" -}}
{{- if ne .Values.agent.pods "cri" }}
pods:
  why: This node's pods, and the labels of their namespaces.
  rules:
    - apiGroups: [""]
      resources: [pods, namespaces]
      verbs: [list, watch]
{{- end }}
{{- $gate := .Values.gate }}
{{- $nodes := or $gate.condition $gate.label $gate.startupTaints }}
{{- if or $nodes $gate.pods }}
{{- if eq .Values.agent.pods "cri" }}{{ fail "gate: needs the API server: agent.pods must not be cri" }}{{ end }}
{{- if eq .Values.cni.mode "off" }}{{ fail "gate: needs the CNI half: cni.mode must not be off" }}{{ end }}
{{- end }}
{{- if and $gate.retaint (not $gate.startupTaints) }}{{ fail "gate.retaint: needs a key in gate.startupTaints" }}{{ end }}
{{- if and (ne .Values.remedies.repair "off") (eq .Values.cni.mode "off") }}{{ fail "remedies.repair: needs the CNI half: cni.mode must not be off" }}{{ end }}
{{- if ne .Values.agent.pods "cri" }}
{{- if eq .Values.remedies.event "on" }}
events:
  why: Events on bypassing pods and on the node.
  rules:
    - apiGroups: [events.k8s.io]
      resources: [events]
      verbs: [create, patch]
{{- end }}
{{- if eq .Values.remedies.label "on" }}
pod-label:
  why: The label on bypassing pods, which the agent can give without being allowed to change what they run.
  rules:
    - apiGroups: [""]
      resources: [pods/status]
      verbs: [patch]
{{- end }}
{{- if ne .Values.remedies.evict "off" }}
evict:
  why: Eviction of pods that bypass and could not be repaired. A pod is looked at once more before.
  rules:
    - apiGroups: [""]
      resources: [pods]
      verbs: [get]
    - apiGroups: [""]
      resources: [pods/eviction]
      verbs: [create]
{{- end }}
{{- end }}
{{- if $nodes }}
gate:
  why: This node's object, to see what it says.
  rules:
    - apiGroups: [""]
      resources: [nodes]
      verbs: [list, watch]
{{- end }}
{{- if $gate.condition }}
gate-condition:
  why: The condition on this node.
  rules:
    - apiGroups: [""]
      resources: [nodes/status]
      verbs: [patch]
{{- end }}
{{- if or $gate.label $gate.startupTaints }}
gate-node:
  why: The label and the start-up taints of this node.
  rules:
    - apiGroups: [""]
      resources: [nodes]
      verbs: [patch]
{{- end }}
{{- if eq .Values.cni.mode "install" }}
plugin:
  why: Linkerd's CNI plugin reads the pod that it sets up, its namespace and, for pods of its control plane, the Service `kubernetes`.
  rules:
    - apiGroups: [""]
      resources: [pods, namespaces, services]
      verbs: [get]
{{- end }}
{{- end -}}
