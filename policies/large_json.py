"""Decoding and encoding of large JSON in steps, so that the event loop can run between them.

Each function returns a generator, whose steps take milliseconds and whose return value is the
result. Strings of at least `MIN_CHARS` characters are decoded and encoded in pieces. Placeholders
replace these strings in the rest of the JSON, which is handled in one step.
"""

import json
import re
import sys
from collections.abc import Callable, Generator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, TypeVar

from pydantic_core import from_json

from policies.json_bounds import MAX_STRUCTURE_BYTES, TooMuchJSONError, decode_json, encode_json

MIN_CHARS = 64
"""Minimum length of a string that is handled in pieces, in characters or bytes."""
PIECE_SIZE = 1 << 18
"""Number of characters or bytes that are handled in one step."""
ITEMS_PER_STEP = 8192
_STRING = re.compile(rb'"[^"\\]*+(?:\\(?:.|\Z)[^"\\]*+)*+(?:"|\Z)', re.DOTALL)
"""A string, possibly cut off at the end of the text."""
_IN_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_AFTER_NAME = re.compile(rb"[ \t\r\n]*+:")
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB]")
_ESCAPE_BYTES = len(rb"\uXXXX")

T = TypeVar("T")
Steps = Generator[None, None, T]


@dataclass(frozen=True, slots=True)
class DecodedJSON:
    """A decoded JSON text."""

    value: Any
    memory_bytes: int
    """The bytes of memory that the value and its encoding need, at most."""


def decode_in_steps(
    text: bytes | bytearray, mark: str, piece_size: int = PIECE_SIZE
) -> Steps[DecodedJSON]:
    """Decode JSON in UTF-8, also with a byte order mark. Placeholders for the long strings begin
    with the random string `mark`.

    Raises ValueError if the text is not valid JSON in UTF-8 or has NaN or infinity, RecursionError
    if the text is nested too deeply, and TooMuchJSONError if the long names in objects have more
    than `MAX_STRUCTURE_BYTES`.
    """
    if json.detect_encoding(bytes(text[:4])) not in ("utf-8", "utf-8-sig"):
        raise ValueError("large JSON must be in UTF-8")
    strings: dict[str, str] = {}
    outline = yield from _StringExtractor(text, piece_size).replace_strings(mark, strings)
    value = decode_json(outline)
    yield
    size = sum(map(sys.getsizeof, strings.values()))
    size += len(outline) if outline.isascii() else 4 * len(outline)
    value = yield from _with_strings(value, strings)
    return DecodedJSON(value, size + len(text))


class _StringExtractor:
    """Takes the long strings out of one JSON text."""

    def __init__(self, text: bytes | bytearray, piece_size: int) -> None:
        self._text = text
        self._piece_size = piece_size

    def replace_strings(self, mark: str, strings: MutableMapping[str, str]) -> Steps[bytes]:
        """Return the text with placeholders for the long strings, and add each long string to
        `strings` under its placeholder."""
        text = self._text
        pieces: list[bytes | bytearray] = []
        done = at = name_bytes = 0
        while at < len(text):
            end = min(at + self._piece_size, len(text))
            for found in _STRING.finditer(text, at, end):
                start, at = found.span()
                if at == end:  # the string may continue
                    at = yield from self._string_end(start + 1)
                if at - start < MIN_CHARS:
                    continue
                if _AFTER_NAME.match(text, at):
                    name_bytes += at - start
                    if name_bytes > MAX_STRUCTURE_BYTES:
                        raise TooMuchJSONError(f"{MAX_STRUCTURE_BYTES >> 20} MiB of names")
                    continue
                placeholder = f"{mark}{len(strings)}"
                if at - start <= self._piece_size:
                    strings[placeholder] = _decode_string(text[start:at])
                else:
                    strings[placeholder] = yield from self._decode_pieces(start + 1, at - 1)
                pieces += (text[done:start], b'"%s"' % placeholder.encode())
                done = at
            at = max(at, end)
            yield
        pieces.append(text[done:])
        return b"".join(pieces)

    def _string_end(self, start: int) -> Steps[int]:
        """Return the index after the string whose content begins at `start`. Raises ValueError."""
        text = self._text
        while start < len(text):
            end = start + self._piece_size
            if text.find(b"\\", start, end) < 0:
                if (quote := text.find(b'"', start, end)) >= 0:
                    return quote + 1
                start = end
            else:  # this search takes twenty times as long
                found = _IN_STRING.match(text, start, end)
                assert found is not None
                if text[found.end() : found.end() + 1] == b'"':
                    return found.end() + 1
                if found.end() == start:
                    break
                start = found.end()  # a backslash at the end of the piece is read again
            yield
        raise ValueError("Unterminated string")

    def _decode_pieces(self, start: int, end: int) -> Steps[str]:
        """Return the string with the content `text[start:end]`."""
        pieces: list[str] = []
        while start < end:
            cut = min(start + self._piece_size, end)
            if cut < end:
                cut = self._safe_cut(start, cut)
            pieces.append(_decode_string(b'"%s"' % self._text[start:cut]))
            start = cut
            yield
        return (yield from _join(pieces))

    def _safe_cut(self, start: int, cut: int) -> int:
        """Return the last index up to `cut` at which a string can be divided: not inside a
        character or an escape, and not between the two escapes of a surrogate pair. `start` is such
        an index."""
        text = self._text
        continued = 0
        while text[cut - continued] & 0xC0 == 0x80 and continued < 3:
            continued += 1
        cut -= continued
        last = text.rfind(b"\\", max(start, cut - _ESCAPE_BYTES), cut)
        if last < 0 or not self._begins_escape(start, last):
            return cut
        if last + (_ESCAPE_BYTES if text[last + 1] == ord("u") else 2) > cut:
            cut, last = last, last - _ESCAPE_BYTES
        is_high = last + _ESCAPE_BYTES == cut and _HIGH_SURROGATE.match(text, max(last, 0))
        return last if is_high and last > start and self._begins_escape(start, last) else cut

    def _begins_escape(self, start: int, backslash: int) -> bool:
        """Return True if the backslash is not itself escaped."""
        before = self._text[start : backslash + 1]
        return (len(before) - len(before.rstrip(b"\\"))) % 2 == 1


def _decode_string(written: bytes | bytearray) -> str:
    try:
        text = from_json(written)
    except ValueError:  # a lone surrogate, or invalid JSON
        text = json.loads(written.decode("utf-8", "surrogatepass"))
    assert isinstance(text, str)
    return text


def _join(pieces: list[str]) -> Steps[str]:
    """Return the joined texts. If all characters take the same space, no step copies the whole:
    CPython appends to a text in place, and realloc moves large blocks without copying them."""
    if len(set(map(_bytes_per_character, pieces))) > 1:
        return "".join(pieces)
    text = ""
    for piece in pieces:
        text += piece
        yield
    return text


def _bytes_per_character(text: str) -> int:
    """Return the space that each character of a text takes in memory; 0 for ASCII."""
    if text.isascii():
        return 0
    with suppress(UnicodeEncodeError):
        text.encode("latin-1")
        return 1
    return 2 if len(text.encode("utf-16-le", "surrogatepass")) == 2 * len(text) else 4


def _with_strings(value: Any, strings: Mapping[str, str]) -> Steps[Any]:
    """Return a value with the strings in place of their placeholders."""
    top = [value]
    pending: list[Any] = [top]
    count = 0
    while pending:
        each = pending.pop()
        for key, item in each.items() if isinstance(each, dict) else enumerate(each):
            if isinstance(item, str):
                each[key] = strings.get(item, item)
            elif isinstance(item, dict | list):
                pending.append(item)
            elif isinstance(item, float) and not isfinite(item):
                raise ValueError(f"{item} is not valid in JSON")
            count += 1
            if count % ITEMS_PER_STEP == 0:
                yield
    return top[0]


CHARS_PER_VALUE = 32
"""Number of characters of a string that take as long to encode as one value of another type."""
_INTEGERS = range(-(1 << 63), 1 << 64)
"""The integers that `encode_json` encodes fast."""


def count_chars(value: Any, enough: float = inf) -> int:
    """Return the number of characters of all strings in a JSON value, plus `CHARS_PER_VALUE` for
    each item of a list. Stop counting above `enough`."""
    count = 0
    values = [value]  # grows while it is iterated over, which is faster than a stack
    for each in values:
        kind = type(each)
        if kind is str:
            count += len(each)
        elif kind is dict:
            values += each.values()
        elif kind is list:
            count += CHARS_PER_VALUE * len(each)
            values += each
        if count > enough:
            break
    return count


def encode_in_steps(
    value: Any,
    mark: str,
    encode: Callable[[Any], bytes] = encode_json,
    piece_size: int = PIECE_SIZE,
) -> Steps[bytearray]:
    """Return the JSON of a value, encoded with `encode` in steps. Meanwhile, placeholders that
    begin with the random string `mark` replace long strings and integers of more than 64 bits.
    Raises TypeError for a value that JSON cannot represent."""
    replaced: list[str | int] = []
    outline = encode((yield from _with_placeholders(value, mark, replaced)))
    first, *others = outline.split(f'"{mark}'.encode())
    del outline
    yield
    encoded, last_step = bytearray(first), 0
    for other in others:
        number, _, after = other.partition(b'"')
        text = replaced[int(number)]
        if isinstance(text, int):
            encoded += b"%d" % text
        else:
            encoded += b'"'
            for start in range(0, len(text), piece_size):
                encoded += encode(text[start : start + piece_size])[1:-1]
                if len(encoded) - last_step > piece_size:
                    last_step = len(encoded)
                    yield
            encoded += b'"'
        encoded += after
        if len(encoded) - last_step > piece_size:
            last_step = len(encoded)
            yield
    return encoded


def _with_placeholders(value: Any, mark: str, replaced: list[str | int]) -> Steps[Any]:
    """Return a copy of a value in which placeholders replace long strings and integers of more than
    64 bits. Append the replaced values to `replaced`."""
    top = [value]
    pending: list[Any] = [top]
    count = 0
    while pending:
        each = pending.pop()
        for key, item in each.items() if isinstance(each, dict) else enumerate(each):
            is_long = isinstance(item, str) and len(item) >= MIN_CHARS
            if is_long or (type(item) is int and item not in _INTEGERS):
                each[key] = f"{mark}{len(replaced)}"
                replaced.append(item)
            elif isinstance(item, dict | list):
                copy = item.copy()
                each[key] = copy
                pending.append(copy)
            count += 1
            if count % ITEMS_PER_STEP == 0:
                yield
    return top[0]
