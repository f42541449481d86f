"""BufferedReader finds heads and lines in arbitrary pieces, within maximum sizes."""

import pytest

from sandbox_runtime.egress.connection import BufferedReader
from sandbox_runtime.egress.decision import DeniedError
from tests.sandbox_runtime.egress.programs import PieceConnection

HEAD = b"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n"


@pytest.mark.parametrize("at", range(1, len(HEAD)))
async def test_request_head_ends_at_its_empty_line(at: int) -> None:
    reader = BufferedReader(PieceConnection([HEAD[:at], HEAD[at:] + b"body\r\n\r\n"]))
    assert await reader.read_head(1000) == HEAD
    assert await reader.read_line(100) == b"body\r\n"


async def test_request_head_may_arrive_byte_by_byte() -> None:
    reader = BufferedReader(PieceConnection([bytes((byte,)) for byte in HEAD]))
    assert await reader.read_head(len(HEAD)) == HEAD
    assert await reader.peek() is None
    assert await reader.read(10) == b""


async def test_bare_line_feeds_end_a_request_head() -> None:
    reader = BufferedReader(PieceConnection([b"GET / HTTP/1.1\n\nbody", b"\r\n\r\n"]))
    assert await reader.read_head(1000) == b"GET / HTTP/1.1\n\n"


async def test_too_long_or_incomplete_input_is_denied() -> None:
    with pytest.raises(DeniedError, match="more than 20 bytes"):
        await BufferedReader(PieceConnection([HEAD])).read_head(20)
    with pytest.raises(DeniedError, match="more than 20 bytes"):
        await BufferedReader(PieceConnection([b"x" * 8] * 100)).read_line(20)
    for read in (
        BufferedReader(PieceConnection([HEAD[:-1]])).read_head(100),
        BufferedReader(PieceConnection([b"abc"])).read_exactly(4),
    ):
        with pytest.raises(DeniedError, match="ends in its middle"):
            await read
