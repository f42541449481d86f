"""HTTP/1.1 on one raw connection, byte by byte."""

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx
import pytest

from proxy.models.scripted import text_reply
from tests.fakes.backend import scripted_backend
from tests.fakes.server import running_proxy

POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\n"
UPGRADE_OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEA\r\n"
BODY = json.dumps(
    {"model": "fake-model", "messages": [{"role": "user", "content": "Hello."}]}
).encode()
LENGTH = b"Content-Length: %d\r\n\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n" % (len(BODY), BODY)
DATA_SEGMENTS_IN = slice(152, 156)
"""Offset of `tcpi_data_segs_in` in `struct tcp_info` of linux/tcp.h."""
TCP_INFO_BYTES = DATA_SEGMENTS_IN.stop
FLOOD = b"X: " + b"a" * 8000 + b"\r\n"


class RawConnection:
    """A raw connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, *pieces: bytes) -> None:
        """Send each piece in a packet of its own."""
        for piece in pieces:
            self._writer.write(piece)
            await self._writer.drain()
            await anyio.wait_all_tasks_blocked()

    async def answer(self) -> tuple[int, str]:
        """Return status and body of the next answer."""
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().partition("content-length: ")[2].split()[0])
        return int(head.split()[1]), (await self._reader.readexactly(length)).decode()

    def packets(self) -> int:
        """Return the number of received packets with data."""
        connection = self._writer.get_extra_info("socket")
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
        return int.from_bytes(info[DATA_SEGMENTS_IN], sys.byteorder)

    async def is_closed(self) -> bool:
        """Return True if the server closes the connection."""
        try:
            return await self._reader.read(1) == b""
        except ConnectionError:
            return True


@asynccontextmanager
async def raw_connection(state_dir: Path) -> AsyncIterator[RawConnection]:
    async with (
        scripted_backend(lambda _: text_reply("Hello you.")) as backend,
        running_proxy(backend, "memory", state_dir) as url,
    ):
        address = httpx.URL(url)
        reader, writer = await asyncio.open_connection(address.host, address.port)
        with anyio.fail_after(20):
            yield RawConnection(reader, writer)
        writer.close()


@pytest.mark.parametrize("cut", [0, 30, len(POST + UPGRADE_OFFER + LENGTH), -1])
async def test_h2c_upgrade_offer_is_ignored(cut: int, tmp_path: Path) -> None:
    plain, offering = POST + LENGTH + BODY, POST + UPGRADE_OFFER + LENGTH + BODY
    async with raw_connection(tmp_path) as connection:
        for request in (plain, offering, plain, offering):
            await connection.send(request[:cut], request[cut:])
            status, answer = await connection.answer()
            assert (status, "Hello you." in answer) == (200, True)


async def test_h2c_upgrade_offer_in_a_pipelined_request_is_refused(tmp_path: Path) -> None:
    async with raw_connection(tmp_path) as connection:
        await connection.send(POST + LENGTH + BODY + POST + UPGRADE_OFFER + LENGTH + BODY)
        assert (await connection.answer())[0] == 400
        assert await connection.is_closed()


@pytest.mark.parametrize("begin", [b"", POST, POST + CHUNKED], ids=["line", "head", "trailers"])
async def test_request_head_without_an_end_is_refused(begin: bytes, tmp_path: Path) -> None:
    flood = [FLOOD] * 20 if begin else [b"GET /" + b"a" * 8000, *[b"a" * 8000] * 20]
    async with raw_connection(tmp_path) as connection:
        try:
            await connection.send(begin, *flood)
        except ConnectionError:
            pass  # refused before everything was sent
        else:
            assert (await connection.answer())[0] == 400
        assert await connection.is_closed()


async def test_large_request_head_within_the_limit_is_read(tmp_path: Path) -> None:
    async with raw_connection(tmp_path) as connection:
        await connection.send(POST, *[FLOOD] * 7, LENGTH + BODY)
        assert (await connection.answer())[0] == 200


@pytest.mark.parametrize("upgrade_offer", [b"", UPGRADE_OFFER], ids=["http/1.1", "http/2 offered"])
async def test_head_and_body_of_a_response_are_sent_in_one_packet(
    upgrade_offer: bytes, tmp_path: Path
) -> None:
    async with raw_connection(tmp_path) as connection:
        await connection.send(POST + upgrade_offer + LENGTH + BODY)
        assert (await connection.answer())[0] == 200
        assert connection.packets() == 1
