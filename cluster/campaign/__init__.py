"""A campaign, from its process to its published snapshot.

To read from top to bottom: `actor` is the Ray actor of a campaign, and `process` its ownership of
the campaign, as the label store shows it to others. `campaign` is its loop, and `rules` say what
comes next. `planner` draws and chooses assignments, `workers` are their tasks and checks, and
`profiler_pool` measures. `training` is what the learner gets and reports, `learner` learns, and
`learner_handle` calls it as an actor.
"""
