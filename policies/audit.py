"""Whether what a run does is written down, and how firmly."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Audit:
    """The log of a run."""

    enabled: bool = False
    required: bool = True
    """Whether a run fails that cannot be written down."""
