"""Board: one static page with measured against predicted for the rows that may be shown."""
