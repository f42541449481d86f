"""Attempts that run inside a sandbox. Every public function of these modules tries one thing, as
harmlessly as it can: it returns what it found open, and None or an OSError where a wall held.

Standard library only, and Python 3.8 at run time.
"""
