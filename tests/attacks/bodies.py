"""JSON bodies that are deep, large, many-valued, malformed or slow.

/health shows how long one body stalls the server; the bodies themselves must be refused, or
answered within the memory that they may use.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from functools import partial

from bench.neighbours import BODIES, PIECE_BYTES
from proxy.body_memory import COPIES_PER_BODY
from proxy.models.scripted import text_reply
from tests.attacks.neighbour import CHAT, Bounds, Outcome, Range, firing_range
from tests.attacks.report import Finding
from tests.attacks.server import ATTACKER
from tests.clients.test_hostile_bodies import BODY, REFUSED, TOO_LARGE
from tests.fakes.backend import Item

BACKEND = "bubblewrap"
AT_ONCE = 3
"""Number of connections that send a body at the same time."""
MIB = 1 << 20
MARGIN_MIB = 64.0
TRICKLE_S, TRICKLE_PAUSE_S = 40.0, 0.25
TRICKLING = 50
"""Number of connections that send a body byte by byte."""


@dataclass(frozen=True, slots=True)
class _Body:
    """A body as its start, a piece that is repeated, and its end."""

    start: bytes
    piece: bytes = b""
    times: int = 0
    end: bytes = b""

    def build(self) -> bytes:
        return self.start + self.piece * self.times + self.end


_MESSAGES = b'{"model": "attacker", "messages": [{"role": "user", "content": "'
_END = b'"}]}'
_FILE = (
    _MESSAGES[:-1] + b'[{"type": "file", "file": {"filename": "a.txt", "file_data":'
    b' "data:text/plain,'
)
_METADATA = BODY[:-1] + b', "metadata": {'
_LARGE: Mapping[str, _Body] = {
    **{name: _Body(*parts) for name, parts in BODIES.items()},
    **{name: _Body(body) for name, (body, _) in TOO_LARGE.items()},
    "100 MB in one string": _Body(_MESSAGES, b"x" * 1000, 100_000, _END),
    "100 MB of \\u00e9 in one string": _Body(_MESSAGES, b"\\u00e9" * 100, 166_666, _END),
    "300 MB in one string": _Body(_MESSAGES, b"x" * 1000, 300_000, _END),
    "a million keys": _Body(_METADATA, b'"k": 1, ', 1_000_000, b'"k": 1}}'),
    "a key of 60 MB": _Body(BODY[:-1] + b', "', b"k" * 1000, 60_000, b'": 1}'),
    "a number of 60 MB": _Body(BODY[:-1] + b', "seed": ', b"9" * 1000, 60_000, b"}"),
    "190,000 numbers of 40 digits": _Body(
        BODY[:-1] + b', "x": [', b"9" * 40 + b",", 190_000, b"1]}"
    ),
    "100 MB in strings of 4 KB": _Body(
        BODY[:-1] + b', "x": [', b'"' + b"x" * 4000 + b'",', 25_000, b"1]}"
    ),
    "100 MB in a system message": _Body(
        _MESSAGES.replace(b'"user"', b'"system"'),
        b"x" * 1000,
        100_000,
        _END[:-2] + b', {"role": "user", "content": "Work."}]}',
    ),
    "a file of 30 MB, percent-encoded": _Body(_FILE, b"%41" * 1000, 30_000, b'"}}]}]}'),
    "60 MB of unfinished escapes": _Body(_MESSAGES, b"\\u12", 15_000_000),
}


_KNOWN_GAPS = ("100 MB in a system message",)
"""A system message is copied once more, to be joined with the proxy's own."""


async def attacks() -> AsyncIterator[Finding]:
    """Post each body on several connections at once, then many bodies byte by byte."""
    async with firing_range(BACKEND) as area:
        for name, large in _LARGE.items():
            body = large.build()
            copies = AT_ONCE * COPIES_PER_BODY * len(body) / MIB
            bounds = Bounds(growth_mib=copies + MARGIN_MIB)
            attack, is_known_gap = partial(_post, area, body), name in _KNOWN_GAPS
            yield await area.measure(name, attack, bounds=bounds, is_known_gap=is_known_gap)
        yield await area.measure("small malformed bodies", partial(_post_malformed, area))
        yield await area.measure("bodies byte by byte", partial(_trickle, area))


async def _post(area: Range, body: bytes) -> Outcome:
    area.replies = _answers()
    statuses = await asyncio.gather(*(_send(area, body) for _ in range(AT_ONCE)))
    held = all(status in ("200", "400", "413", "503") for status in statuses)
    size = f"{len(body) / 1e6:.3g} MB x {AT_ONCE}"
    return Outcome(held, f"{size}: {', '.join(sorted(set(statuses)))},")


async def _post_malformed(area: Range) -> Outcome:
    statuses = {(await area.http.post(CHAT, content=body)).status_code for body in REFUSED.values()}
    return Outcome(statuses == {400}, f"{len(REFUSED)} bodies: {sorted(statuses)},")


async def _trickle(area: Range) -> Outcome:
    """Send a byte at a time on many connections. The server must end each of them."""
    async with asyncio.timeout(TRICKLE_S + 20), asyncio.TaskGroup() as group:
        sent = [group.create_task(_send_slowly(area)) for _ in range(TRICKLING)]
    ended_s = [task.result() for task in sent]
    held = max(ended_s) < TRICKLE_S
    return Outcome(held, f"{TRICKLING} connections ended after {max(ended_s):.0f} s at most,")


async def _send_slowly(area: Range) -> float:
    """Return the seconds after which the server closed the connection."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    reader, writer = await asyncio.open_connection("127.0.0.1", area.server.port)
    writer.write(_head(MIB))
    closed = asyncio.ensure_future(reader.read(1))
    while loop.time() - started < TRICKLE_S and not closed.done():
        writer.write(b" ")
        await asyncio.wait((closed,), timeout=TRICKLE_PAUSE_S)
    closed.cancel()
    writer.close()
    return loop.time() - started


async def _send(area: Range, body: bytes) -> str:
    """Post a body piece by piece and return the status of the answer. A server that has answered
    may close the connection before it has the whole body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", area.server.port)
    try:
        writer.write(_head(len(body)))
        try:
            for start in range(0, len(body), PIECE_BYTES):
                writer.write(body[start : start + PIECE_BYTES])
                await writer.drain()
                await asyncio.sleep(0)  # `drain` alone lets nothing else run, such as the watch
        except ConnectionError:
            pass
        line = await reader.readline()
        return line.split()[1].decode() if line else "closed"
    except ConnectionError:
        return "closed"
    finally:
        writer.close()


def _head(length: int) -> bytes:
    lines = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ATTACKER}\r\n"
    return f"{lines}Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n".encode()


def _answers() -> list[Item]:
    return [text_reply("Done.")]
