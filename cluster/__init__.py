"""Labelling campaigns: what is measured where, learned and chosen, on Ray actors.

`campaign` has the file and the loop, `scheduler` the state machine that decides what happens next,
`workers` what the loop asks of whoever measures, `learning` the learner, `profiles` the static and
kernel profiles of a pool, `actors` all of it on Ray, which `runtime` starts.
"""
