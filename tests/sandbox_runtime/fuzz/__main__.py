"""Fuzz the agent: python -m tests.sandbox_runtime.fuzz SECONDS

Runs every target from its kept corpus for so many seconds, as many at once as there are cores, and
returns 1 where one finds an input that breaks the agent. What is new stays in build/fuzz, for the
next run. If a needed program is missing, returns 0, or 1 with the environment variable
REQUIRE_FUZZ.
"""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.sandbox_runtime.fuzz.building import CORPUS, TARGETS, build, missing, sandboxed

WORK = Path("build/fuzz").resolve()
LIMITS = ("-max_len=4096", "-rss_limit_mb=1024", "-timeout=10")
_DONE = re.compile(r"#(\d+)\s+DONE\s+cov: (\d+)")


def main(seconds: int) -> int:
    if lacking := missing(fuzzer=True):
        print(f"left out: fuzzing the agent, for {lacking} is not installed")  # noqa: T201 - a tool
        return 1 if os.environ.get("REQUIRE_FUZZ") else 0
    (WORK / "bin").mkdir(parents=True, exist_ok=True)
    build(WORK / "bin", fuzzer=True)
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        found = list(workers.map(partial(_fuzz, seconds), TARGETS))
    return 1 if any(found) else 0


def _fuzz(seconds: int, target: str) -> bool:
    """Run a target; return True if it has found a fault. A fuzzer that ends early without an input
    has found none, so it is started once more."""
    found = WORK / "found"
    for attempt in (1, 2):
        ran = _run(seconds, target, found)
        done = _DONE.search(ran.stderr)
        if ran.returncode == 0 and done:
            print(f"{target}: {done[1]} inputs in {seconds} s, {done[2]} branches")  # noqa: T201 - a tool
            return False
        inputs = sorted(path.name for path in found.glob(f"{target}-*"))
        ended = f"ended with exit code {ran.returncode}, its inputs in {found} are {inputs}"
        print(f"{ran.stderr[-4000:]}\n{target}, attempt {attempt}: {ended}")  # noqa: T201 - a tool
        if inputs:
            break
    return True


def _run(seconds: int, target: str, found: Path) -> subprocess.CompletedProcess[str]:
    written = {"new": WORK / target, "found": found}
    for directory in written.values():
        directory.mkdir(exist_ok=True)
    sandbox = sandboxed(WORK / "bin", shown={"kept": CORPUS / target}, written=written)
    flags = (*LIMITS, f"-max_total_time={seconds}", f"-artifact_prefix=/fuzz/found/{target}-")
    return subprocess.run(
        (*sandbox, f"/fuzz/bin/{target}", *flags, "/fuzz/new", "/fuzz/kept"),
        capture_output=True,
        check=False,
        text=True,
        errors="replace",
    )


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
