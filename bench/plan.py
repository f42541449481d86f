"""The options of a benchmark run, and the loop that measures peers in turn."""

import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

SIMULATED_SANDBOXES, SIMULATED_MODEL_S = 300, 5.0
Measurement = Callable[[], Awaitable[Mapping[str, float]]]
"""A function that does the work once and returns the measured values by row name."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The options of the command line."""

    image: str
    """The Docker image of this project and of every peer."""
    rounds: int | None = None
    """Number of measurements of each quantity; None: the default of each part."""
    allows_peers: bool = True
    """True if peers' packages may be installed and run."""
    docker_sandboxes: int = 200
    """Number of concurrent Docker sandboxes in `density`."""
    bubblewrap_sandboxes: int = 500
    """Number of concurrent bubblewrap sandboxes in `density`."""
    kubeconfig: Path | None = None
    """The kubeconfig file of the cluster for `pods`; None: no cluster."""
    simulated_sandboxes: int = SIMULATED_SANDBOXES
    """Number of sandboxes of the largest cluster that `cluster` simulates."""
    simulated_model_s: float = SIMULATED_MODEL_S
    """Duration of each model call in the simulation of `cluster`, in seconds."""


async def interleave(
    rounds: int, measurements: Mapping[str, Measurement]
) -> dict[str, list[float]]:
    """Run each measurement once in each round, so that load on the machine affects all peers alike.
    Return the measured values by row name.

    The first round is a warm-up and does not count.
    """
    measured: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for measurement in measurements.values():
            for row, value in (await measurement()).items():
                measured.setdefault(row, []).extend([value] if number else [])
        show_progress(f"round {number} of {rounds}: {', '.join(measured)}")
    show_progress("")
    return measured


def repeat_measurements(
    times: int, measurements: Mapping[str, Measurement]
) -> dict[str, Measurement]:
    """Return each measurement `times` times, under numbered names."""
    return {
        f"{name} {number}": measurement
        for number in range(times)
        for name, measurement in measurements.items()
    }


async def measure_ms(work: Awaitable[object]) -> float:
    """Return the duration of the work in ms."""
    started = time.perf_counter()
    await work
    return (time.perf_counter() - started) * 1000


def show_progress(text: str) -> None:
    """Show the progress on a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text[:100]}")
        sys.stderr.flush()
