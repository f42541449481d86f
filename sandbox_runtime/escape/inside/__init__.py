"""Attempts that run inside a sandbox. Every public function of these modules, except those of
`attempt` and `batch`, tries one thing as harmlessly as it can. It returns a text if it found
something open, returns None or raises OSError if the boundary held, and raises NotApplicableError
if it cannot be tried.

The modules use only the standard library and must run on Python 3.8.
"""
