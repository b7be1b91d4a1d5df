"""One file per revision, named by its number; it imports nothing that may change later."""
