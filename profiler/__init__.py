"""What a model is and what a step of it costs; no other room of ours is imported here.

`records` are the types that everybody speaks in. The static profile (`static`, `onnx_files.reader`,
`features`) makes a graph of a model without running it; the dynamic profile (`isolation`, `step`,
`devices`) measures a step in a process of its own. Nothing here needs Ray or a database.
"""
