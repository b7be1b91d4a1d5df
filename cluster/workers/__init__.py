"""The workers of a campaign: interfaces, membership, the canary gate, fair shares."""
