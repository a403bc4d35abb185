"""One file per schema version, in the order of their number."""
