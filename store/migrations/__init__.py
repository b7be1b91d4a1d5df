"""Revisions of the schema, which Alembic runs; `store.migrate` starts it."""
