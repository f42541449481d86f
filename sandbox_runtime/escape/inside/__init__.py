"""Attempts that run inside a sandbox. Every public function of these modules tries one thing, as
harmlessly as it can: it returns what it found open, or None or an OSError if the boundary held.

Standard library only, and Python 3.8 at run time.
"""
