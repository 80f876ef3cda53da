"""Manifests for Kubernetes: Helm, kustomize, KubeRay."""
