"""Random files, listings and frames, compared with small models."""

import hashlib
import json
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_runtime.protocol import (
    CREDIT,
    DATA,
    END,
    EOF,
    FIRST_WINDOW_BYTES,
    OPEN,
    PING,
    PONG,
    WINDOW,
    WINDOW_BYTES,
    frame,
    json_frame,
)
from tests.sandbox_runtime.guest.agent_process import EXEC, AgentProcess, agent_process

Tree = Mapping[str, "bytes | Tree"]
SIZES = st.integers(0, 3 * WINDOW_BYTES) | st.sampled_from([FIRST_WINDOW_BYTES, WINDOW_BYTES])
NAMES = st.text("abé", min_size=1, max_size=3)
TREES: st.SearchStrategy[Any] = st.dictionaries(
    NAMES,
    st.recursive(
        st.binary(max_size=20),
        lambda nodes: st.dictionaries(NAMES, nodes, max_size=4),
        max_leaves=12,
    ),
    max_size=5,
)


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentProcess]:
    with agent_process(tmp_path_factory.mktemp("agent"), watchdog_s=0.0) as process:
        yield process


# Files


def _content(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def _put(agent: AgentProcess, path: str, pieces: Sequence[bytes]) -> None:
    """Write a file; the agent gives back the credit of each piece, and no more."""
    stream = agent.new_stream()
    agent.open(stream, op="put", path=path)
    for piece in pieces:
        agent.send(frame(stream, DATA, piece))
        assert agent.receive() == (stream, WINDOW, CREDIT.pack(len(piece)))
    agent.send(frame(stream, EOF))
    assert agent.read_to_end(stream)[2] == {"bytes": sum(map(len, pieces))}


@given(sizes=st.lists(st.integers(1, WINDOW_BYTES), max_size=6))
def test_uploaded_file_is_the_concatenation_of_its_pieces(
    agent: AgentProcess, sizes: list[int]
) -> None:
    pieces = [_content(size) for size in sizes]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "new", "file")
        _put(agent, str(path), pieces)
        assert path.read_bytes() == b"".join(pieces)


@given(size=SIZES, grants=st.lists(st.integers(1, WINDOW_BYTES), max_size=8))
def test_agent_sends_no_more_file_data_than_the_credit_of_its_host(
    agent: AgentProcess, size: int, grants: list[int]
) -> None:
    """Expected: as many bytes as there is credit for, and the end once credit exceeds the size."""
    content, stream = _content(size), agent.new_stream()
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        agent.open(stream, op="get", path=file.name, max_bytes=size)
        received, credit = b"", FIRST_WINDOW_BYTES
        while credit <= size:
            received += _data(agent, stream, credit - len(received))
            agent.send(frame(0, PING))
            assert agent.receive() == (0, PONG, b"")  # it has sent nothing beyond its credit
            grant = grants.pop() if grants else WINDOW_BYTES
            agent.send(frame(stream, WINDOW, CREDIT.pack(grant)))
            credit += grant
        received += _data(agent, stream, size - len(received))
        assert received == content
        assert agent.read_to_end(stream)[2] == {"bytes": size}


def _data(agent: AgentProcess, stream: int, size: int) -> bytes:
    """Return the next `size` bytes of a stream."""
    data = b""
    while len(data) < size:
        received = agent.receive()
        assert received is not None
        assert received[:2] == (stream, DATA)
        data += received[2]
    assert len(data) == size
    return data


@given(size=st.integers(0, 1000), most=st.integers(0, 1000))
def test_file_larger_than_max_bytes_is_refused(agent: AgentProcess, size: int, most: int) -> None:
    stream = agent.new_stream()
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(size))
        file.flush()
        agent.open(stream, op="get", path=file.name, max_bytes=most)
        content, _, report = agent.read_to_end(stream)
    if size > most:
        assert (content, report["error"]) == ("", "too_large")
    else:
        assert (len(content), report) == (size, {"bytes": size})


# Listings


@given(
    tree=TREES,
    max_depth=st.none() | st.integers(1, 4),
    max_entries=st.integers(0, 20),
    hash_bytes=st.none() | st.integers(0, 20),
)
def test_listing_has_all_entries_within_its_limits(
    agent: AgentProcess,
    tree: Tree,
    max_depth: int | None,
    max_entries: int,
    hash_bytes: int | None,
) -> None:
    stream = agent.new_stream()
    limits = {"max_depth": max_depth, "max_entries": max_entries}
    hashes = {"hash_bytes": hash_bytes, "hash_s": None if hash_bytes is None else 60}
    with tempfile.TemporaryDirectory() as directory:
        _plant(Path(directory), tree)
        agent.open(stream, op="list", path=directory, **limits, **hashes)
        lines, _, report = agent.read_to_end(stream)
    listed = [tuple(json.loads(line)) for line in lines.splitlines()]
    there = set(_entries(tree, max_depth, hash_bytes))
    assert report == {"truncated": len(there) > max_entries}
    assert len(set(listed)) == len(listed) == min(len(there), max_entries)
    assert there.issuperset(listed)
    for place, (path, *_) in enumerate(listed):  # a directory comes before what is in it
        above = path.rpartition("/")[0]
        assert not above or above in (each[0] for each in listed[:place])


def _plant(directory: Path, tree: Tree) -> None:
    for name, node in tree.items():
        if isinstance(node, bytes):
            (directory / name).write_bytes(node)
        else:
            (directory / name).mkdir()
            _plant(directory / name, node)


def _entries(
    tree: Tree, max_depth: int | None, hash_bytes: int | None, above: str = ""
) -> Iterator[tuple[object, ...]]:
    """The model: all entries of a listing without bounds but that of its depth."""
    for name, node in tree.items():
        if not isinstance(node, bytes):
            yield above + name, "directory", 0
            if max_depth is None or max_depth > 1:
                below = None if max_depth is None else max_depth - 1
                yield from _entries(node, below, hash_bytes, f"{above}{name}/")
        elif hash_bytes is None or len(node) > hash_bytes:
            yield above + name, "file", len(node)
        else:
            yield above + name, "file", len(node), hashlib.sha256(node).hexdigest()


# Frames


@given(cuts=st.lists(st.integers(0, 1200), max_size=40))
def test_agent_reads_frames_that_are_cut_anywhere(agent: AgentProcess, cuts: list[int]) -> None:
    put, cat, get = (agent.new_stream() for _ in range(3))
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/file"
        sent = b"".join(
            (
                json_frame(put, OPEN, {"op": "put", "path": path}),
                *(frame(put, DATA, b"first"), frame(0, PING), frame(put, DATA, b" second")),
                frame(put, EOF),
                json_frame(cat, OPEN, {**EXEC, "id": str(cat), "command": "cat", "stdin": "data"}),
                *(frame(cat, DATA, b"third"), frame(cat, EOF), frame(0, PING)),
                json_frame(get, OPEN, {"op": "get", "path": path, "max_bytes": 100}),
            )
        )
        for start, end in pairwise(sorted({0, len(sent), *(cut % len(sent) for cut in cuts)})):
            agent.send(sent[start:end])
        data = _until_ended(agent, {put, cat, get})
    assert data[0] == b""
    assert (data[cat], data[get]) == (b"third", b"first second")


def _until_ended(agent: AgentProcess, streams: set[int]) -> Mapping[int, bytes]:
    """The data of each stream, all of which end without an error; stream 0 only answers pings."""
    data = dict.fromkeys({0, *streams}, b"")
    left = set(streams)
    while left:
        received = agent.receive()
        assert received is not None
        stream, kind, payload = received
        if kind == END:
            assert "error" not in json.loads(payload)
            left.remove(stream)
        elif kind != WINDOW:
            assert kind == (DATA if stream else PONG)
            data[stream] += payload
    return data
