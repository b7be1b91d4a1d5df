"""Integrations: trainer callbacks, resource requests for Ray and Kubernetes, and SkyPilot."""
