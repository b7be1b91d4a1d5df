"""What priors leave, learned: a Gaussian process and boosted trees as one model."""
