"""Everything learned: encoder, heads, acquisition, evaluation, snapshots."""
