"""Reading files that anyone may have written, and writing files that are whole or not there."""
