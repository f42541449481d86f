"""Naive implementations of the host, each without one boundary on the side of the host."""

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import AsyncIterable, Collection
from typing import Any

from policies.egress import Egress
from sandbox_runtime.egress.connection import Connection
from sandbox_runtime.egress.dialer import Connect, Endpoint, Resolve
from sandbox_runtime.egress.limits import Timeouts, TrafficQuota
from sandbox_runtime.errors import SandboxLostError
from sandbox_runtime.guest_sandbox import GuestSandbox
from sandbox_runtime.protocol import DATA, END, MAX_REPORT_BYTES, Decoder, parse_object
from sandbox_runtime.sandbox import (
    LIST_TIMEOUT_S,
    TRANSFER_TIMEOUT_S,
    DirectoryEntry,
    ExecResult,
    HashLimits,
    Listing,
    OutputCap,
    Sink,
)

PLENTY = OutputCap(max_bytes=1 << 30, max_lines=1 << 30)


class NaiveFiles(GuestSandbox):
    """Checks whether a path is a link before using it, which is a race."""

    async def put(
        self,
        path: str,
        source: AsyncIterable[bytes],
        *,
        new: bool = False,
        timeout_s: float = TRANSFER_TIMEOUT_S,
    ) -> int:
        data = b"".join([piece async for piece in source])
        await self._shell('[ -L "$FILE" ] || cat > "$FILE"', path, stdin=data)
        return len(data)

    async def get(
        self, path: str, sink: Sink, *, max_bytes: int, timeout_s: float = TRANSFER_TIMEOUT_S
    ) -> int:
        text = await self._shell('[ -L "$FILE" ] || timeout 1 head -c 4M "$FILE"', path)
        await sink(text.encode())
        return len(text)

    async def list(
        self,
        path: str,
        *,
        max_entries: int = 10_000,
        max_depth: int | None = None,
        hashes: HashLimits | None = None,
        timeout_s: float = LIST_TIMEOUT_S,
    ) -> Listing:
        text = await self._shell('cd "$FILE" && find -L * -maxdepth 0 -printf "%p %y\\n"', path)
        kinds = dict(line.rsplit(" ", 1) for line in text.splitlines())
        entries = [
            DirectoryEntry(name, "directory" if kind == "d" else "file", 0)
            for name, kind in kinds.items()
        ]
        return Listing(tuple(entries), truncated=False)

    async def _shell(self, command: str, path: str, stdin: bytes = b"") -> str:
        result = await self.exec(
            command, timeout_s=20, env={"FILE": path}, stdin=stdin, cap=PLENTY, shell_state="none"
        )
        return result.stdout


class NaiveCommands(GuestSandbox):
    """Reports a lost sandbox as a failed command."""

    async def exec(self, command: str, **options: Any) -> ExecResult:
        try:
            return await super().exec(command, **options)
        except SandboxLostError as error:
            return ExecResult(137, "", str(error), False, False, 0.0, 0, 0)


class NaiveFrames(GuestSandbox):
    """Parses frames in the output of commands."""

    async def exec(self, command: str, **options: Any) -> ExecResult:
        result = await super().exec(command, **options)
        stdout, exit_code = result.stdout, result.exit_code
        for _, kind, payload in Decoder(MAX_REPORT_BYTES).feed(result.stdout.encode()):
            if kind == DATA:
                stdout = payload.decode()
            if kind == END:
                exit_code = int(str(parse_object(payload)["exit_code"]))
        return ExecResult(exit_code, stdout, "", False, False, 0.0, 0, 0)


class NaiveOutput(GuestSandbox):
    """Keeps all output of a command."""

    async def exec(self, command: str, **options: Any) -> ExecResult:
        return await super().exec(command, **{**options, "cap": PLENTY})


class NaiveGateway:
    """Connects to any host, and resolves a name once to check it and again to dial it."""

    def __init__(
        self,
        egress: Egress,
        *,
        resolve: Resolve,
        connect: Connect,
        forbidden: Collection[Endpoint],
        timeouts: Timeouts,
    ) -> None:
        self._resolve = resolve
        self._connect = connect
        self._serving: set[asyncio.Task[Any]] = set()
        self.traffic = TrafficQuota()  # neither counts nor limits anything

    async def serve(self, connection: Connection) -> None:
        serving = asyncio.current_task()
        assert serving
        self._serving.add(serving)
        try:
            await self._serve(connection)
        finally:
            self._serving.discard(serving)
            connection.abort()

    async def aclose(self) -> None:
        if ending := set(self._serving):
            for serving in ending:
                serving.cancel()
            await asyncio.wait(ending)

    async def _serve(self, connection: Connection) -> None:
        with contextlib.suppress(ConnectionError, OSError, ValueError):
            host, port, rest = await self._asked(connection)
            reader, writer = await self._connect(await self._address(host), port)
            writer.write(rest)
            try:
                await asyncio.gather(_up(connection, writer), _down(reader, connection))
            finally:
                writer.close()

    async def _asked(self, connection: Connection) -> tuple[str, int, bytes]:
        data = await connection.receive()
        if data.startswith(b"\x05"):
            name = data[8 : 8 + data[7]]
            return name.decode(), int.from_bytes(data[8 + len(name) :][:2], "big"), b""
        while b"\r\n\r\n" not in data:
            more = await connection.receive()
            if not more:
                raise ConnectionError("the request ends in its middle")
            data += more
        method, url = data.decode("latin-1").split(" ", 2)[:2]
        if method == "CONNECT":
            await connection.send(b"HTTP/1.1 200 OK\r\n\r\n")
            return *_host_and_port(url), data.partition(b"\r\n\r\n")[2]
        return *_host_and_port(url.removeprefix("http://").split("/")[0]), data

    async def _address(self, host: str) -> str:
        with contextlib.suppress(OSError):
            return socket.inet_ntoa(socket.inet_aton(host))
        with contextlib.suppress(ValueError):
            return str(ipaddress.ip_address(host))
        await self._resolve(host)
        return (await self._resolve(host))[0]


class NaiveConnectionLimit(NaiveGateway):
    """Limits the number of connections, but not their duration."""

    def __init__(self, egress: Egress, **options: Any) -> None:
        super().__init__(egress, **options)
        self._room = asyncio.Semaphore(egress.max_connections)

    async def _serve(self, connection: Connection) -> None:
        async with self._room:
            await super()._serve(connection)


def _host_and_port(authority: str) -> tuple[str, int]:
    host, colon, port = authority.rpartition("@")[2].rpartition(":")
    return (host.strip("[]"), int(port)) if colon else (port, 80)


async def _up(connection: Connection, writer: asyncio.StreamWriter) -> None:
    while data := await connection.receive():
        writer.write(data)
        await writer.drain()


async def _down(reader: asyncio.StreamReader, connection: Connection) -> None:
    while data := await reader.read(1 << 16):
        await connection.send(data)
    connection.abort()
