"""What priors leave, learned: Gaussian process and boosted trees as one model."""
