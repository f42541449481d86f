"""What can be wrong with the state on disk."""


class StoreError(Exception):
    """The state on disk cannot be used."""
