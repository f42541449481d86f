"""Measures the house beside its peers: `python -m bench`."""
