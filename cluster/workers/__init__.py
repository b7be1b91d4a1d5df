"""Who measures for a campaign: which workers there are, and which of them may."""
