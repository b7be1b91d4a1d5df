"""The command about generating text."""
