"""Golden database dumps; ``python -m tests.unit.store.golden`` writes that of the newest schema."""
