"""Benchmarks of this project and its peers: `python -m bench`."""
