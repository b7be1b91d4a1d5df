"""Runs revisions on the connection of `store.migrate`, within its transaction."""

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
