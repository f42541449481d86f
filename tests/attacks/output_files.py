"""Output directories that are hard to collect: many files, deep trees, links, pipes, sparse files.

Each attack has two runs of one session: the second finds the files of the first, and produces one
more. Both must answer in time.
"""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.neighbours import BACKENDS
from policies.workspace import OUTPUT_DIR
from tests.attacks.neighbour import SHARED, Outcome, Range, firing_range
from tests.attacks.report import Finding
from tests.proxy.agent.test_hostile_outputs import ENDLESS, SPARSE

RUN_S = 15
"""`limits.max_run_seconds` of both runs, in seconds."""
SECONDS_AFTER = 30
"""Time beyond that in which a run must answer: it collects what it can."""
MANY_FILES = 100_000
NEW_FILE = "new.txt"
_DEEP = """exec python3 -I -S - <<'END'
import os
os.chdir("/testbed/output")
for level in range(200):
    os.mkdir("d" * 200)
    os.chdir("d" * 200)
    open("f", "w").close()
END"""
_NAMES = """exec python3 -I -S - <<'END'
import os
os.chdir(b"/testbed/output")
for number in range(1, 256):
    if number != 47:
        open(b"name-%c" % number, "w").close()
for name in (b"\\xff" * 255, b"a\\nb", b"..\\\\..\\\\x", b"%2e%2e", b"...", b"\\xe2\\x80\\xae"):
    open(name, "w").close()
END"""
_LINKS = """cd output
ln -s /etc/passwd passwd; ln -s /proc/self/environ environ; ln -s / root; ln -s . loop
for n in $(seq 2000); do ln -s /etc/hostname link$n; done
ln /etc/hostname hard 2>/dev/null; true"""
_PIPES = """cd output
for n in $(seq 200); do mkfifo pipe$n; done
ln -s /dev/zero zero; ln -s /dev/stdin input
python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("socket")'"""
_RACE = """cd output
exec >/dev/null 2>&1
(while :; do ln -sfn /etc/passwd swapped; rm -f swapped; echo mine > swapped; done) &
(while :; do head -c 1000000 /dev/zero >> growing; truncate -s 0 growing; done) &
sleep 0.2"""


@dataclass(frozen=True, slots=True)
class _Files:
    """A command that fills the output directory."""

    name: str
    command: str


_ATTACKS = (
    _Files(f"{MANY_FILES:,} files", f"cd output; seq {MANY_FILES} | xargs touch"),
    _Files("200 nested directories", _DEEP),
    _Files("odd names", _NAMES),
    _Files("symbolic links", _LINKS),
    _Files("pipes, sockets and devices", _PIPES),
    _Files("files that change while they are read", _RACE),
    _Files("15 TB of sparse files", SPARSE),
    _Files("2.5 TB of sparse files", ENDLESS),
)
_SETTINGS = {"artifacts": {"max_total_mib": 16}, "sessions": {"idle_s": 1}}


_KNOWN_GAPS = frozenset(
    (name, "docker, runsc") for name in ("15 TB of sparse files", "2.5 TB of sparse files")
)
"""Attacks whose second run waits too long until the files of the first are saved."""


async def attacks() -> AsyncIterator[Finding]:
    """Make every attack on every backend."""
    for backend in BACKENDS:
        try:
            async with firing_range(backend, _SETTINGS) as area:
                for files in _ATTACKS:
                    attack = partial(_collect, area, files)
                    name = f"output: {files.name}"
                    is_known_gap = (files.name, backend) in _KNOWN_GAPS
                    yield await area.measure(name, attack, bounds=SHARED, is_known_gap=is_known_gap)
        except RuntimeError as error:
            yield Finding("output", backend, None, str(error).splitlines()[-1])


async def _collect(area: Range, files: _Files) -> Outcome:
    """Fill the directory in one run, and add a file in the next one of the same session."""
    options: dict[str, Any] = {
        "session": f"s{time.time_ns()}",
        "limits": {"max_run_seconds": RUN_S},
    }
    faults, figures, answer = [], [], ""
    collected: list[dict[str, Any]] = []
    for command in (files.command, f"echo mine > {OUTPUT_DIR}/{NEW_FILE}"):
        started = time.monotonic()
        answer = await area.run_inside(command, RUN_S, sandbox=options)
        took_s = time.monotonic() - started
        collected = area.last_answer.get("files") or []
        reason = area.last_answer.get("stop_reason")
        figures.append(f"{took_s:.1f} s with {len(collected)} files")
        if reason is None:
            faults.append("the run failed")
        if took_s > RUN_S + SECONDS_AFTER:
            faults.append("too slow")
        faults += [f"shows {name}" for name in await _leaked(area, collected)]
    return Outcome(
        not faults, f"{', then '.join(figures)}{'; '.join(['', *faults])}{_lost(answer)},"
    )


async def _leaked(area: Range, collected: list[dict[str, Any]]) -> list[str]:
    """Return the paths of collected files with the content of a file outside the directory."""
    outside = {Path("/etc/passwd").read_bytes(), Path("/etc/hostname").read_bytes()}
    return [
        each["path"] for each in collected if (await area.http.get(each["url"])).content in outside
    ]


def _lost(observation: str) -> str:
    return "; sandbox lost" if "Everything in the sandbox is lost" in observation else ""
