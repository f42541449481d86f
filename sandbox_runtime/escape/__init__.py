"""Attempts to break out of a sandbox, and what they found."""
