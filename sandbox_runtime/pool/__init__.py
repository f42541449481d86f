"""The pool of sandboxes: each is leased once and then ended."""
