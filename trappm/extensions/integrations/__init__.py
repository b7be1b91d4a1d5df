"""Where people work: callbacks of trainers, requests for Ray and Kubernetes, SkyPilot."""
