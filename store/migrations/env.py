"""Runs migrations on the connection that `store.migrate` hands over, inside its transaction."""

from alembic import context

from trappm.store.schema import METADATA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    transactional_ddl=True,
    render_as_batch=True,
)
context.run_migrations()
