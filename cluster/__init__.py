"""Labelling campaigns on Ray: what is measured where, learned and chosen.

To read from top to bottom: `spec` is the campaign file, `launch` starts a campaign, and `campaign`
runs it (see there). `trace_tasks` traces the steps of a pool, and `ray_runtime` starts Ray and
places actors on nodes. `pool_file` builds pools that campaigns refer to by name.
"""
