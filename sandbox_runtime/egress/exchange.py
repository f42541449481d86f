"""One plain HTTP request and its answer."""

import re

from policies.hosts import Target
from sandbox_runtime.egress.connection import Inbox
from sandbox_runtime.egress.errors import DeniedError
from sandbox_runtime.egress.relay import PIECE_BYTES, Relay
from sandbox_runtime.egress.request_head import (
    CHUNKED,
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    Header,
    RequestHead,
    parse,
    response_head,
)

_CHUNK_START = re.compile(rb"([0-9A-Fa-f]{1,8})(?:;[\t\x20-\x7e\x80-\xff]*)?\r\n")
_MAX_LINE_BYTES = 4096


async def read_request(inbox: Inbox, target: Target) -> RequestHead:
    """A request as a server gets it, inside a tunnel to `target`. Raises DeniedError."""
    head = parse(await inbox.head(MAX_HEAD_BYTES))
    if not head.url.startswith("/"):
        raise DeniedError(f"only HTTP requests for a path pass to port {target.port}", 400)
    head.check_host(target)
    return head


async def exchange(
    relay: Relay, head: RequestHead, target: Target, bound: tuple[Header, ...]
) -> None:
    """Pass one request and its answer, then no more. Raises ConnectionError, EgressError."""

    async def up() -> None:
        await relay.up(head.rewritten(target, bound))
        if head.body_bytes == CHUNKED:
            await _chunks_up(relay)
        else:
            await _bytes_up(relay, head.body_bytes)
        await relay.until_closed()

    async def down() -> None:
        status = 100
        while status < 200:
            status, answer = response_head(await relay.head_from_server())
            await relay.down(answer)
        await relay.rest_down()
        relay.answered()

    await relay.run(up, down)


async def _bytes_up(relay: Relay, count: int) -> None:
    while count:
        data = await relay.inbox.some(min(count, PIECE_BYTES))
        if not data:
            raise DeniedError("the body ends in its middle", 400)
        count -= len(data)
        await relay.up(data)


async def _chunks_up(relay: Relay) -> None:
    """Chunks of a body, framed anew."""
    while count := await _chunk_bytes(relay.inbox):
        await relay.up(b"%x\r\n" % count)
        await _bytes_up(relay, count)
        if await relay.inbox.exactly(2) != b"\r\n":
            raise DeniedError("malformed chunk", 400)
        await relay.up(b"\r\n")
    for _ in range(MAX_HEADERS):
        if await relay.inbox.line(_MAX_LINE_BYTES) == b"\r\n":
            await relay.up(b"0\r\n\r\n")
            return
    raise DeniedError("malformed trailer", 400)


async def _chunk_bytes(inbox: Inbox) -> int:
    match = _CHUNK_START.fullmatch(await inbox.line(_MAX_LINE_BYTES))
    if not match:
        raise DeniedError("malformed chunk", 400)
    return int(match[1], 16)
