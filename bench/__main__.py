"""The command `python -m bench [PART ...] [options]`: measure and print one table."""

import argparse
import asyncio
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from datetime import UTC, datetime
from pathlib import Path

from bench import (
    acquire,
    capture,
    cluster,
    commands,
    cycles,
    density,
    documents,
    evaluation,
    files,
    first_token,
    imports,
    loop,
    memory,
    neighbours,
    owner,
    pods,
    refill,
    relay,
    run3,
    runs,
)
from bench.plan import SIMULATED_MODEL_S, SIMULATED_SANDBOXES, Plan
from bench.table import TablePart, render
from proxy.config import DockerConfig

PARTS: Mapping[str, Callable[[Plan], Coroutine[None, None, list[TablePart]]]] = {
    "acquire": acquire.measure,
    "commands": commands.measure,
    "files": files.measure,
    "memory": memory.measure,
    "refill": refill.measure,
    "owner": owner.measure,
    "cycles": cycles.measure,
    "density": density.measure,
    "run3": run3.measure,
    "loop": loop.measure,
    "runs": runs.measure,
    "relay": relay.measure,
    "imports": imports.measure,
    "documents": documents.measure,
    "typing": first_token.measure,
    "neighbours": neighbours.measure,
    "evaluation": evaluation.measure,
    "capture": capture.measure,
    "pods": pods.measure,
    "cluster": cluster.measure,
}


def main() -> int:
    """Measure and print the table. Return the exit code."""
    arguments = _parser().parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        _parser().error(f"no such part: {', '.join(sorted(unknown))}")
    docker_sandboxes, bubblewrap_sandboxes = arguments.density
    plan = Plan(
        image=arguments.image,
        rounds=arguments.rounds,
        allows_peers=not arguments.no_peers,
        docker_sandboxes=docker_sandboxes,
        bubblewrap_sandboxes=bubblewrap_sandboxes,
        kubeconfig=arguments.kubeconfig,
        simulated_sandboxes=arguments.simulated_sandboxes,
        simulated_model_s=arguments.simulated_model_s,
    )
    # SIGTERM raises KeyboardInterrupt too, or peers' containers would remain.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started, took, measured = _machine_state(), [], []
    for name in arguments.parts or PARTS:
        began = time.monotonic()
        measured += asyncio.run(PARTS[name](plan))
        took.append(f"{name} {time.monotonic() - began:.0f} s")
    sys.stdout.write(f"before: {started}\nafter:  {_machine_state()}\nimage:  {plan.image}\n")
    sys.stdout.write(f"parts:  {', '.join(took)}\n\n{render(measured)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"one of {', '.join(PARTS)}; default: all"
    )
    parser.add_argument(
        "--rounds", type=int, help="number of measurements of each quantity, and of cycles"
    )
    parser.add_argument(
        "--image",
        default=DockerConfig().image,
        help="Docker image of this project and of every peer",
    )
    parser.add_argument(
        "--density",
        nargs=2,
        type=int,
        metavar=("DOCKER", "BUBBLEWRAP"),
        default=(200, 500),
        help="number of concurrent sandboxes",
    )
    parser.add_argument(
        "--kubeconfig", type=Path, help="the cluster of `pods`, whose nodes have the images"
    )
    parser.add_argument(
        "--simulated-sandboxes",
        type=int,
        default=SIMULATED_SANDBOXES,
        help="sandboxes of the largest cluster that `cluster` simulates; default: %(default)s",
    )
    parser.add_argument(
        "--simulated-model-s",
        type=float,
        default=SIMULATED_MODEL_S,
        help="seconds that a model call takes there; default: %(default)s",
    )
    parser.add_argument("--no-peers", action="store_true", help="measure no other packages")
    return parser


def _machine_state() -> str:
    load = " ".join(f"{average:.1f}" for average in os.getloadavg())
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    kernel, python = platform.release(), platform.python_version()
    return f"{now}, {os.cpu_count()} cores, load {load}, Linux {kernel}, Python {python}"


if __name__ == "__main__":
    sys.exit(main())
