{{/* What each feature that is switched on asks of the API server. A test removes each rule in turn and names what fails. */}}
{{- define "nobypass.rules" -}}
{{- if eq .Values.cni.mode "install" }}
plugin:
  why: The mesh's CNI plugin reads the pod that it sets up, with the agent's token.
  rules:
    - apiGroups: [""]
      resources: [pods, namespaces, nodes, services]
      verbs: [get, list, watch]
{{- end }}
{{- end -}}
