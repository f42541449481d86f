"""Attempts that run inside a sandbox. Every public function of these modules, except those of
`attempt` and `batch`, tries one thing as harmlessly as it can. It returns a text if it found
something open. If the boundary held, it returns None, raises OSError or is killed by the system
call filter. If the attempt cannot be made, it raises NotApplicableError, and a server refuses the
backend.

The modules use only the standard library and must run on Python 3.8.
"""
