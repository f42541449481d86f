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

    receiving = asyncio.create_task(guest.receive(take))
    first_bytes = asyncio.create_task(something.wait())
    await asyncio.wait((receiving, first_bytes), return_when=asyncio.FIRST_COMPLETED)
    receiving.cancel()
    first_bytes.cancel()
    await asyncio.wait((receiving, first_bytes))
    return bytes(received)
