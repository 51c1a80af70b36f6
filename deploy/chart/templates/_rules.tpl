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
{{- if eq .Values.cni.mode "install" }}
plugin:
  why: The mesh's CNI plugin reads the pod that it sets up, with the agent's token.
  rules:
    - apiGroups: [""]
      resources: [pods, namespaces, nodes, services]
      verbs: [get, list, watch]
{{- end }}
{{- end -}}
