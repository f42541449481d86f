"""What runs do, written down so that a change of it shows."""
