"""The database: engine, tables, retries, and the way from older schemas to this one."""
