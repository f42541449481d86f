"""Reads the output of a guest, for tests without a channel."""

import asyncio

from sandbox_runtime.backends.base import Guest


async def next_output(guest: Guest) -> bytes:
    """Return the next bytes, or b"" once the guest has ended."""
    received = bytearray()
    something = asyncio.Event()

    def take(data: bytes) -> None:
        received.extend(data)
        something.set()

    listening = asyncio.create_task(guest.listen(take))
    hearing = asyncio.create_task(something.wait())
    await asyncio.wait((listening, hearing), return_when=asyncio.FIRST_COMPLETED)
    listening.cancel()
    hearing.cancel()
    await asyncio.wait((listening, hearing))
    return bytes(received)
