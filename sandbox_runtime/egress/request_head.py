"""The head of an HTTP/1 request, read so strictly that no server can read it differently."""

import re
from dataclasses import dataclass

from policies.egress import HTTP_PORT, TLS_PORT
from policies.hosts import Target, parse_authority
from sandbox_runtime.egress.errors import DeniedError, UnreachableError

MAX_HEAD_BYTES = 32 << 10
MAX_HEADERS = 128
CHUNKED = -1
"""The length of a body that comes in chunks."""
Header = tuple[str, str]
_START = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}) ([\x21-\x7e\x80-\xff]+) HTTP/1\.([01])")
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t\x20-\x7e\x80-\xff]*)")
_LENGTH = re.compile(r"[0-9]{1,18}")
_STATUS = re.compile(r"HTTP/1\.[01] ([1-5][0-9]{2})(?: [\t\x20-\x7e\x80-\xff]*)?")
_URL = re.compile(r"http://([^/?#]*)([/?][^#]*)?", re.IGNORECASE)
_NOT_ASCII = re.compile(r"[\x80-\xff]")
_HOP_BY_HOP = frozenset({"connection", "keep-alive", "te", "trailer", "upgrade"})
_SENDS_BACK_WHAT_IT_GOT = frozenset({"TRACE", "TRACK"})


@dataclass(frozen=True, slots=True)
class RequestHead:
    """What a program wants of a server."""

    method: str
    url: str
    """As it was written: absolute, or only a path, or CONNECT's host and port."""
    minor_version: int
    """0 or 1, of HTTP/1."""
    headers: tuple[Header, ...]
    body_bytes: int
    """Length of the body; CHUNKED where its end is marked."""

    def tunnel_target(self) -> Target:
        """Where CONNECT leads. Raises DeniedError."""
        return _authority(self.url, None)

    def target(self) -> Target:
        """Where an absolute http:// URL leads. Raises DeniedError."""
        match = _URL.fullmatch(self.url)
        if not match:
            raise DeniedError(
                "this is a proxy: it takes CONNECT host:port and absolute http:// URLs only", 400
            )
        target = _authority(match[1], HTTP_PORT)
        if target.port == TLS_PORT:
            raise DeniedError(f"only TLS passes to port {TLS_PORT}")
        return target

    def check_host(self, target: Target) -> None:
        """Raise DeniedError unless the Host header names the target."""
        names = self.values("host")
        if len(names) > 1 or (not names and self.minor_version):
            raise DeniedError("a request needs exactly one Host header", 400)
        if names and _authority(names[0], HTTP_PORT) != target:
            raise DeniedError(f"the Host header is not that of the URL ({target})", 400)

    def values(self, name: str) -> list[str]:
        """The values of a header, by its name in lower case."""
        return [value for key, value in self.headers if key.lower() == name]

    def rewritten(self, target: Target, bound: tuple[Header, ...]) -> bytes:
        """As the server gets it: for one request, and with the headers bound to the host."""
        match = _URL.fullmatch(self.url)
        path = (match[2] or "/") if match else self.url
        path = path if path.startswith("/") else f"/{path}"
        path = _NOT_ASCII.sub(lambda found: f"%{ord(found[0]):02X}", path)
        ours = {"host", "content-length", "transfer-encoding", *(_key(name) for name, _ in bound)}
        host = str(target).removesuffix(f":{HTTP_PORT}")
        headers = [("Host", host), *_end_to_end(self.headers, ours), *bound]
        if self.body_bytes == CHUNKED:
            headers.append(("Transfer-Encoding", "chunked"))
        elif self.values("content-length"):
            headers.append(("Content-Length", str(self.body_bytes)))
        headers.append(("Connection", "close"))
        return _head(f"{self.method} {path} HTTP/1.{self.minor_version}", headers)


def parse(head: bytes) -> RequestHead:
    """Read a head, with the empty line at its end. Raises DeniedError."""
    start, headers = _lines(head)
    match = _START.fullmatch(start)
    if not match:
        raise DeniedError("malformed request line", 400)
    if match[1].upper() in _SENDS_BACK_WHAT_IT_GOT:
        raise DeniedError(f"{match[1]} is refused", 405)
    minor = int(match[3])
    return RequestHead(match[1], match[2], minor, headers, _body_bytes(headers, minor))


def response_head(head: bytes) -> tuple[int, bytes]:
    """A server's answer: its status, and its head as the program gets it.

    Raises UnreachableError, also for a change of protocol, as nobody has asked for one.
    """
    try:
        start, headers = _lines(head)
    except DeniedError as error:
        raise UnreachableError(f"the host's answer has a {error}") from error
    match = _STATUS.fullmatch(start)
    if not match or match[1] == "101":
        raise UnreachableError("the host's answer has a malformed status line")
    status, kept = int(match[1]), _end_to_end(headers, set())
    return status, _head(start, kept if status < 200 else [*kept, ("Connection", "close")])


def _lines(head: bytes) -> tuple[str, tuple[Header, ...]]:
    start, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    if len(lines) > MAX_HEADERS:
        raise DeniedError(f"more than {MAX_HEADERS} headers", 400)
    matches = [_HEADER.fullmatch(line) for line in lines]  # which no bare CR or LF, no fold passes
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


def _end_to_end(headers: tuple[Header, ...], left_out: set[str]) -> list[Header]:
    """Without those for this hop only; `left_out` are more names, in lower case."""
    named = {
        name.strip().lower()
        for key, value in headers
        if key.lower() == "connection"
        for name in value.split(",")
    }
    out = _HOP_BY_HOP | left_out | named
    return [
        header
        for header in headers
        if _key(header[0]) not in out and not _key(header[0]).startswith("proxy-")
    ]


def _key(name: str) -> str:
    return name.lower().replace("_", "-")  # as servers do that pass headers in variables


def _authority(text: str, default_port: int | None) -> Target:
    try:
        return parse_authority(text.encode("latin-1").decode(), default_port)
    except ValueError as error:
        raise DeniedError(str(error), 400) from error


def _head(start: str, headers: list[Header]) -> bytes:
    lines = [start, *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")
