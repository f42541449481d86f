"""What a run of the benchmark is to measure, and the loop that measures peers in turn."""

import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

Way = Callable[[], Awaitable[Mapping[str, float]]]
"""Does the work once; returns what it measured, by the names of rows."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The options of the command line."""

    image: str
    """The Docker image for us and for every peer."""
    rounds: int | None = None
    """How often each thing is measured; None: each part's own number."""
    peers: bool = True
    """Whether peers' packages may be installed and run."""
    docker_at_once: int = 200
    """Sandboxes that `density` has up together on Docker."""
    bubblewrap_at_once: int = 500
    """The same on bubblewrap, beside them."""


async def interleave(rounds: int, ways: Mapping[str, Way]) -> dict[str, list[float]]:
    """Do everything once a round, so that peers meet the same moments of the machine.

    A first round warms up and does not count.
    """
    measured: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for way in ways.values():
            for row, value in (await way()).items():
                measured.setdefault(row, []).extend([value] if number else [])
        progress(f"round {number} of {rounds}: {', '.join(measured)}")
    progress("")
    return measured


def repeated(times: int, ways: Mapping[str, Way]) -> dict[str, Way]:
    """The same so many times a round, for what is quick beside slow peers."""
    return {f"{name} {number}": way for number in range(times) for name, way in ways.items()}


async def milliseconds(work: Awaitable[object]) -> float:
    """How long it takes."""
    started = time.perf_counter()
    await work
    return (time.perf_counter() - started) * 1000


def progress(text: str) -> None:
    """Say where we are, where somebody is looking."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text[:100]}")
        sys.stderr.flush()
