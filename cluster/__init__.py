"""Labelling campaigns on Ray: what is measured where, learned and chosen.

To read from top to bottom: `launch` starts a campaign, `campaign.actor` is its process,
`campaign.campaign` its loop, and `campaign.next_job` the rule that says what comes next.
`actors.profiler_pool` measures, `actors.learner` learns (`learning.campaign_learner`), `profiles`
traces the steps of the pool, and `ray_runtime` starts Ray and places actors on nodes.
"""
