"""Parts of the native agent held against Python's own, on thousands of cases, the same each run."""

import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_runtime.guest.capture import Capture
from sandbox_runtime.protocol import MAX_OPEN_BYTES, Decoder, ProtocolError, frame
from tests.sandbox_runtime.guest.native_build import ENV, build_parts

SEED = 20261120
CASES = 4000
MAX_DEPTH = 64
DOCUMENTS = [
    b'{"op": "exec", "id": "c1", "timeout_s": 120.5, "cwd": null, "env": {"A": "b\\n"}, "x": []}',
    b'{"op": "list", "path": "/t\\u00e9\\ud83c\\udf89\\udce9/\\"q\\"", "hashes": true, "n": -1e-5}',
    b'[[1, 2.50, 0, -0.0, 1E+3], {"": {"": [false]}}, "\xc3\xa9\xed\xb3\xa9", "\\ud800x", "\\/"]',
    b' \t\r\n{"command": "echo \'x\' \\\\ \\b\\f\\u0000", "max": 123456789012345678901234567890}\n',
]
TOKENS = [b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"\\u", b"\\ud83d", b"null", b"1e", b"-"]
Parts = Path


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Parts:
    return build_parts(tmp_path_factory.mktemp("parts"))


def test_json_means_what_it_means_to_python(parts: Parts) -> None:
    cases = list(_documents())
    shown = _run(parts, "json", cases)
    understood = 0
    for case, line in zip(cases, shown, strict=True):
        try:
            text = case.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            continue  # it is enough that it did no harm
        assert line == _show(text), case
        understood += line != "-"
    assert CASES // 10 < understood < CASES


def test_deep_json_is_refused(parts: Parts) -> None:
    depths = [1, MAX_DEPTH, MAX_DEPTH + 1, 100_000]
    cases = [b"[" * depth + b"]" * (depth - 1) + b"]" for depth in depths]
    cases = [case.replace(b"[]", b"[0]") for case in cases]
    lines = _run(parts, "json", cases)
    assert [line == "-" for line in lines] == [False, False, True, True]


def test_a_text_is_given_to_the_kernel_as_python_would(parts: Parts) -> None:
    chance = random.Random(SEED)
    letters = ["a", "é", "数", "🎉", "\udc80", "\udcff", "\0", "\ud800", "\udbff"]
    texts = ["".join(chance.choices(letters[: chance.choice([6, 9])], k=8)) for _ in range(CASES)]
    sent = [json.dumps(text) for text in texts]  # where two surrogates may become one character
    lines = _run(parts, "native", [text.encode() for text in sent])
    assert lines == [_native(json.loads(text)) for text in sent]
    assert 0 < lines.count("-") < CASES


def test_frames_are_cut_as_python_cuts_them(parts: Parts) -> None:
    chance = random.Random(SEED)
    cases = []
    for _ in range(CASES):
        frames = [
            frame(
                chance.getrandbits(32),
                chance.getrandbits(8),
                chance.randbytes(chance.choice([0, 1, 9, 300])),
            )
            for _ in range(chance.randrange(4))
        ]
        data = bytearray(b"".join(frames))
        if data and chance.random() < 0.5:
            data[chance.randrange(len(data))] = chance.getrandbits(8)
        cases.append(
            bytes(data[: chance.randrange(len(data) + 1)]) if chance.random() < 0.5 else bytes(data)
        )
    assert _run(parts, "frames", cases) == [_frames(case) for case in cases]


def test_output_is_captured_as_python_captures_it(parts: Parts) -> None:
    chance = random.Random(SEED)
    cases, expected = [], []
    for _ in range(CASES):
        cap = chance.choice([2, 3, 7, 50, 4096, 9000]), chance.choice([0, 1, 2, 5, 1000])
        pieces = [
            bytes(
                chance.choices(
                    b"ab\n",
                    (5, 5, chance.choice([0, 1, 5])),
                    k=chance.choice([1, 3, 20, 300, 5000]),
                )
            )
            for _ in range(chance.randrange(6))
        ]
        cases.append(b"".join(n.to_bytes(4, "big") for n in cap) + b"".join(map(_block, pieces)))
        expected.append(_captured(Capture(*cap), pieces))
    assert _run(parts, "capture", cases) == expected


def test_no_cut_leaves_half_a_character(parts: Parts) -> None:
    chance = random.Random(SEED)
    cases = []
    for _ in range(CASES):
        cap = chance.randrange(40), 1000
        text = "".join(chance.choices("aé数🎉", k=chance.randrange(60)))
        cases.append(b"".join(n.to_bytes(4, "big") for n in cap) + _block(text.encode()))
    for line in _run(parts, "capture", cases):
        head, tail = (bytes.fromhex(shown).decode() for shown in line.split(" ")[:2])
        assert len((head + tail).encode()) <= 40


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


def _run(parts: Parts, name: str, cases: list[bytes]) -> list[str]:
    ran = subprocess.run(
        [parts, name], input=b"".join(map(_block, cases)), capture_output=True, env=ENV, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, b"")
    return ran.stdout.decode().split("\n")[:-1]


def _block(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


def _show(text: str) -> str:
    """As the program shows it: "-" for what is not JSON, or deeper than it goes."""
    try:
        value = json.loads(text, object_pairs_hook=_Pairs, parse_int=float, parse_constant=_refuse)
    except ValueError:
        return "-"
    return _show_value(value) if _depth(value) <= MAX_DEPTH else "-"


class _Pairs(list[tuple[str, object]]):
    """An object with all its members, also those of the same name."""


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


def _frames(data: bytes) -> str:
    shown = ""
    try:
        for stream, kind, payload in Decoder(MAX_OPEN_BYTES).feed(data):
            shown += f"{stream} {kind} {payload.hex()},"
    except ProtocolError:
        shown += "too long"
    return shown


def _captured(capture: Capture, pieces: list[bytes]) -> str:
    head = b"".join(map(capture.feed, pieces))
    tail = capture.tail()
    counts = capture.total_bytes, capture.total_lines, capture.shown_lines
    return f"{head.hex()} {tail.hex()} {counts[0]} {counts[1]} {counts[2]}"
