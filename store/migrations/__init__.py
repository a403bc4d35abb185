"""Alembic migrations of the store; ``store.database.migrate`` runs them."""
