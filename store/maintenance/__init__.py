"""Keeping a store whole: checks, repairs, backups, upgrades."""
