"""Backends start guest agents in isolation: in Docker containers, bubblewrap sandboxes or
Kubernetes Pods."""
