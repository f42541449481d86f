"""The command: `python -m bench [PART ...] [options]` prints one table; nothing is asserted."""

import argparse
import asyncio
import os
import platform
import sys
from collections.abc import Callable, Coroutine, Mapping
from datetime import UTC, datetime

from bench import commands, imports, relay, run3, starts
from bench.plan import Plan
from bench.table import Part, render
from proxy.config import DockerConfig

PARTS: Mapping[str, Callable[[Plan], Coroutine[None, None, list[Part]]]] = {
    "commands": commands.measure,
    "starts": starts.measure,
    "run3": run3.measure,
    "relay": relay.measure,
    "imports": imports.measure,
}


def main() -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all"
    )
    parser.add_argument("--rounds", type=int, help="how often each thing is measured")
    parser.add_argument("--image", default=DockerConfig().image, help="for us and for every peer")
    parser.add_argument("--no-reference", action="store_true", help="leave llm-in-sandbox out")
    parser.add_argument("--litellm", action="store_true", help="measure the LiteLLM proxy too")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    plan = Plan(
        image=arguments.image,
        rounds=arguments.rounds,
        reference=not arguments.no_reference,
        litellm=arguments.litellm,
    )
    started = _machine()
    names = arguments.parts or PARTS
    measured = [part for name in names for part in asyncio.run(PARTS[name](plan))]
    sys.stdout.write(f"before: {started}\nafter:  {_machine()}\nimage:  {plan.image}\n\n")
    sys.stdout.write(render(measured))
    return 0


def _machine() -> str:
    load = " ".join(f"{average:.1f}" for average in os.getloadavg())
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    kernel, python = platform.release(), platform.python_version()
    return f"{now}, {os.cpu_count()} cores, load {load}, Linux {kernel}, Python {python}"


if __name__ == "__main__":
    sys.exit(main())
