"""Whole runs of the reference package, in one process for each concurrent run."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.instant_model import ANSWER
from bench.runtimes import PEER_ENV, REFERENCE_PACKAGES
from bench.servers import BenchServer, run_process
from bench.venvs import peer_python

DRIVER = Path(__file__).parent / "peers" / "reference.py"
TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class ReferenceProcess:
    """A process with the reference package. Its imports are done before the measured time."""

    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader

    async def run(self) -> tuple[float, float]:
        """Run the script. Return the seconds until the answer, and the seconds until the container
        is also removed. Raises RuntimeError if the process ends or the answer is wrong."""
        self.stdin.write(b"\n")
        async with asyncio.timeout(TIMEOUT_S):
            line = await self.stdout.readline()
        if not line:
            raise RuntimeError("the reference's process ended")
        run = json.loads(line)
        if run["answer"] != ANSWER:
            raise RuntimeError(f"the reference answered {run!r}")
        to_answer_s = float(run["to_answer_s"])
        return to_answer_s, to_answer_s + float(run["removal_s"])


@asynccontextmanager
async def reference_process(
    model: BenchServer, script: str, image: str
) -> AsyncIterator[ReferenceProcess]:
    """Run a process of the reference during the block. `script` is the name of a script, which is
    also the name of the model that plays it. Raises PeerMissingError if the reference cannot be
    installed."""
    python = await asyncio.to_thread(peer_python, "reference", *REFERENCE_PACKAGES)
    async with run_process(
        [str(python), str(DRIVER), model.base_url, script, image],
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=PEER_ENV,
    ) as driver:
        assert driver.stdin
        assert driver.stdout
        yield ReferenceProcess(driver.stdin, driver.stdout)
