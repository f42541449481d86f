"""What clients may send on one connection, byte by byte."""

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
OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEA\r\n"
BODY = json.dumps(
    {"model": "fake-model", "messages": [{"role": "user", "content": "Hello."}]}
).encode()
LENGTH = b"Content-Length: %d\r\n\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n" % (len(BODY), BODY)
DATA_SEGMENTS_IN = slice(152, 156)
"""Where `struct tcp_info` of linux/tcp.h has `tcpi_data_segs_in`."""
TCP_INFO_BYTES = DATA_SEGMENTS_IN.stop
FLOOD = b"X: " + b"a" * 8000 + b"\r\n"


class Wire:
    """A connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, *pieces: bytes) -> None:
        """Each so that it arrives by itself."""
        for piece in pieces:
            self._writer.write(piece)
            await self._writer.drain()
            await anyio.wait_all_tasks_blocked()

    async def answer(self) -> tuple[int, str]:
        """The next one's status and body."""
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().partition("content-length: ")[2].split()[0])
        return int(head.split()[1]), (await self._reader.readexactly(length)).decode()

    def packets(self) -> int:
        """How many packets with anything in them have come."""
        connection = self._writer.get_extra_info("socket")
        told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
        return int.from_bytes(told[DATA_SEGMENTS_IN], sys.byteorder)

    async def is_closed(self) -> bool:
        """Whether the server hangs up."""
        try:
            return await self._reader.read(1) == b""
        except ConnectionError:
            return True


@asynccontextmanager
async def wired(state_dir: Path) -> AsyncIterator[Wire]:
    async with (
        scripted_backend(lambda _: text_reply("Hello you.")) as backend,
        running_proxy(backend, "memory", state_dir) as url,
    ):
        address = httpx.URL(url)
        reader, writer = await asyncio.open_connection(address.host, address.port)
        with anyio.fail_after(20):
            yield Wire(reader, writer)
        writer.close()


@pytest.mark.parametrize("cut", [0, 30, len(POST + OFFER + LENGTH), -1])
async def test_an_offer_of_http_2_is_passed_over_wherever_it_comes(
    cut: int, tmp_path: Path
) -> None:
    plain, offering = POST + LENGTH + BODY, POST + OFFER + LENGTH + BODY
    async with wired(tmp_path) as wire:
        for request in (plain, offering, plain, offering):
            await wire.send(request[:cut], request[cut:])
            status, answer = await wire.answer()
            assert (status, "Hello you." in answer) == (200, True)


async def test_an_offer_before_the_last_answer_is_refused(tmp_path: Path) -> None:
    async with wired(tmp_path) as wire:
        await wire.send(POST + LENGTH + BODY + POST + OFFER + LENGTH + BODY)
        assert (await wire.answer())[0] == 400
        assert await wire.is_closed()


@pytest.mark.parametrize("begin", [b"", POST, POST + CHUNKED], ids=["line", "head", "trailers"])
async def test_what_never_ends_is_refused(begin: bytes, tmp_path: Path) -> None:
    flood = [FLOOD] * 20 if begin else [b"GET /" + b"a" * 8000, *[b"a" * 8000] * 20]
    async with wired(tmp_path) as wire:
        try:
            await wire.send(begin, *flood)
        except ConnectionError:
            pass  # it was refused before all had come
        else:
            assert (await wire.answer())[0] == 400
        assert await wire.is_closed()


async def test_a_large_head_that_ends_is_read(tmp_path: Path) -> None:
    async with wired(tmp_path) as wire:
        await wire.send(POST, *[FLOOD] * 7, LENGTH + BODY)
        assert (await wire.answer())[0] == 200


@pytest.mark.parametrize("offer", [b"", OFFER], ids=["http/1.1", "http/2 offered"])
async def test_an_answers_head_and_body_come_in_one_packet(offer: bytes, tmp_path: Path) -> None:
    async with wired(tmp_path) as wire:
        await wire.send(POST + offer + LENGTH + BODY)
        assert (await wire.answer())[0] == 200
        assert wire.packets() == 1
