"""Facts and tables of campaigns, pools, labels and predictions, one module for each."""
