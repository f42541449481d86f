"""Evaluate the small model of a real engine, with and without a sandbox: `make evaluate-engine`.

The commands of `sandbox-eval` run as processes against a proxy in front of the model server. The
model is far too small for the problems: the report shows that all parts work together, and nothing
about the paper. Where answers need a judge, the same model judges them.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import anyio

from bench.servers import ROOT
from evaluation.paper_suites import PAPER_SUITES
from tests.clients.locked_packages import MissingError, make_import_folder
from tests.clients.stacks.environments import KEPT
from tests.engines.engine import MODEL, REQUEST_TIMEOUT_S
from tests.engines.installation import NotInstalledError
from tests.engines.servers import ENGINE, model_server, proxy, tools_always
from tests.evaluation.grader_packages import LOCK

WINDOW = 4096
"""Context window of a request in tokens. A longer prompt takes minutes on a processor."""
SLOTS = 2
MAX_TURNS, MAX_TOKENS = 3, 200
PAPER_PROFILE = "paper-long-context"
"""The proxy's default profile for data sets of the paper. It is the widest of their profiles, so
requests may select all of them."""
NO_ANSWER = 3
"""The exit code if there were infrastructure errors, or answers without a verdict of the judge. The
report lists them."""
COMMAND = (sys.executable, "-m", "evaluation")


async def evaluate(output: Path, suites: Sequence[str], limit: int) -> None:
    """Evaluate the model with `limit` problems of each domain, and write the report into a
    directory. Raises NotInstalledError, MissingError if the packages with the data sets cannot be
    installed, and CalledProcessError if a command fails."""
    ENGINE.find()
    data = output / "data"
    is_paper = bool(PAPER_SUITES.keys() & set(suites))
    profile = {"profile": PAPER_PROFILE} if is_paper else {}
    packages = [make_import_folder(KEPT / "python-graders", LOCK)] if is_paper else []
    run = partial(_run, packages)
    await run("prepare", *suites, "--data", str(data))
    async with (
        model_server(tools=ENGINE.with_tools, window=WINDOW, slots=SLOTS) as server,
        proxy(server.url, **tools_always(), **profile) as ours,
    ):
        await run(
            *("run", "--output", str(output), "--data", str(data), "--suites", *suites),
            *("--base-url", ours.base_url, "--models", MODEL),
            *("--limit", str(limit), "--repeats", "1"),
            *("--concurrency", str(SLOTS), "--seed", "0", "--timeout-s", str(REQUEST_TIMEOUT_S)),
            *("--request", json.dumps({"temperature": 0.7, "max_tokens": MAX_TOKENS})),
            *("--sandbox", json.dumps({"limits": {"max_turns": MAX_TURNS}})),
            codes=(0, NO_ANSWER),
        )
        judge = ("--judge-model", MODEL, "--judge-base-url", f"{server.url}/v1")
        await run("report", str(output), *judge, codes=(0, NO_ANSWER))


async def _run(packages: Sequence[Path], *arguments: str, codes: Sequence[int] = (0,)) -> None:
    """Run a command of `sandbox-eval` with the packages in the folders `packages`. Raises
    CalledProcessError for another exit code."""
    command = [*COMMAND, *arguments]
    path = os.pathsep.join(map(str, (ROOT, *packages)))
    environment = {**os.environ, "PYTHONPATH": path}
    ended = await anyio.run_process(command, stdout=None, stderr=None, check=False, env=environment)
    if ended.returncode not in codes:
        raise subprocess.CalledProcessError(ended.returncode, command)


def main() -> int:
    parser = argparse.ArgumentParser(description="Evaluate the small model of a real engine.")
    parser.add_argument("--output", type=Path, required=True, help="new directory of the results")
    parser.add_argument("--suites", nargs="+", default=["synthetic", "reasoning-gym"])
    parser.add_argument("--limit", type=int, default=3, help="problems of each domain")
    options = parser.parse_args()
    try:
        anyio.run(evaluate, options.output, options.suites, options.limit)
    except subprocess.CalledProcessError as error:
        return error.returncode
    except (MissingError, NotInstalledError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
