"""A container's standard streams over the engine's attach call, as one asyncio connection.

The SDK's attach gives a blocking socket; asking for the upgrade ourselves serves unix, tcp and
TLS engines alike without a thread.
"""

import asyncio
import os
import ssl
import struct
from pathlib import Path
from urllib.parse import urlsplit

from sandbox_runtime.backends.base import Take
from sandbox_runtime.backends.byte_stream import Duplex, StderrTail
from sandbox_runtime.errors import SandboxStartError
from sandbox_runtime.protocol import FrameRate

HEADER = struct.Struct(">BxxxI")
STDOUT = 1


class Attachment:
    """Bytes to and from a container's main process."""

    def __init__(self, duplex: Duplex) -> None:
        self._duplex = duplex
        self._buffer = bytearray()
        self._stderr = StderrTail()
        self._frame_rate = FrameRate()
        """The rate of the engine's frames: each write of the agent may be one frame."""

    async def listen(self, take: Take) -> None:
        """Hand over standard output until its end. Standard error is kept aside. Raises
        ProtocolError."""

        def demultiplex(data: bytes | memoryview) -> float | None:
            self._buffer += data
            output, frames = self._output()
            pause_s = take(output)
            now_s = asyncio.get_running_loop().time()
            own_pause_s = self._frame_rate.pause_s(frames, len(data), now_s)
            return max(pause_s or 0.0, own_pause_s) if own_pause_s else pause_s

        await self._duplex.listen(demultiplex)

    def _output(self) -> tuple[bytes, int]:
        """Take what is there of standard output, in whole frames; returns how many frames it was,
        those of standard error included."""
        output, frames = bytearray(), 0
        while len(self._buffer) >= HEADER.size:
            stream, length = HEADER.unpack_from(self._buffer)
            piece = self._buffer[HEADER.size : HEADER.size + length]
            if len(piece) < length:
                break
            del self._buffer[: HEADER.size + length]
            frames += 1
            if stream == STDOUT:
                output += piece
            else:
                self._stderr.add(piece)
        return bytes(output), frames

    async def drain(self) -> None:
        """Wait until standard input has room. Raises OSError when the connection is gone."""
        await self._duplex.drain()

    def write(self, data: bytes) -> None:
        """Queue for standard input, after `drain`."""
        self._duplex.write(data)

    def write_control(self, data: bytes) -> None:
        """Queue a few bytes for standard input, with or without room."""
        self._duplex.write_control(data)

    def close(self) -> None:
        """Hang up; the container's standard input ends with it (`StdinOnce`)."""
        self._duplex.abort()  # nothing is worth waiting for a peer that may be gone

    def last_words(self) -> str:
        """The end of standard error."""
        return self._stderr.text()


async def attach(base_url: str, api_version: str, container_id: str) -> Attachment:
    """Attach to a container that is not started yet. Raises SandboxStartError."""
    try:
        duplex = await _connect(base_url)
    except OSError as error:
        raise SandboxStartError(f"cannot reach the engine at {base_url}: {error}") from error
    try:
        duplex.write(
            f"POST /v{api_version}/containers/{container_id}/attach"
            "?stream=1&stdin=1&stdout=1&stderr=1 HTTP/1.1\r\n"
            "Host: docker\r\nUpgrade: tcp\r\nConnection: Upgrade\r\n"
            "Content-Length: 0\r\n\r\n".encode()
        )
        head = await duplex.until(b"\r\n\r\n")
        if head.split(b" ", 2)[1] not in (b"101", b"200"):
            raise SandboxStartError(f"the engine refused to attach: {head[:200]!r}")
    except (OSError, ValueError, IndexError) as error:
        duplex.abort()
        raise SandboxStartError(f"cannot attach to container {container_id}: {error}") from error
    except BaseException:  # refused or cancelled
        duplex.abort()
        raise
    return Attachment(duplex)


async def _connect(base_url: str) -> Duplex:
    url = urlsplit(base_url)
    loop = asyncio.get_running_loop()
    if url.scheme in ("unix", "http+docker"):
        _, duplex = await loop.create_unix_connection(Duplex, url.path)
    elif url.scheme in ("tcp", "http", "https"):
        tls = tls_context() if url.scheme == "https" else None
        _, duplex = await loop.create_connection(Duplex, url.hostname or "", url.port or 0, ssl=tls)
    else:
        raise SandboxStartError(
            f"DOCKER_HOST scheme {url.scheme!r} is not supported: forward it to tcp"
        )
    return duplex


def tls_context() -> ssl.SSLContext:
    """What the Docker command line does with DOCKER_CERT_PATH and DOCKER_TLS_VERIFY."""
    certificates = Path(os.environ.get("DOCKER_CERT_PATH") or Path.home() / ".docker")
    context = ssl.create_default_context()
    if (certificates / "ca.pem").exists():
        context.load_verify_locations(certificates / "ca.pem")
    if not os.environ.get("DOCKER_TLS_VERIFY"):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if (certificates / "cert.pem").exists():
        context.load_cert_chain(certificates / "cert.pem", certificates / "key.pem")
    return context
