"""The pool of sandboxes: each sandbox is leased once and then ended."""
