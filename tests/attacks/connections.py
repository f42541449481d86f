"""Thousands of connections that are idle, send their head slowly, or read nothing."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from tests.attacks.neighbour import Bounds, Outcome, Range, firing_range
from tests.attacks.report import Finding
from tests.attacks.server import ATTACKER

BACKEND = "bubblewrap"
COUNT = 2000
"""Number of connections of an attack."""
FEW_CONNECTIONS = 256
"""`server.max_connections` of the second server: fewer than the attack opens."""
HEAD_TIMEOUT_S = 20.0
"""Time for a request's head (docs/security.md), in seconds."""
MARGIN_S = 5.0
_TRICKLE_PAUSE_S = 1.0
_AT_ONCE = 100
"""Number of connections that are opened at the same time."""
_HEAD_START = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: "
_REQUEST = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n\r\n"
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def attacks() -> AsyncIterator[Finding]:
    """Open the connections to a server with the default bound, and to one with a lower bound."""
    bounds = Bounds(growth_mib=COUNT * 64 / 1024)  # 64 KiB for each connection, as for its head
    async with firing_range(BACKEND) as area:
        for name, attack in (
            (f"{COUNT:,} idle connections", _stay_idle),
            (f"{COUNT:,} slow heads", _send_slow_heads),
            (f"{COUNT:,} requests at once, answers not read", _read_nothing),
        ):
            is_known_gap = attack is _read_nothing  # `/health` is answered after them
            yield await area.measure(
                name, partial(attack, area), bounds=bounds, is_known_gap=is_known_gap
            )
    settings = {"server": {"max_connections": FEW_CONNECTIONS}}
    async with firing_range(BACKEND, settings) as area:
        name = f"{COUNT:,} idle connections, of which {FEW_CONNECTIONS} may be open"
        yield await area.measure(name, partial(_exceed, area), bounds=bounds)


@asynccontextmanager
async def _connected(area: Range) -> AsyncIterator[list[Connection]]:
    """Open the connections, and close them after the block."""
    opened: list[Connection] = []
    try:
        while len(opened) < COUNT:
            opening = (
                asyncio.open_connection("127.0.0.1", area.server.port) for _ in range(_AT_ONCE)
            )
            opened += await asyncio.gather(*opening)
        yield opened
    finally:
        for _, writer in opened:
            writer.close()


async def _stay_idle(area: Range) -> Outcome:
    async with _connected(area) as opened:
        await asyncio.sleep(MARGIN_S)
        return Outcome(True, f"{_count_open(opened)} open, {area.server.open_files()} descriptors,")


async def _send_slow_heads(area: Range) -> Outcome:
    """Send a byte of the head each second. The server must close every connection in time."""
    async with _connected(area) as opened:
        for _, writer in opened:
            writer.write(_HEAD_START)
        for _ in range(int((HEAD_TIMEOUT_S + MARGIN_S) / _TRICKLE_PAUSE_S)):
            for _, writer in opened:
                if not writer.is_closing():
                    writer.write(b"x")
            await asyncio.sleep(_TRICKLE_PAUSE_S)
        left = await _count_after_reading(opened)
    return Outcome(left == 0, f"{left} open after {HEAD_TIMEOUT_S + MARGIN_S:.0f} s,")


async def _read_nothing(area: Range) -> Outcome:
    async with _connected(area) as opened:
        for _, writer in opened:
            writer.transport.pause_reading()
            writer.write(_REQUEST % ATTACKER.encode())
        await asyncio.sleep(MARGIN_S)
        return Outcome(True, f"{_count_open(opened)} open, {area.server.open_files()} descriptors,")


async def _exceed(area: Range) -> Outcome:
    async with _connected(area) as opened:
        await asyncio.sleep(1)
        left, descriptors = await _count_after_reading(opened), area.server.open_files()
    return Outcome(left < 2 * FEW_CONNECTIONS, f"{left} open, {descriptors} descriptors,")


def _count_open(opened: Sequence[Connection]) -> int:
    return sum(not reader.at_eof() for reader, _ in opened)


async def _count_after_reading(opened: Sequence[Connection]) -> int:
    """Return the number of connections that the server has not closed. Reads what it has sent."""

    async def is_closed(reader: asyncio.StreamReader) -> bool:
        try:
            async with asyncio.timeout(1):
                await reader.read()
        except TimeoutError:
            return False
        except ConnectionError:
            pass
        return True

    return sum(not each for each in await asyncio.gather(*(is_closed(r) for r, _ in opened)))
