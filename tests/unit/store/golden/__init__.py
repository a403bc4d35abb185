"""Writes the golden database of the newest schema: ``python -m tests.unit.store.golden`` (once per new migration)."""
