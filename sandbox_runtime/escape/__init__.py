"""Attempts to escape from a sandbox, and their findings."""
