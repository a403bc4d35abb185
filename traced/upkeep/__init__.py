"""Keeping a data directory in order: backup and restore, schema upgrades, retention, what a crash left behind."""
