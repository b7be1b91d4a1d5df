"""Replay of campaigns on recorded labels (`python -m research replay`)."""
