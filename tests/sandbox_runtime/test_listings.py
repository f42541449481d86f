"""The entries and bytes of a listing are counted before they are parsed."""

import asyncio
import json
import tracemalloc
from itertools import count

import anyio
import pytest

from sandbox_runtime.errors import SandboxLostError
from sandbox_runtime.protocol import DATA, END, MAX_DATA_BYTES, ProtocolError, frame, json_frame
from sandbox_runtime.reports import (
    ENTRIES_PER_BATCH,
    HASH_BYTES,
    MAX_LINE_BYTES,
    MAX_LISTING_BYTES,
    MAX_PATH_BYTES,
    ListingReader,
)
from sandbox_runtime.sandbox import DirectoryEntry
from tests.sandbox_runtime.scripted_guest import scripted_sandbox

MAX_HELD_BYTES = 24 << 20
LINE = b'["a", "file", 1]\n'
UNBELIEVABLE = {
    "a flag for a size": b'["a", "file", true]',
    "an endless size": b'["a", "file", 1' + b"0" * 50 + b"]",
    "a size beyond all digits": b'["a", "file", 1' + b"0" * 5000 + b"]",
    "a path that no file can have": b'["a\\u0000b", "file", 1]',
    "half of a surrogate pair": b'["\\ud800", "file", 1]',
    "a path longer than any": json.dumps(["a" * (MAX_PATH_BYTES + 1), "file", 1]).encode(),
    "a line of nothing": b"",
    "a list in a list in a list": b"[" * 20_000,
    "a line longer than any": b'["a", "file", 1]' + b" " * MAX_LINE_BYTES,
}


@pytest.mark.parametrize("line", UNBELIEVABLE.values(), ids=UNBELIEVABLE.keys())
async def test_invalid_listing_entry_marks_the_sandbox_as_lost(line: bytes) -> None:
    sandbox, guest = await scripted_sandbox(
        lambda n: frame(n, DATA, line + b"\n") + json_frame(n, END, {"truncated": False})
    )
    with anyio.fail_after(5), pytest.raises(SandboxLostError, match="malformed listing"):
        await sandbox.list("/testbed")
    assert guest.killed


async def sent_before_refused(line: bytes, max_entries: int, why: str) -> int:
    """Return the number of bytes of an endless listing that arrive before it is refused."""
    listing, piece = ListingReader(max_entries), line * (MAX_DATA_BYTES // len(line))
    sent = 0

    async def feed_without_end() -> None:
        nonlocal sent
        while True:
            sent += len(piece)
            await listing.feed(piece)

    with pytest.raises(ProtocolError, match=why):
        await feed_without_end()
    return sent


async def test_too_many_entries_are_refused_before_they_are_parsed() -> None:
    no_json = b"this is not even JSON\n"
    sent = await sent_before_refused(no_json, 1000, "more than 1000 entries")
    assert sent <= MAX_DATA_BYTES


async def test_listing_line_without_an_end_is_refused_at_the_maximum_line_length() -> None:
    sent = await sent_before_refused(b"x", 10_000, "a line has no end")
    assert sent <= MAX_LINE_BYTES + MAX_DATA_BYTES


async def test_bytes_of_a_listing_are_bounded_while_they_arrive() -> None:
    longest = json.dumps(["\udc80" * MAX_PATH_BYTES, "other", 0]).encode() + b"\n"
    sent = await sent_before_refused(longest, 10_000, "endless listing")
    assert sent <= MAX_LISTING_BYTES + 10_000 * HASH_BYTES + MAX_DATA_BYTES


async def test_memory_of_a_listing_is_bounded_even_for_wide_characters() -> None:
    listing = ListingReader(10_000)

    async def feed_wide_paths() -> None:
        for number in count():  # one such character makes all of a str's take four bytes
            await listing.feed(b'["%08d%s\xf0\x9f\x98\x80", "file", 1]\n' % (number, b"x" * 4000))

    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="endless listing"):
            await feed_wide_paths()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < MAX_HELD_BYTES


async def test_listing_is_parsed_from_arbitrary_pieces() -> None:
    lines = b"".join(
        json.dumps(entry).encode() + b"\n"
        for entry in (["b", "directory", 0], ["a\udc80\n", "file", 3, "0" * 64], ["c", "other", 0])
    )
    expected = (
        DirectoryEntry("a\udc80\n", "file", 3, "0" * 64),
        DirectoryEntry("b", "directory", 0),
        DirectoryEntry("c", "other", 0),
    )
    for size in (1, 7, len(lines)):
        listing = ListingReader(max_entries=3)
        for start in range(0, len(lines), size):
            await listing.feed(lines[start : start + size])
        assert listing.finish() == expected


async def test_sandbox_is_lost_as_soon_as_a_listing_has_too_many_entries() -> None:
    sandbox, guest = await scripted_sandbox(lambda n: frame(n, DATA, LINE * 11))
    with anyio.fail_after(5), pytest.raises(SandboxLostError, match="more than 10 entries"):
        await sandbox.list("/testbed", max_entries=10)
    assert guest.killed


async def test_listing_entries_are_parsed_a_few_per_event_loop_turn() -> None:
    lines = b"".join(b'["%d", "file", 1]\n' % n for n in range(3000))
    assert len(lines) <= MAX_DATA_BYTES  # one piece
    sandbox, _ = await scripted_sandbox(
        lambda n: frame(n, DATA, lines) + json_frame(n, END, {"truncated": False})
    )
    with anyio.fail_after(20):
        listing = asyncio.create_task(sandbox.list("/testbed"))
        turns = 0
        while not listing.done():
            await asyncio.sleep(0)
            turns += 1
    assert len((await listing).entries) == 3000
    assert turns >= 3000 // ENTRIES_PER_BATCH
