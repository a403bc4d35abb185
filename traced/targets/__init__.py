"""Target environments: where better behaviour is wanted."""
