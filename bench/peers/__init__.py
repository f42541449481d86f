"""Programs that run the measured peers, each in its own process."""
