"""Language models of published sheets: rows, modules and predictions."""
