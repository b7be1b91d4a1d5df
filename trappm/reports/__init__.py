"""Reports of campaigns, pools and labels as plain values."""
