"""A fast HTTP client: prepared requests over keep-alive connections."""

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Burst:
    """The throughput and latencies of a number of requests."""

    requests_per_s: float
    latencies_ms: list[float]


def post_request(path: str, body: dict[str, Any], key: str) -> bytes:
    """Return the bytes of a POST request with a JSON body."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {key}\r\n"
    return (
        f"{head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode()
        + data
    )


def _get_request(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: bench\r\n\r\n".encode()


async def is_answering(port: int, path: str) -> bool:
    """Return True if the server answers the path with 200."""
    try:
        connection = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    try:
        head, _ = await _send_request(connection, _get_request(path))
    except (OSError, EOFError):
        return False
    finally:
        connection[1].close()
    return head.startswith(b"HTTP/1.1 200")


async def get_body(port: int, path: str) -> bytes:
    """Return the body of a GET response."""
    connection = await asyncio.open_connection("127.0.0.1", port)
    try:
        return (await _send_request(connection, _get_request(path)))[1]
    finally:
        connection[1].close()


async def send_burst(
    port: int, request: bytes, *, count: int, concurrency: int, expected_bytes: bytes = b""
) -> Burst:
    """Send `count` requests, at most `concurrency` at a time.

    Raises RuntimeError for an error status, and for an answer without `expected_bytes`.
    """
    connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(concurrency)]
    left = iter(range(count))
    latencies: list[float] = []

    async def work(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        for _ in left:
            started = time.perf_counter()
            head, body = await _send_request(connection, request)
            if not head.startswith(b"HTTP/1.1 200") or expected_bytes not in body:
                raise RuntimeError(f"port {port}: {head[:100]!r} {body[:300]!r}")
            latencies.append((time.perf_counter() - started) * 1000)

    started = time.perf_counter()
    await asyncio.gather(*(work(connection) for connection in connections))
    took_s = time.perf_counter() - started
    for _, writer in connections:
        writer.close()
    return Burst(count / took_s, latencies)


async def _send_request(
    connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], request: bytes
) -> tuple[bytes, bytes]:
    reader, writer = connection
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    _, measured, rest = head.lower().partition(b"content-length:")
    if measured:
        return head, await reader.readexactly(int(rest.partition(b"\r\n")[0]))
    return head, await reader.readuntil(b"\r\n0\r\n\r\n")
