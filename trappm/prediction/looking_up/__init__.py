"""`trappm.lookup`: what a step costs, from labels if there are any, predicted if not."""
