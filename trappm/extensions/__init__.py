"""Optional features; deleting the folder of a feature removes it.

The core finds extensions with `trappm.profiler.extensions`.
"""
