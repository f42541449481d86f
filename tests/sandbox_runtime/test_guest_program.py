"""The program that runs inside: any image with an old Python must be able to run it."""

import ast
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import sandbox_runtime
from sandbox_runtime.errors import SandboxFileError
from sandbox_runtime.guest.bootstrap import COMMAND, GuestConfig, program
from tests.sandbox_runtime.conformance.backends import open_backend
from tests.sandbox_runtime.transfer import PLENTY_S, output, write

HOUSE = Path(sandbox_runtime.__file__).parent
SOURCES = [
    HOUSE / "protocol.py",
    *(HOUSE / "guest" / f"{name}.py" for name in ("agent", "commands", "files")),
]
OLDEST_PYTHON = (3, 8)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_the_program_is_written_in_an_old_python(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    ast.parse(text, feature_version=OLDEST_PYTHON)
    assert "from __future__ import annotations" in text


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_the_program_needs_the_standard_library_alone(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {
        n.name for node in ast.walk(tree) if isinstance(node, ast.Import) for n in node.names
    }
    tops = {str(module).partition(".")[0] for module in modules} - {"sandbox_runtime"}
    assert tops <= sys.stdlib_module_names


def test_the_program_says_how_long_it_is() -> None:
    sent = program(GuestConfig())
    assert int.from_bytes(sent[:4], "big") == len(sent) - 4
    assert max(len(word) for word in COMMAND) < 300  # it shows in the model's `ps`


async def test_a_deep_tree_and_a_wide_directory_are_listed(tmp_path: Path) -> None:
    async with open_backend("bubblewrap", tmp_path) as sandbox:
        deep = "for i in $(seq 1500); do mkdir d; cd d; done 2>/dev/null; touch bottom"
        await sandbox.exec(deep, timeout_s=PLENTY_S)
        listing = await sandbox.list("/testbed", max_entries=5000)
        assert not listing.truncated
        assert max(entry.path.count("/") for entry in listing.entries) > 1000
        await output(sandbox, "cd /testbed/output; seq 20000 | xargs touch")
        listing = await sandbox.list("/testbed/output", max_entries=100)
        assert (len(listing.entries), listing.truncated) == (100, True)


async def test_a_file_whose_directory_vanishes_while_it_is_written_is_refused(
    tmp_path: Path,
) -> None:
    async with open_backend("bubblewrap", tmp_path) as sandbox:

        async def source() -> AsyncIterator[bytes]:
            yield b"first"
            await output(sandbox, "rm -r /testbed/output")
            yield b"second"

        with pytest.raises(SandboxFileError):
            await sandbox.put("/testbed/output/file", source())
        await write(sandbox, "/testbed/output/file", b"again")
        assert await output(sandbox, "cat /testbed/output/file") == "again"


async def test_a_command_given_up_before_its_input_was_complete_leaves_nothing(
    tmp_path: Path,
) -> None:
    async with open_backend("bubblewrap", tmp_path) as sandbox:
        open_files = "ls /proc/$PPID/fd | wc -l"
        before = await output(sandbox, open_files)
        for _ in range(3):
            await sandbox.exec("cat", timeout_s=PLENTY_S, stdin=b"x" * 100_000)
            await sandbox.exec("true", timeout_s=PLENTY_S, cwd="/no/such\0place")
        assert await output(sandbox, open_files) == before
