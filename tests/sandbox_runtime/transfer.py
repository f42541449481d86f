"""Helpers for files of a sandbox as bytes, and a recorder of streamed output."""

from collections.abc import AsyncIterator

import anyio

from sandbox_runtime.sandbox import Sandbox, StreamName

PLENTY_S = 60.0
"""A timeout that no command of a passing test reaches."""


async def pieces(*data: bytes) -> AsyncIterator[bytes]:
    for piece in data:
        yield piece


async def drop(data: bytes) -> None:
    """A sink that keeps nothing."""


async def write(sandbox: Sandbox, path: str, data: bytes) -> None:
    assert await sandbox.put(path, pieces(data)) == len(data)


async def read(
    sandbox: Sandbox, path: str, *, max_bytes: int = 16 << 20, timeout_s: float = PLENTY_S
) -> bytes:
    received = bytearray()

    async def sink(piece: bytes) -> None:
        received.extend(piece)

    size = await sandbox.get(path, sink, max_bytes=max_bytes, timeout_s=timeout_s)
    assert size == len(received)
    return bytes(received)


async def copy_workspace(source: Sandbox, target: Sandbox, *, max_bytes: int = 1 << 30) -> None:
    packed = bytearray()

    async def sink(piece: bytes) -> None:
        packed.extend(piece)

    await source.snapshot(sink, max_bytes=max_bytes)
    await target.restore(pieces(bytes(packed)))


async def output(sandbox: Sandbox, command: str) -> str:
    """Return the stdout of a command that must succeed."""
    result = await sandbox.exec(command, timeout_s=PLENTY_S)
    assert (result.exit_code, result.timed_out) == (0, False), result
    return result.stdout


class OutputRecorder:
    """An OnOutput that records the output and signals its arrival."""

    def __init__(self) -> None:
        self.pieces: list[tuple[StreamName, str]] = []
        self.something = anyio.Event()

    async def __call__(self, stream: StreamName, text: str) -> None:
        self.pieces.append((stream, text))
        self.something.set()

    def text(self, stream: StreamName = "stdout") -> str:
        return "".join(text for name, text in self.pieces if name == stream)
