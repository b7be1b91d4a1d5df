"""What campaigns, pools and labels amount to, as plain values."""
