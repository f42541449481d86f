"""Builds the agent and its parts by gcc with sanitizers, which end a program at the first fault."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import sandbox_runtime

SOURCES = Path(sandbox_runtime.__file__).parent / "guest/native"
PARTS = Path(__file__).with_name("parts.c")
FLAGS = (
    *("-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1", "-g"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
)
ENV = {"ASAN_OPTIONS": "detect_leaks=0"}
"""The agent exits without freeing memory, so leak detection is off."""


def build_agent(directory: Path) -> Path:
    """Build the agent. Skips the test without gcc."""
    return _build(directory / "agent", sorted(SOURCES.glob("*.c")))


def build_parts(directory: Path) -> Path:
    """Build parts.c. Skips the test without gcc."""
    names = ("capture", "frames", "json", "memory", "packets")
    return _build(directory / "parts", [PARTS, *(SOURCES / f"{name}.c" for name in names)])


class BuiltPart:
    """A part of the agent that reads untrusted input, as a process of its own."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def shown(self, case: bytes) -> str:
        """Return the line that the part prints for a case."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(block(case))
        self._process.stdin.flush()
        line = self._process.stdout.readline().decode()
        assert line.endswith("\n"), f"it ended with {self._process.wait()}"
        return line.removesuffix("\n")


@contextmanager
def part(program: Path, name: str) -> Iterator[BuiltPart]:
    """Run one of the parts that `build_parts` has built."""
    pipe = subprocess.PIPE
    with subprocess.Popen([program, name], stdin=pipe, stdout=pipe, env=ENV) as process:
        yield BuiltPart(process)
        process.communicate()
        assert process.returncode == 0


def block(data: bytes) -> bytes:
    """Return the data with its length before it."""
    return len(data).to_bytes(4, "big") + data


def _build(target: Path, sources: list[Path]) -> Path:
    if not shutil.which("gcc"):
        pytest.skip("there is no gcc")
    words = ("gcc", *FLAGS, f"-I{SOURCES}", "-o", str(target), *map(str, sources))
    subprocess.run(words, check=True)
    return target
