"""Integrations: callbacks of trainers, and pruning of Optuna's trials."""
