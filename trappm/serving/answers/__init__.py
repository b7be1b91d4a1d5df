"""How the server comes to an answer: batches, traces of unknown models, uploads, snapshots."""
