"""Questions about labels: filters, tables, SQL."""
