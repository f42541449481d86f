"""Parts of the agent, compared with Python's implementations or with small models."""

import codecs
import json
import random
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from sandbox_runtime.packets import Packet, PacketDecoder, packet_bytes
from sandbox_runtime.protocol import MAX_OPEN_BYTES, Decoder, ProtocolError, frame
from tests.sandbox_runtime.guest.sanitized import BuiltPart, block, build_parts, part

SEED = 20261120
CASES = 4000
EXAMPLES = 1000
MAX_DEPTH = 64
DOCUMENTS = [
    b'{"op": "exec", "id": "c1", "timeout_s": 120.5, "cwd": null, "env": {"A": "b\\n"}, "x": []}',
    b'{"op": "list", "path": "/t\\u00e9\\ud83c\\udf89\\udce9/\\"q\\"", "hashes": true, "n": -1e-5}',
    b'[[1, 2.50, 0, -0.0, 1E+3], {"": {"": [false]}}, "\xc3\xa9\xed\xb3\xa9", "\\ud800x", "\\/"]',
    b' \t\r\n{"command": "echo \'x\' \\\\ \\b\\f\\u0000", "max": 123456789012345678901234567890}\n',
]
TOKENS = [b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"\\u", b"\\ud83d", b"null", b"1e", b"-"]
CAPS = st.tuples(st.integers(0, 40) | st.sampled_from([4096, 9000]), st.sampled_from([0, 1, 2, 5]))
"""Bytes and lines."""
TEXTS = st.text("ab\né数🎉", max_size=60).map(str.encode) | st.builds(
    lambda line, count: line * count, st.text("a\n🎉", max_size=9).map(str.encode), st.just(1500)
)
FRAMES = st.lists(
    st.builds(frame, st.integers(0, (1 << 32) - 1), st.integers(0, 255), st.binary(max_size=300)),
    max_size=4,
)

TOKEN = bytes(range(100, 116))
U64 = st.integers(0, (1 << 64) - 1)
PACKET = st.builds(
    Packet,
    st.integers(0, 255),
    st.integers(2, (1 << 32) - 1),
    U64,
    U64,
    U64,
    st.binary(max_size=300),
)
PACKETS = st.lists(PACKET, max_size=4)
PACKET_PIECES = (
    st.binary(max_size=100),
    st.builds(
        lambda packet, start: packet_bytes(TOKEN, packet._replace(connection=1))[start:],
        PACKET,
        st.integers(29, 60),
    ),
)
"""Bytes that are no packet: any, and what follows the offset in one of an earlier connection. More
of it would be that packet, behind a token."""


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_parts(tmp_path_factory.mktemp("parts"))


@pytest.fixture(scope="module")
def parser(parts: Path) -> Iterator[BuiltPart]:
    with part(parts, "json") as process:
        yield process


@pytest.fixture(scope="module")
def native(parts: Path) -> Iterator[BuiltPart]:
    with part(parts, "native") as process:
        yield process


@pytest.fixture(scope="module")
def framing(parts: Path) -> Iterator[BuiltPart]:
    with part(parts, "frames") as process:
        yield process


@pytest.fixture(scope="module")
def packeting(parts: Path) -> Iterator[BuiltPart]:
    with part(parts, "packets") as process:
        yield process


@pytest.fixture(scope="module")
def capture(parts: Path) -> Iterator[BuiltPart]:
    with part(parts, "capture") as process:
        yield process


# JSON


def test_json_parser_agrees_with_python(parser: BuiltPart) -> None:
    understood = 0
    for case in _documents():
        line = parser.shown(case)
        try:
            text = case.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            continue  # it is enough that it did no harm
        assert line == _show(text), case
        understood += line != "-"
    assert CASES // 10 < understood < CASES


def test_agent_refuses_json_nested_beyond_its_maximum_depth(parser: BuiltPart) -> None:
    depths = [1, MAX_DEPTH, MAX_DEPTH + 1, 100_000]
    cases = [b"[" * depth + b"0" + b"]" * depth for depth in depths]
    assert [parser.shown(case) == "-" for case in cases] == [False, False, True, True]


def test_agent_encodes_json_strings_to_operating_system_bytes_as_python_does(
    native: BuiltPart,
) -> None:
    chance = random.Random(SEED)
    letters = ["a", "é", "数", "🎉", "\udc80", "\udcff", "\0", "\ud800", "\udbff"]
    texts = ["".join(chance.choices(letters[: chance.choice([6, 9])], k=8)) for _ in range(CASES)]
    sent = [json.dumps(text) for text in texts]  # where two surrogates may become one character
    lines = [native.shown(text.encode()) for text in sent]
    assert lines == [_native(json.loads(text)) for text in sent]
    assert 0 < lines.count("-") < CASES


# Frames


@settings(max_examples=EXAMPLES)
@given(frames=FRAMES, change=st.none() | st.tuples(st.integers(0), st.integers(0, 255)))
def test_agent_and_host_parse_the_same_frames(
    framing: BuiltPart, frames: list[bytes], change: tuple[int, int] | None
) -> None:
    data = bytearray(b"".join(frames))
    if data and change:
        data[change[0] % len(data)] = change[1]
    assert framing.shown(bytes(data)) == _frames([bytes(data)])


@settings(max_examples=EXAMPLES)
@given(frames=FRAMES, cuts=st.lists(st.integers(0, 1000)))
def test_host_parses_frames_from_arbitrary_pieces(frames: list[bytes], cuts: list[int]) -> None:
    data = b"".join(frames)
    assert _frames(_pieces(data, cuts)) == _frames([data])


# Packets


@settings(max_examples=EXAMPLES)
@given(packets=PACKETS, cuts=st.lists(st.integers(0, 3000)))
def test_agent_and_host_write_and_parse_the_same_packets(
    packeting: BuiltPart, packets: list[Packet], cuts: list[int]
) -> None:
    data = b"".join(packet_bytes(TOKEN, packet) for packet in packets)
    assert packeting.shown(TOKEN + data) == _shown(packets)
    decoder = PacketDecoder(TOKEN, may_begin_inside=False)
    assert [each for piece in _pieces(data, cuts) for each in decoder.feed(piece)] == packets


@settings(max_examples=EXAMPLES)
@given(packets=PACKETS, start=st.integers(0))
def test_host_that_begins_to_read_within_a_packet_gets_the_packets_after_it(
    packets: list[Packet], start: int
) -> None:
    wholes = [packet_bytes(TOKEN, packet) for packet in packets]
    data = b"".join(wholes)
    start %= len(data) + 1
    begins = list(accumulate(map(len, wholes), initial=0))
    decoder = PacketDecoder(TOKEN, may_begin_inside=True)
    expected = [packet for packet, at in zip(packets, begins, strict=False) if at >= start]
    assert list(decoder.feed(data[start:])) == expected


@settings(max_examples=EXAMPLES)
@given(packets=PACKETS, other=st.one_of(PACKET_PIECES), at=st.integers(0))
@example(packets=[Packet(0, 2, 0, 0, 0, b"")], other=TOKEN[:1], at=1)
def test_agent_discards_only_the_packet_that_other_bytes_interrupt(
    packeting: BuiltPart, packets: list[Packet], other: bytes, at: int
) -> None:
    """Only the packet within which other bytes arrive is lost."""
    wholes = [packet_bytes(TOKEN, packet) for packet in packets]
    data = b"".join(wholes)
    at %= len(data) + 1
    begins = list(accumulate(map(len, wholes), initial=0))
    places = zip(packets, begins, begins[1:], strict=False)
    received = data[:at] + other + data[at:]
    # Else they may be a packet of their own, behind a token.
    assume(TOKEN[:4] not in other and received.count(TOKEN) <= len(packets))
    intact = [
        packet
        for packet, begin, end in places
        if received.startswith(data[:end]) or received.endswith(data[begin:])
    ]
    assert packeting.shown(TOKEN + received) == _shown(intact)


# What is shown of an output


@settings(max_examples=EXAMPLES)
@given(cap=CAPS, text=TEXTS, cuts=st.lists(st.integers(0, 20_000), max_size=6))
def test_agent_limits_head_and_tail_of_output_by_bytes_and_lines(
    capture: BuiltPart, cap: tuple[int, int], text: bytes, cuts: list[int]
) -> None:
    pieces = _pieces(text, cuts)
    head, tail = _head_and_tail(pieces, *cap)
    counts = len(text), text.count(b"\n"), head.count(b"\n") + tail.count(b"\n")
    assert _captured(capture, cap, pieces) == (head, tail, *counts)


@settings(max_examples=EXAMPLES)
@given(cap=CAPS, pieces=st.lists(st.binary(max_size=60) | st.sampled_from([b"\xff\n" * 3000])))
def test_shown_head_and_tail_of_arbitrary_output_stay_within_the_cap(
    capture: BuiltPart, cap: tuple[int, int], pieces: list[bytes]
) -> None:
    output = b"".join(pieces)
    head, tail, length, lines, shown_lines = _captured(capture, cap, pieces)
    assert (length, lines) == (len(output), output.count(b"\n"))
    assert output.startswith(head)
    assert output[len(head) :].endswith(tail)
    assert len(head + tail) <= cap[0]
    assert shown_lines == (head + tail).count(b"\n") <= cap[1]


@settings(max_examples=EXAMPLES)
@given(max_bytes=st.integers(0, 40), text=st.text("aé数🎉", max_size=60))
def test_shown_output_never_splits_a_character(
    capture: BuiltPart, max_bytes: int, text: str
) -> None:
    head, tail, *_ = _captured(capture, (max_bytes, 1000), [text.encode()])
    assert text.startswith(head.decode())
    assert text.endswith(tail.decode())


def _head_and_tail(pieces: Sequence[bytes], max_bytes: int, max_lines: int) -> tuple[bytes, bytes]:
    """The model: what is shown of UTF-8 that comes in these pieces. The tail has half of each cap,
    and the head, which ends with the first piece that is not wholly in it, has the rest."""
    tail_bytes, tail_lines = max_bytes // 2, max_lines // 2
    head = b""
    for piece in pieces:
        part = piece[: max_bytes - tail_bytes - len(head)]
        if part != piece:
            part = _without_half_a_character(part)
        lines_left = max_lines - tail_lines - head.count(b"\n")
        if part.count(b"\n") > lines_left:
            part = b"".join(part.splitlines(keepends=True)[:lines_left])
        head += part
        if part != piece:
            break
    rest = b"".join(pieces)[len(head) :]
    tail = rest[max(0, len(rest) - tail_bytes) :]
    while tail != rest and tail and tail[0] & 0xC0 == 0x80:
        tail = tail[1:]
    lines = tail.splitlines(keepends=True)
    return head, b"".join(lines[max(0, len(lines) - tail_lines) :])


def _without_half_a_character(data: bytes) -> bytes:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return data.removesuffix(decoder.getstate()[0])


def _captured(
    capture: BuiltPart, cap: tuple[int, int], pieces: Sequence[bytes]
) -> tuple[bytes, bytes, int, int, int]:
    """Return the head, the tail, and the numbers of bytes, lines and shown lines."""
    caps = b"".join(number.to_bytes(4, "big") for number in cap)
    head, tail, *counts = capture.shown(caps + b"".join(map(block, pieces))).split(" ")
    length, lines, shown_lines = map(int, counts)
    return bytes.fromhex(head), bytes.fromhex(tail), length, lines, shown_lines


def _shown(packets: list[Packet]) -> str:
    """Return what the part prints for packets."""
    return "".join(f"{' '.join(map(str, each[:-1]))} {each.payload.hex()}," for each in packets)


def _pieces(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    """Split data at those of these positions that it has."""
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    return [data[start:end] for start, end in pairwise(places)]


def _frames(pieces: Sequence[bytes]) -> str:
    decoder = Decoder(MAX_OPEN_BYTES)
    shown = ""
    try:
        for piece in pieces:
            for stream, kind, payload in decoder.feed(piece):
                shown += f"{stream} {kind} {payload.hex()},"
    except ProtocolError:
        shown += "too long"
    return shown


def _documents() -> Iterator[bytes]:
    chance = random.Random(SEED)
    for _ in range(CASES):
        document = bytearray(chance.choice(DOCUMENTS))
        for _ in range(chance.randrange(4)):
            at = chance.randrange(len(document) + 1)
            until = min(len(document), at + chance.randrange(8))
            change = chance.choice(
                [b"", chance.choice(TOKENS), chance.randbytes(1), bytes(document[at:until]) * 2]
            )
            document[at:until] = change
        yield bytes(document)


def _show(text: str) -> str:
    """Return the output of the program for a text: "-" if it is not JSON or is too deep."""
    try:
        value = json.loads(text, object_pairs_hook=_Pairs, parse_int=float, parse_constant=_refuse)
    except ValueError:
        return "-"
    return _show_value(value) if _depth(value) <= MAX_DEPTH else "-"


class _Pairs(list[tuple[str, object]]):
    """A JSON object with all members, including duplicate names."""


def _refuse(name: str) -> None:
    raise ValueError(name)


def _show_value(value: object) -> str:
    if isinstance(value, _Pairs):
        members = "".join(f"{_hex(name)}:{_show_value(member)}," for name, member in value)
        return "{" + members + "]"
    if isinstance(value, list):
        return "[" + "".join(f":{_show_value(member)}," for member in value) + "]"
    if isinstance(value, str):
        return '"' + _hex(value)
    if isinstance(value, bool) or value is None:
        return {None: "n", False: "f", True: "t"}[value]
    return f"#{value:.17g}"


def _depth(value: object) -> int:
    if isinstance(value, _Pairs):
        return 1 + max((_depth(member) for _, member in value), default=-1)
    if isinstance(value, list):
        return 1 + max(map(_depth, value), default=-1)
    return 0


def _hex(text: str) -> str:
    return text.encode("utf-8", "surrogatepass").hex()


def _native(text: str) -> str:
    try:
        data = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return "-"
    return "-" if b"\0" in data else data.hex()
