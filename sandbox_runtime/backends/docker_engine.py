"""The client of a Docker engine: the calls of its API, and a container's standard streams.

All calls use asyncio, except the first ones, which block: they read the version of the API and the
engine's info. The SDK makes them for an engine that is not on a Unix socket, because it knows the
settings for TLS. Otherwise it is not imported: that would take a tenth of the processor time of a
start of the proxy. A call through the SDK would need a thread and several times the processor time.
Requests and responses have the format of the engine's API, because the SDK's builders lack some of
its fields.
"""

import asyncio
import contextlib
import http.client
import io
import json
import os
import socket
import ssl
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import aiohttp
import anyio
from yarl import URL

from sandbox_runtime.backends.base import DataCallback
from sandbox_runtime.backends.byte_stream import ByteStreamProtocol, StderrTail
from sandbox_runtime.errors import EngineMissingError
from sandbox_runtime.protocol import FrameRate

EngineJson = Mapping[str, Any]
"""A JSON object of the engine's API."""

_TIMEOUT_S = 30
"""Timeout for connecting to the engine, and between two pieces of a response."""
_REASON_CHARS = 500
_MAX_RESPONSE_BYTES = 64 << 20
_MAX_EVENTS_BYTES = 1 << 20
_DEFAULT_URL = "unix:///var/run/docker.sock"


class EngineError(Exception):
    """The engine refused a request, for the reason in the text, or does not answer.

    `status` is the HTTP status of the response, or 0 if there was none.
    """

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(_one_line(reason))
        self.status = status


class EngineNotFoundError(EngineError):
    """The engine has no such container, image or volume."""


class EngineConflictError(EngineError):
    """The name exists already, or the engine is already performing the operation."""


def _no_engine_error(url: str, error: Exception) -> EngineMissingError:
    return EngineMissingError(f"no Docker engine answers at {url}: {_one_line(str(error))}")


class _UnixConnection(http.client.HTTPConnection):
    """A blocking HTTP connection over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("docker", timeout=_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)

    def get_json(self, path: str) -> Any:
        """Return the parsed JSON at a path. Raises EngineError, OSError or HTTPException."""
        self.request("GET", f"/{path}")
        with self.getresponse() as response:
            content = response.read(_MAX_RESPONSE_BYTES)
        if response.status >= 400:
            raise _refusal(content, response.status)
        return _parse_json(content)


@dataclass(frozen=True, slots=True)
class _EngineDescription:
    """An engine as it describes itself."""

    url: str
    version: str
    """The newest version of the API that the engine has."""
    info: EngineJson
    has_image: bool
    """True if the engine has the image that was asked for, or if none was."""


def _describe_engine(host: str | None, image: str | None) -> _EngineDescription:
    """Ask the engine at `host` or DOCKER_HOST. Raises EngineMissingError."""
    url = host or os.environ.get("DOCKER_HOST") or _DEFAULT_URL
    if not url.startswith("unix://"):
        return _describe_remote_engine(host, image)
    connection, has_image = _UnixConnection(url.removeprefix("unix://")), True
    try:
        with contextlib.closing(connection):
            version = str(connection.get_json("version")["ApiVersion"])
            info = connection.get_json(f"v{version}/info")
            if image:
                try:
                    connection.get_json(f"v{version}/images/{quote(image, safe='/:')}/json")
                except EngineNotFoundError:
                    has_image = False
    except (EngineError, OSError, http.client.HTTPException, KeyError, TypeError) as error:
        raise _no_engine_error(url, error) from error
    return _EngineDescription(url, version, info, has_image)


def _describe_remote_engine(host: str | None, image: str | None) -> _EngineDescription:
    """Ask the engine through the SDK, with the TLS settings of the environment. Raises
    EngineMissingError."""
    from sandbox_runtime.backends.docker_sdk import connect

    client, url = connect(host)
    has_image = True
    try:
        with contextlib.closing(client):
            info: EngineJson = client.info()
            if image:
                try:
                    client.inspect_image(image)
                except OSError as error:
                    if getattr(error, "status_code", 0) != 404:
                        raise
                    has_image = False
    except OSError as error:  # all errors of requests are OSErrors
        raise _no_engine_error(url, error) from error
    return _EngineDescription(url, client.api_version, info, has_image)


class DockerEngine:
    """A client of the Docker engine at `host` or DOCKER_HOST.

    The constructor blocks. It raises EngineMissingError if no engine answers, or if the engine does
    not have the image `needs_image`. All calls must come from one event loop; they raise
    EngineError.
    """

    def __init__(self, host: str | None = None, *, needs_image: str | None = None) -> None:
        description = _describe_engine(host, needs_image)
        self.url, self.info = description.url, description.info
        self._version = description.version
        if not description.has_image:
            reason = f"the engine at {self.url} does not have the image {needs_image!r}"
            raise EngineMissingError(reason)
        self._address = urlsplit(self.url)
        if self._address.scheme not in ("unix", "tcp", "http", "https"):
            unknown = f"DOCKER_HOST scheme {self._address.scheme!r} is not supported"
            raise EngineMissingError(f"{unknown}: forward it to tcp")
        scheme = "https" if self._address.scheme == "https" else "http"
        self._base_url = f"{scheme}://{self._address.netloc or 'docker'}/v{self._version}"
        self._session: aiohttp.ClientSession | None = None

    async def image(self, name: str) -> EngineJson:
        """Return the metadata of an image."""
        found: EngineJson = await self._call_json("GET", f"images/{name}/json")
        return found

    async def create(self, name: str, config: EngineJson) -> str:
        """Create a container and return its id."""
        created = await self._call_json(
            "POST", "containers/create", params={"name": name}, body=config
        )
        return str(created["Id"])

    async def attach(self, name: str) -> "AttachStream":
        """Attach to the standard streams of a container that has not started yet."""
        try:
            stream = await self._open_stream()
        except OSError as error:
            raise EngineError(f"cannot reach the engine at {self.url}: {error}") from error
        try:
            stream.write(
                f"POST /v{self._version}/containers/{name}/attach"
                "?stream=1&stdin=1&stdout=1&stderr=1 HTTP/1.1\r\n"
                "Host: docker\r\nUpgrade: tcp\r\nConnection: Upgrade\r\n"
                "Content-Length: 0\r\n\r\n".encode()
            )
            head = await stream.read_until(b"\r\n\r\n")
            if head.split(b" ", 2)[1] not in (b"101", b"200"):
                raise EngineError(f"the engine refused to attach: {head[:200]!r}")
        except (OSError, ValueError, IndexError) as error:
            stream.abort()
            raise EngineError(f"cannot attach to container {name}: {error}") from error
        except BaseException:  # including a cancellation
            stream.abort()
            raise
        return stream

    async def start(self, name: str) -> None:
        """Start a container."""
        await self._call("POST", f"containers/{name}/start")

    async def update(self, name: str, limits: EngineJson) -> None:
        """Change the limits of a running container."""
        await self._call("POST", f"containers/{name}/update", body=limits)

    async def remove(self, name: str) -> None:
        """Kill and remove a container, if it exists."""
        with contextlib.suppress(EngineNotFoundError):
            try:
                force = {"force": "1", "v": "1"}
                await self._call("DELETE", f"containers/{name}", params=force)
            except EngineConflictError:  # the engine is already removing it
                condition = {"condition": "removed"}
                await self._call("POST", f"containers/{name}/wait", params=condition)

    async def container(self, name: str, *, size: bool = False) -> EngineJson:
        """Return the state of a container; with `size` also the bytes it has written to its disk
        (`SizeRw`), which takes the engine longer."""
        params = {"size": str(int(size))}
        found: EngineJson = await self._call_json("GET", f"containers/{name}/json", params=params)
        return found

    async def containers(self, label: str) -> list[EngineJson]:
        """Return the containers that have a label, running or not."""
        params = {"all": "1", **_filters(label=[label])}
        found: list[EngineJson] = await self._call_json("GET", "containers/json", params=params)
        return found

    async def exit_code(self, name: str, wait_s: float) -> int | None:
        """Return the exit code of a container's main process, or None if it still runs after
        `wait_s`."""
        with anyio.move_on_after(wait_s):
            return int((await self._call_json("POST", f"containers/{name}/wait"))["StatusCode"])
        if (await self.container(name))["State"]["Running"]:
            return None
        raise EngineError(f"the engine did not report how container {name} ended")

    async def events(self, name: str, *kinds: str) -> list[str]:
        """Return the container's events of these kinds that the engine still keeps, oldest first.
        The container may have been removed.

        Raises ValueError or KeyError if the response is not in Docker's format.
        """
        # With `until` in the past the engine answers at once instead of waiting for more events.
        # The time must be the engine's own.
        clock = (await self._call_json("GET", "info"))["SystemTime"]
        until = {"until": f"{datetime.fromisoformat(clock).timestamp():.6f}"}
        filters = _filters(type=["container"], container=[name], event=list(kinds))
        lines = await self._call(
            "GET", "events", params={**until, **filters}, max_bytes=_MAX_EVENTS_BYTES
        )
        return [str(json.loads(line)["Action"]) for line in lines.splitlines() if line]

    async def get_archive(self, container: str, path: str, max_bytes: int) -> bytes:
        """Return a tar archive of a path in a container, running or not; b"" if the path does not
        exist. The archive is cut off somewhere after `max_bytes`."""
        url, params = f"containers/{container}/archive", {"path": path}
        try:
            return await self._call("GET", url, params=params, max_bytes=max_bytes)
        except EngineNotFoundError:
            return b""

    async def put_archive(self, container: str, directory: str, tar: bytes) -> None:
        """Unpack a tar archive in a container, running or not."""
        where = {"path": directory}
        await self._call("PUT", f"containers/{container}/archive", params=where, data=tar)

    async def make_volume(self, name: str) -> None:
        """Create a volume, unless one of that name exists."""
        await self._call("POST", "volumes/create", body={"Name": name})

    async def remove_unused_volumes(self, label: str) -> None:
        """Remove the volumes with a label that no container, running or not, uses."""
        unused = _filters(label=[label], dangling=["true"])
        for volume in (await self._call_json("GET", "volumes", params=unused))["Volumes"] or ():
            try:
                await self._call("DELETE", f"volumes/{volume['Name']}")
            except EngineError as error:
                if not error.status:
                    raise  # no answer; a refusal is fine: another sweep removed the volume

    async def aclose(self) -> None:
        """Close all connections. A later call would open new ones."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    async def _call_json(self, method: str, path: str, **options: Any) -> Any:
        """Make a request and return the parsed JSON of the response."""
        return _parse_json(await self._call(method, path, **options))

    async def _call(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: EngineJson | None = None,
        data: bytes | None = None,
        max_bytes: int = _MAX_RESPONSE_BYTES,
    ) -> bytes:
        """Make a request and return the response body, cut off somewhere after `max_bytes`."""
        url = URL(f"{self._base_url}/{quote(path, safe='/:')}", encoded=True).with_query(params)
        sent = (
            io.BytesIO(data) if data is not None else None
        )  # aiohttp warns if large bytes are passed directly
        content = bytearray()
        try:
            async with self._open_session().request(method, url, json=body, data=sent) as response:
                async for piece in response.content.iter_any():
                    content += piece
                    if len(content) >= max_bytes:
                        break
        except aiohttp.ClientError as error:
            raise EngineError(str(error)) from error
        if response.status >= 400:
            raise _refusal(bytes(content), response.status)
        return bytes(content)

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector: aiohttp.BaseConnector
            if self._address.scheme == "unix":
                # Unix sockets open fast, so connections are not kept alive.
                connector = aiohttp.UnixConnector(self._address.path, force_close=True)
            else:
                connector = aiohttp.TCPConnector(ssl=self._tls() or True)
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=_TIMEOUT_S, sock_read=_TIMEOUT_S
                ),
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    async def _open_stream(self) -> "AttachStream":
        address, loop = self._address, asyncio.get_running_loop()
        if address.scheme == "unix":
            _, stream = await loop.create_unix_connection(AttachStream, address.path)
        else:
            host, port = address.hostname or "", address.port or 0
            _, stream = await loop.create_connection(AttachStream, host, port, ssl=self._tls())
        return stream

    def _tls(self) -> ssl.SSLContext | None:
        """Return the TLS settings of DOCKER_CERT_PATH and DOCKER_TLS_VERIFY, interpreted as by
        Docker's CLI."""
        if self._address.scheme != "https":
            return None
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


def _one_line(reason: str) -> str:
    return reason.strip().partition("\n")[0][:_REASON_CHARS]


def _filters(**filters: list[str]) -> Mapping[str, str]:
    return {"filters": json.dumps(filters)}


def _parse_json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError as error:
        raise EngineError(f"the response is not JSON: {error}") from error


def _refusal(content: bytes, status: int) -> EngineError:
    """Return the error for an error response, with the reason in it."""
    try:
        reason = str(json.loads(content)["message"])
    except (ValueError, KeyError, TypeError):
        reason = content.decode(errors="replace").strip() or f"HTTP status {status}"
    kinds = {404: EngineNotFoundError, 409: EngineConflictError}
    return kinds.get(status, EngineError)(reason, status)


FRAME_HEADER = struct.Struct(">BxxxI")
"""The header of each frame of output: the number of its stream and its length in bytes."""
STDOUT = 1


class AttachStream(ByteStreamProtocol):
    """The standard streams of a container's main process, over the engine's attach call.

    The SDK's attach returns a blocking socket. So `DockerEngine.attach` sends the upgrade request
    itself, in the same way over unix, tcp and TLS. When the connection ends, the container's
    standard input closes (`StdinOnce`).
    """

    def __init__(self) -> None:
        super().__init__()
        self._buffer = bytearray()
        self._stderr = StderrTail()
        self._frame_rate = FrameRate()
        """Limits the rate of the engine's frames; each write of the agent may be one frame."""

    async def receive(self, on_data: DataCallback) -> None:
        """Pass standard output to `on_data` until its end, and keep the tail of standard error.
        Raises ProtocolError."""

        def demultiplex(data: bytes | memoryview) -> float | None:
            self._buffer += data
            output, frames = self._take_output_and_frame_count()
            pause_s = on_data(output)
            now_s = asyncio.get_running_loop().time()
            own_pause_s = self._frame_rate.count_and_get_pause_s(frames, len(data), now_s)
            return max(pause_s or 0.0, own_pause_s) if own_pause_s else pause_s

        await super().receive(demultiplex)

    def stderr_tail(self) -> str:
        """Return the tail of standard error."""
        return self._stderr.text()

    def _take_output_and_frame_count(self) -> tuple[bytes, int]:
        """Remove the complete frames from the buffer; return their standard output, and the number
        of frames, including those of standard error."""
        output, frames = bytearray(), 0
        while len(self._buffer) >= FRAME_HEADER.size:
            stream, length = FRAME_HEADER.unpack_from(self._buffer)
            piece = self._buffer[FRAME_HEADER.size : FRAME_HEADER.size + length]
            if len(piece) < length:
                break
            del self._buffer[: FRAME_HEADER.size + length]
            frames += 1
            if stream == STDOUT:
                output += piece
            else:
                self._stderr.add(piece)
        return bytes(output), frames
