"""A model backend that answers without end, or with far more than a reply may have."""

from collections.abc import AsyncIterator, Sequence
from functools import partial

from proxy.models.scripted import text_reply
from tests.attacks.neighbour import Bounds, Outcome, Range, firing_range, stop_reason
from tests.attacks.report import Finding
from tests.clients.test_many_calls import MANY, streamed_reply
from tests.fakes.backend import Frames, Item, Raw, chunk, frames
from tests.proxy.models.test_backend_bounds import Endless, called

BACKEND = "bubblewrap"
MIB = 1 << 20
ENDLESS_PIECES = 16 << 10
"""Number of pieces of 1 MiB; a server without a bound would read 16 GiB."""
EVENT_MIB, REPLY_MIB = 32, 64
"""Bounds of one event, and of the text and the arguments of one reply (docs/security.md)."""
COPIES = 4
"""Number of copies of an event or a text in memory: as received, joined, decoded, and in the run's
result."""
MARGIN_MIB = 64.0
_CHUNK = b'data: {"choices": [{"index": 0, "delta": '


def _endless_lines() -> dict[str, Endless]:
    text = frames(chunk({"content": "x" * MIB}))[0]
    arguments = frames(chunk({"tool_calls": [called(0, "x" * MIB)]}))[0]
    return {
        "a line without end": Endless(b"data: ", b"x" * MIB, ENDLESS_PIECES),
        "an event of endless lines": Endless(b"", b"data: " + b"x" * MIB + b"\n", ENDLESS_PIECES),
        "a text without end": Endless(b"", text, ENDLESS_PIECES),
        "arguments without end": Endless(b"", arguments, ENDLESS_PIECES),
        "comments without end": Endless(b"", b": " + b"x" * MIB + b"\n\n", ENDLESS_PIECES),
    }


def _json(body: bytes) -> Raw:
    return Raw(200, body, {"content-type": "application/json"})


def _large_replies() -> dict[str, Sequence[Item]]:
    calls = streamed_reply(MANY)
    event = _CHUNK + b'{"x": [' + b"{}," * (2 * MIB) + b"{}]}}]}\n\n"
    return {
        f"{MANY:,} calls in one turn": [calls, text_reply("Done.")],
        "an event of 2,000,000 values": [Frames([event])],
        "an event of 100,000 levels": [
            Frames([_CHUNK + b"[" * 100_000 + b"]" * 100_000 + b"}]}\n\n"])
        ],
        "an answer of 8,000,000 values": [_json(b"[" + b"{}," * (8 * MIB) + b"{}]")],
        "an answer of 300 MiB": [_json(b'{"x": "' + b"9" * (300 * MIB) + b'"}')],
    }


async def attacks() -> AsyncIterator[Finding]:
    """Answer the attacker's request with each reply."""
    async with firing_range(BACKEND) as area:
        for name, endless in _endless_lines().items():
            size_mib = EVENT_MIB if "text" not in name and "arguments" not in name else REPLY_MIB
            bounds = Bounds(growth_mib=COPIES * size_mib + MARGIN_MIB)
            yield await area.measure(name, partial(_answer_endlessly, area, endless), bounds=bounds)
        for name, replies in _large_replies().items():
            bounds = Bounds(growth_mib=REPLY_MIB * COPIES + MARGIN_MIB)
            yield await area.measure(name, partial(_answer, area, replies), bounds=bounds)


async def _answer_endlessly(area: Range, endless: Endless) -> Outcome:
    answer = await area.ask([Frames(endless)], stream=False)
    held = endless.sent < ENDLESS_PIECES * MIB
    return Outcome(held, f"{stop_reason(answer)} after {endless.sent // MIB} MiB,")


async def _answer(area: Range, replies: Sequence[Item]) -> Outcome:
    answer = await area.ask(replies)
    held = answer.status_code in (200, 502)
    return Outcome(held, f"{stop_reason(answer)},")
