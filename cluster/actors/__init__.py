"""What runs on Ray: the actors, and what stands for them in the campaign."""
