"""What a model is and what a step of it costs; no other room of ours is imported here.

`records` are the types that all rooms share. The static profile (`static_profile`, `graphs`,
`onnx_files`, `simulation`) is made without running a model; the dynamic profile (`measuring`,
`steps`, `devices`) is measured in a process of its own. Nothing here needs Ray or a database.
"""
