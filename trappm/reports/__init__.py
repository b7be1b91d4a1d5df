"""Facts and tables of campaigns, pools, labels, kernels and predictions, one module for each."""
