"""Several computers that go on from where one stands."""

from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream

from sandbox_runtime.errors import SandboxError
from sandbox_runtime.sandbox import Sandbox

PIECES_AHEAD = 16
"""How far the fastest copy may be ahead of the slowest."""


async def fork(source: Sandbox, copies: Sequence[Sandbox], *, max_bytes: int) -> None:
    """Give each of `copies` the workspace of `source`, which is read once and kept nowhere.

    Raises what `snapshot` and `restore` raise; the copies may then have a part of it.
    """
    failures: BaseExceptionGroup[SandboxError] | None = None
    try:
        async with anyio.create_task_group() as group, AsyncExitStack() as ends:
            sends = []
            for copy in copies:
                send, receive = anyio.create_memory_object_stream[bytes](PIECES_AHEAD)
                sends.append(await ends.enter_async_context(send))
                group.start_soon(_unpack, copy, receive)

            async def pass_on(piece: bytes) -> None:
                for each in sends:
                    with suppress(anyio.BrokenResourceError):  # that copy's own error ends it all
                        await each.send(piece)

            await source.snapshot(pass_on, max_bytes=max_bytes)
    except* SandboxError as found:
        failures = found
    if failures:  # raised in there, some Pythons would wrap it again
        raise _first(failures) from failures


async def _unpack(copy: Sandbox, pieces: MemoryObjectReceiveStream[bytes]) -> None:
    async with pieces:
        await copy.restore(pieces)


def _first(failures: BaseExceptionGroup[SandboxError]) -> SandboxError:
    one = failures.exceptions[0]
    return _first(one) if isinstance(one, BaseExceptionGroup) else one
