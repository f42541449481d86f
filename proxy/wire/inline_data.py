"""Bytes written as text inside JSON: data URLs and bare base64, read in pieces where they stand."""

import binascii
import string
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

_PIECE_CHARS = 1 << 18
_MAX_HEAD_CHARS = 500
_SPACE = b" \t\r\n"
_ALPHABET = (string.ascii_letters + string.digits + "+/").encode()
_FOREIGN = "it has characters that are not of base64"


@dataclass(frozen=True, slots=True)
class InlineData:
    """A file in a string, which is neither copied nor decoded before it is asked for."""

    text: str
    start: int
    """Where the data begins."""
    mime_type: str
    """As it was written; empty where nothing was."""
    is_base64: bool = True

    def measure(self) -> int:
        """How many bytes it is. Raises ValueError where it is malformed."""
        if not self.is_base64:
            return sum(map(len, self.pieces()))
        count = pads = 0
        for piece in self._slices():
            written = piece.translate(None, delete=_SPACE)
            rest = written.translate(None, delete=_ALPHABET)
            if (
                rest.strip(b"=")
                or not written.endswith(rest)
                or (pads and len(rest) < len(written))
            ):
                raise ValueError(_FOREIGN)
            pads += len(rest)
            count += len(written) - len(rest)
        if count % 4 == 1 or pads > 2 or (pads and (count + pads) % 4):
            raise ValueError("it is cut off, or wrongly padded")
        return count * 3 // 4

    def pieces(self) -> Iterator[bytes]:
        """The bytes. What was measured is well formed."""
        if not self.is_base64:
            yield unquote_to_bytes(self.text[self.start :])
            return
        rest = b""
        for piece in self._slices():
            digits = rest + piece.translate(None, delete=_SPACE + b"=")
            whole = len(digits) & ~3
            yield binascii.a2b_base64(digits[:whole])
            rest = digits[whole:]
        if rest:
            yield binascii.a2b_base64(rest + b"=" * (4 - len(rest)))

    def _slices(self) -> Iterator[bytes]:
        for start in range(self.start, len(self.text), _PIECE_CHARS):
            try:
                yield self.text[start : start + _PIECE_CHARS].encode("ascii")
            except UnicodeEncodeError as error:
                raise ValueError(_FOREIGN) from error


def data_url(url: str) -> InlineData:
    """What a data URL holds. Raises ValueError."""
    comma = url.find(",", 0, _MAX_HEAD_CHARS)
    if comma < 0:
        raise ValueError("it has no comma")
    mime_type, *rest = url[len("data:") : comma].split(";")
    is_base64 = any(word.strip().lower() == "base64" for word in rest)
    return InlineData(url, comma + 1, mime_type or "text/plain", is_base64)
