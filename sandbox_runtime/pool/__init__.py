"""Sandboxes kept ready, each lent once."""
