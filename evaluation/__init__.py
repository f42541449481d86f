"""Compares a model with and without a sandbox, as a client of the proxy: `python -m evaluation`.

The package reads and writes files and speaks HTTP. It imports no other package of the project.
"""
