"""HTTP's way to ask a proxy: CONNECT host:port, or a request with an absolute http:// URL."""

from http import HTTPStatus

from sandbox_runtime.egress.ask import Ask
from sandbox_runtime.egress.connection import Inbox
from sandbox_runtime.egress.errors import EgressError
from sandbox_runtime.egress.request_head import MAX_HEAD_BYTES, parse

_GRANTED = b"HTTP/1.1 200 Connection established\r\n\r\n"
_PHRASE_CHARS = 300


async def read_ask(inbox: Inbox) -> Ask:
    """Read what is asked for. Raises DeniedError."""
    head = parse(await inbox.head(MAX_HEAD_BYTES))
    if head.method == "CONNECT":
        return Ask(head.tunnel_target(), granted=_GRANTED)
    target = head.target()
    head.check_host(target)
    return Ask(target, request=head)


def refusal(error: EgressError) -> bytes:
    """An error as a response; also in the status line, as that is all most clients show."""
    text = str(error).encode("ascii", "backslashreplace").decode()
    phrase = f"{HTTPStatus(error.status).phrase}: {text}"[:_PHRASE_CHARS]
    body = f"{text}\n"
    return (
        f"HTTP/1.1 {error.status} {phrase}\r\nContent-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}"
    ).encode()
