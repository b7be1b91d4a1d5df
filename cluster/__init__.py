"""The campaign: its file, its loop, and the Ray actors that carry it out.

This is the only room that knows Ray. `spec` is what a user writes, `campaign` the loop that decides
what happens next, `crew` what the loop asks for, `actors` and `ray_crew` how Ray provides it.
"""
