"""Alembic migrations of the store; ``store.schema.migrate`` runs them."""
