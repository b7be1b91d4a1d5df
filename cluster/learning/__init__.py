"""The learner's side of a campaign: encode the pool, train heads, choose, publish."""
