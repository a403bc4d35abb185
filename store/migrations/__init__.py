"""Alembic migrations of the store; ``store.database.open_store`` runs them."""
