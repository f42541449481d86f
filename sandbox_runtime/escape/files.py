"""Attacks on file transfers: races, links and odd paths must not make the host read or write
another file than the one named, or read without end."""

from collections.abc import AsyncIterator
from contextlib import suppress

from sandbox_runtime.errors import SandboxFileError
from sandbox_runtime.escape.context import (
    Attack,
    EscapeContext,
    EscapeSandbox,
    run_python,
    running_python,
)

_ROUNDS = 100
_PLENTY_S = 30.0
_LARGE_BYTES = 64 << 20
_MAX_BYTES = 1 << 20
_MAX_ENTRIES = 1000
_SWAP = """
import os
os.makedirs("/testbed/race")
os.chdir("/testbed/race")
with open("secret", "w") as file:
    file.write("secret")
print("ready", flush=True)
while True:
    with open("next", "w") as file:
        file.write("plain")
    os.replace("next", "file")
    os.{link}("secret", "next")
    os.replace("next", "file")
"""
"""A program that swaps `file` between a plain file and a link to `secret`."""
_MANY_FILES = """
import os, time
os.makedirs("/testbed/many")
os.chdir("/testbed/many")
end = time.monotonic() + 1
for number in range(1_000_000):
    os.mknod(str(number))
    if time.monotonic() > end and number > {enough}:
        break
"""


async def _get_in_symlink_race(context: EscapeContext) -> str | None:
    async with context.victim() as sandbox, running_python(sandbox, _SWAP.format(link="symlink")):
        for _ in range(_ROUNDS):
            if await _read(sandbox, "/testbed/race/file") == b"secret":
                return "the target of a link was read in place of the file"
    return None


async def _put_in_symlink_race(context: EscapeContext) -> str | None:
    return await _put_in_race(context, "symlink")


async def _put_in_hard_link_race(context: EscapeContext) -> str | None:
    return await _put_in_race(context, "link")


async def _put_in_race(context: EscapeContext, link: str) -> str | None:
    async with context.victim() as sandbox, running_python(sandbox, _SWAP.format(link=link)):
        for _ in range(_ROUNDS):
            await _write(sandbox, "/testbed/race/file", b"written")
            if await _read(sandbox, "/testbed/race/secret") != b"secret":
                return "a file other than the named one was written"
    return None


async def _leave_links(context: EscapeContext) -> str | None:
    async with context.victim() as sandbox:
        await _shell(sandbox, "ln -s /etc/passwd /testbed/link && ln -s / /testbed/all")
        if await _read(sandbox, "/testbed/link"):
            return "a link was followed"
        listing = await sandbox.list("/testbed", max_entries=_MAX_ENTRIES)
        kinds = {entry.path: entry.kind for entry in listing.entries}
        return None if kinds.get("all") == "other" else f"a link is listed as {kinds.get('all')}"


async def _leave_special_files(context: EscapeContext) -> str | None:
    async with context.victim() as sandbox:
        await _shell(sandbox, "mkfifo /testbed/fifo && ln -s /dev/zero /testbed/zero")
        for path in (
            "/testbed/fifo",
            "/testbed/zero",
            "/dev/zero",
            "/dev/stdin",
            "/proc/self/fd/0",
        ):
            if content := await _read(sandbox, path):
                return f"{len(content)} bytes of {path} were read"
    return None


async def _leave_huge_file(context: EscapeContext) -> str | None:
    async with context.victim() as sandbox:
        await _shell(sandbox, f"truncate -s {_LARGE_BYTES} /testbed/huge")
        size = len(await _read(sandbox, "/testbed/huge"))
    return f"{size} bytes of a file were read" if size > _MAX_BYTES else None


async def _grow_file_while_read(context: EscapeContext) -> str | None:
    async with context.victim() as sandbox:
        # The file grows while it is read, up to _LARGE_BYTES.
        await _shell(sandbox, f"head -c {_LARGE_BYTES} /dev/zero > /testbed/growing 2>&1 &")
        sizes = [len(await _read(sandbox, "/testbed/growing")) for _ in range(5)]
    largest = max(sizes)
    return f"{largest} bytes of a growing file were read" if largest > _MAX_BYTES else None


async def _leave_million_files(context: EscapeContext) -> str | None:
    async with context.victim() as sandbox:
        program = _MANY_FILES.format(enough=2 * _MAX_ENTRIES)
        await run_python(sandbox, program, timeout_s=_PLENTY_S)
        listing = await sandbox.list("/testbed/many", max_entries=_MAX_ENTRIES)
        count = len(listing.entries)
    if count <= _MAX_ENTRIES and listing.truncated:
        return None
    return f"{count} names were listed, truncated: {listing.truncated}"


async def _read(sandbox: EscapeSandbox, path: str) -> bytes:
    """Return the bytes of a file that the host received, even if the transfer failed."""
    received = bytearray()

    async def sink(piece: bytes) -> None:
        received.extend(piece)

    with suppress(SandboxFileError):
        await sandbox.get(path, sink, max_bytes=_MAX_BYTES)
    return bytes(received)


async def _write(sandbox: EscapeSandbox, path: str, data: bytes) -> None:
    async def source() -> AsyncIterator[bytes]:
        yield data

    with suppress(SandboxFileError):
        await sandbox.put(path, source())


async def _shell(sandbox: EscapeSandbox, command: str) -> None:
    result = await sandbox.exec(command, timeout_s=_PLENTY_S, shell_state="none")
    if result.exit_code != 0:
        raise SandboxFileError(f"{command!r} failed: {result.stderr[:200]}")


ATTACKS = tuple(
    Attack(name, "files", description, make)
    for name, description, make in (
        ("symlink_get", "Swaps a file for a link while it is read.", _get_in_symlink_race),
        ("symlink_put", "Swaps a file for a link while it is written.", _put_in_symlink_race),
        (
            "hard_link_put",
            "Swaps a file for a hard link to another while it is written.",
            _put_in_hard_link_race,
        ),
        ("link_out", "Leaves links to other files and directories.", _leave_links),
        (
            "no_regular_file",
            "Leaves pipes and devices in the place of files.",
            _leave_special_files,
        ),
        ("huge_file", "Leaves a file larger than the host may read.", _leave_huge_file),
        ("growing_file", "Lets a file grow while it is read.", _grow_file_while_read),
        (
            "million_files",
            "Leaves up to a million files, more than may be listed.",
            _leave_million_files,
        ),
    )
)
