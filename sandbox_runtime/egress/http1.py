"""HTTP/1: the strict parsing of request and response heads, and the relaying of one plain exchange.

Requests are parsed strictly: a request that a server might understand differently, which would
allow request smuggling, is denied.
"""

import re
from dataclasses import dataclass

from policies.egress import HTTP_PORT, TLS_PORT
from policies.hosts import Target, parse_authority
from sandbox_runtime.egress.connection import BufferedReader
from sandbox_runtime.egress.decision import DeniedError, UnreachableError
from sandbox_runtime.egress.relay import PIECE_BYTES, Relay

MAX_HEAD_BYTES = 32 << 10
MAX_HEADERS = 128
CHUNKED = -1
"""The value of `RequestHead.body_bytes` for a chunked body."""
Header = tuple[str, str]
_REQUEST_LINE = re.compile(
    r"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}) ([\x21-\x7e\x80-\xff]+) HTTP/1\.([01])"
)
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t\x20-\x7e\x80-\xff]*)")
_LENGTH = re.compile(r"[0-9]{1,18}")
_STATUS_LINE = re.compile(r"HTTP/1\.[01] ([1-5][0-9]{2})(?: [\t\x20-\x7e\x80-\xff]*)?")
_URL = re.compile(r"http://([^/?#]*)([/?][^#]*)?", re.IGNORECASE)
_CHUNK_START = re.compile(rb"([0-9A-Fa-f]{1,8})(?:;[\t\x20-\x7e\x80-\xff]*)?\r\n")
_MAX_LINE_BYTES = 4096
_NOT_ASCII = re.compile(r"[\x80-\xff]")
_HOP_BY_HOP = frozenset({"connection", "keep-alive", "te", "trailer", "upgrade"})
_ECHOING_METHODS = frozenset({"TRACE", "TRACK"})


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The head of a request that a program sends."""

    method: str
    url: str
    """The request target as it was sent: an absolute URL, a path, or CONNECT's host and port."""
    minor_version: int
    """The x of HTTP/1.x: 0 or 1."""
    headers: tuple[Header, ...]
    body_bytes: int
    """The length of the body, or CHUNKED."""

    def tunnel_target(self) -> Target:
        """Return the target of CONNECT. Raises DeniedError."""
        return _parse_authority(self.url, None)

    def target(self) -> Target:
        """Return the target of an absolute http:// URL. Raises DeniedError."""
        match = _URL.fullmatch(self.url)
        if not match:
            raise DeniedError(
                "this is a proxy: it takes CONNECT host:port and absolute http:// URLs only", 400
            )
        target = _parse_authority(match[1], HTTP_PORT)
        if target.port == TLS_PORT:
            raise DeniedError(f"only TLS passes to port {TLS_PORT}")
        return target

    def check_host(self, target: Target) -> None:
        """Raise DeniedError if the request does not have exactly one Host header, or if the header
        does not name the target. An HTTP/1.0 request may have no Host header."""
        names = self.values("host")
        if len(names) > 1 or (not names and self.minor_version):
            raise DeniedError("a request needs exactly one Host header", 400)
        if names and _parse_authority(names[0], HTTP_PORT) != target:
            raise DeniedError(f"the Host header does not name the target {target}", 400)

    def values(self, name: str) -> list[str]:
        """Return the values of a header by its lower-case name."""
        return [value for key, value in self.headers if key.lower() == name]

    def rewritten_head(self, target: Target, injected: tuple[Header, ...]) -> bytes:
        """Return the head for the server: without hop-by-hop headers, and with the `injected`
        headers, which replace the program's headers of the same names."""
        match = _URL.fullmatch(self.url)
        path = (match[2] or "/") if match else self.url
        path = path if path.startswith("/") else f"/{path}"
        path = _NOT_ASCII.sub(lambda found: f"%{ord(found[0]):02X}", path)
        replaced = {"host", "content-length", "transfer-encoding"}
        replaced |= {_normalized_name(name) for name, _ in injected}
        host = str(target).removesuffix(f":{HTTP_PORT}")
        headers = [("Host", host), *_end_to_end_headers(self.headers, replaced), *injected]
        if self.body_bytes == CHUNKED:
            headers.append(("Transfer-Encoding", "chunked"))
        elif self.values("content-length"):
            headers.append(("Content-Length", str(self.body_bytes)))
        headers.append(("Connection", "close"))
        return _encode_head(f"{self.method} {path} HTTP/1.{self.minor_version}", headers)


def parse_request_head(head: bytes) -> RequestHead:
    """Parse a head with the empty line at its end. Raises DeniedError."""
    start, headers = _parse_lines(head)
    match = _REQUEST_LINE.fullmatch(start)
    if not match:
        raise DeniedError("malformed request line", 400)
    if match[1].upper() in _ECHOING_METHODS:
        raise DeniedError(f"{match[1]} is refused", 405)
    minor = int(match[3])
    return RequestHead(match[1], match[2], minor, headers, _body_bytes(headers, minor))


def parse_response_head(head: bytes) -> tuple[int, bytes]:
    """Return the status of a server's response, and the head for the program.

    Raises UnreachableError if the head is malformed or the status is 101, which no server may send:
    the program's Upgrade header was not passed on.
    """
    try:
        start, headers = _parse_lines(head)
    except DeniedError as error:
        raise UnreachableError(f"the host's answer has a {error}") from error
    match = _STATUS_LINE.fullmatch(start)
    if not match or match[1] == "101":
        raise UnreachableError("the host's answer has a malformed status line")
    status, passed = int(match[1]), _end_to_end_headers(headers, set())
    return status, _encode_head(
        start, passed if status < 200 else [*passed, ("Connection", "close")]
    )


def _parse_lines(head: bytes) -> tuple[str, tuple[Header, ...]]:
    start, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    if len(lines) > MAX_HEADERS:
        raise DeniedError(f"more than {MAX_HEADERS} headers", 400)
    matches = [_HEADER.fullmatch(line) for line in lines]  # a bare CR or LF or a fold never matches
    headers = tuple((match[1], match[2].strip(" \t")) for match in matches if match)
    if len(headers) < len(lines):
        raise DeniedError("malformed header", 400)
    return start, headers


def _body_bytes(headers: tuple[Header, ...], minor_version: int) -> int:
    lengths = [value for name, value in headers if name.lower() == "content-length"]
    codings = [value.lower() for name, value in headers if name.lower() == "transfer-encoding"]
    if codings and (codings != ["chunked"] or lengths or not minor_version):
        raise DeniedError("Transfer-Encoding must be chunked, once, and without a length", 400)
    if len(lengths) > 1 or not all(_LENGTH.fullmatch(length) for length in lengths):
        raise DeniedError("Content-Length must be one number", 400)
    return CHUNKED if codings else int(lengths[0]) if lengths else 0


def _end_to_end_headers(headers: tuple[Header, ...], dropped_names: set[str]) -> list[Header]:
    """Return the headers without hop-by-hop headers, headers that begin with `Proxy-`, and headers
    named in `dropped_names` (in lower case)."""
    named = {
        name.strip().lower()
        for key, value in headers
        if key.lower() == "connection"
        for name in value.split(",")
    }
    all_dropped = _HOP_BY_HOP | dropped_names | named
    return [
        header
        for header in headers
        if _normalized_name(header[0]) not in all_dropped
        and not _normalized_name(header[0]).startswith("proxy-")
    ]


def _normalized_name(name: str) -> str:
    return name.lower().replace("_", "-")  # CGI servers treat - and _ alike


def _parse_authority(text: str, default_port: int | None) -> Target:
    try:
        return parse_authority(text.encode("latin-1").decode(), default_port)
    except ValueError as error:
        raise DeniedError(str(error), 400) from error


def _encode_head(start: str, headers: list[Header]) -> bytes:
    lines = [start, *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


async def read_tunnelled_request(reader: BufferedReader, target: Target) -> RequestHead:
    """Read the head of a request inside a tunnel to `target`. Raises DeniedError."""
    head = parse_request_head(await reader.read_head(MAX_HEAD_BYTES))
    if not head.url.startswith("/"):
        raise DeniedError(f"only HTTP requests for a path pass to port {target.port}", 400)
    head.check_host(target)
    return head


async def exchange(
    relay: Relay, head: RequestHead, target: Target, injected: tuple[Header, ...]
) -> None:
    """Relay one request, with the `injected` headers, and its response. Raises ConnectionError,
    EgressError."""

    async def relay_request() -> None:
        await relay.send_to_server(head.rewritten_head(target, injected))
        if head.body_bytes == CHUNKED:
            await _relay_request_chunks(relay)
        else:
            await _relay_request_bytes(relay, head.body_bytes)
        await relay.discard_rest_of_request()

    async def relay_response() -> None:
        status = 100
        while status < 200:
            status, response_head = parse_response_head(await relay.read_response_head())
            await relay.send_to_program(response_head)
        await relay.relay_rest_to_program()
        relay.mark_answered()

    await relay.run(relay_request, relay_response)


async def _relay_request_bytes(relay: Relay, count: int) -> None:
    while count:
        data = await relay.program_reader.read(min(count, PIECE_BYTES))
        if not data:
            raise DeniedError("the body ends in its middle", 400)
        count -= len(data)
        await relay.send_to_server(data)


async def _relay_request_chunks(relay: Relay) -> None:
    """Relay the chunks of a body with new chunk headers, and drop its trailers."""
    while count := await _read_chunk_size(relay.program_reader):
        await relay.send_to_server(b"%x\r\n" % count)
        await _relay_request_bytes(relay, count)
        if await relay.program_reader.read_exactly(2) != b"\r\n":
            raise DeniedError("malformed chunk", 400)
        await relay.send_to_server(b"\r\n")
    for _ in range(MAX_HEADERS):
        if await relay.program_reader.read_line(_MAX_LINE_BYTES) == b"\r\n":
            await relay.send_to_server(b"0\r\n\r\n")
            return
    raise DeniedError("malformed trailer", 400)


async def _read_chunk_size(reader: BufferedReader) -> int:
    match = _CHUNK_START.fullmatch(await reader.read_line(_MAX_LINE_BYTES))
    if not match:
        raise DeniedError("malformed chunk", 400)
    return int(match[1], 16)
