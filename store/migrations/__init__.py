"""How older databases get to the newest schema: Alembic's environment and its revisions."""
