"""The native agent and its parts as gcc builds them for tests: they end at the first fault."""

import shutil
import subprocess
from pathlib import Path

import pytest

import sandbox_runtime

SOURCES = Path(sandbox_runtime.__file__).parent / "guest/native"
PARTS = Path(__file__).with_name("native_parts.c")
FLAGS = (
    *("-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1", "-g"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
)
ENV = {"ASAN_OPTIONS": "detect_leaks=0"}
"""Commands are killed and the agent ends without tidying up: what is left then is no leak."""


def build_agent(directory: Path) -> Path:
    """The whole agent. Skips the test where there is no gcc."""
    return _build(directory / "agent", sorted(SOURCES.glob("*.c")))


def build_parts(directory: Path) -> Path:
    """The parts that take what comes from outside. Skips the test where there is no gcc."""
    names = ("capture", "frames", "json", "memory")
    return _build(directory / "parts", [PARTS, *(SOURCES / f"{name}.c" for name in names)])


def _build(target: Path, sources: list[Path]) -> Path:
    if not shutil.which("gcc"):
        pytest.skip("there is no gcc")
    words = ("gcc", *FLAGS, f"-I{SOURCES}", "-o", str(target), *map(str, sources))
    subprocess.run(words, check=True)
    return target
