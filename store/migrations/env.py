"""Alembic environment: runs migrations on the connection of ``store.database.migrate``, inside its transaction."""

from alembic import context

from store.service_tables import METADATA


def run() -> None:
    """Run the migrations; the caller's transaction commits or rolls back."""
    connection = context.config.attributes["connection"]
    context.configure(connection=connection, target_metadata=METADATA, render_as_batch=True, compare_type=True)
    context.run_migrations()


run()
