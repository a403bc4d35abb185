"""What the router costs, beside others."""
