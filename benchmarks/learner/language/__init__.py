"""Language models as published sheets trained them: their rows, modules, and what is predicted."""
