"""Migrations, one module per schema version; the number in the name gives the order."""
