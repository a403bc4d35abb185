"""Where untrusted code runs. Copied into the container as it is, so it imports nothing."""
