"""Places to put an agent: each only gives a byte stream to one, and a kill()."""
