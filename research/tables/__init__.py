"""Tables and figures of the documentation (`python -m research tables`)."""
