"""Labelling campaigns on Ray: what is measured where, learned and chosen.

`launch` starts campaigns, `campaign` has the loop, `scheduler` the state machine that decides what
happens next, `learning` the learner, `profiles` traced steps of a pool, and `actors` the Ray
actors, which `ray_runtime` starts.
"""
