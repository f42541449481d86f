"""Bounds for untrusted JSON, checked while its bytes arrive and before it is decoded; and a fast
JSON decoder and encoder.

Twenty million empty objects fit into 60 MB. Decoding them takes gigabytes of memory and blocks the
event loop for half a minute. Long strings (files in base64) are cheap to decode, so only the limit
on the size of a body applies to them.
"""

import codecs
import json
import re
from collections.abc import Iterable
from itertools import accumulate
from math import inf, isfinite
from typing import Any

import orjson
from pydantic_core import from_json

MAX_DEPTH = 64
MAX_VALUES = 200_000
"""Maximum number of commas and opening brackets, about one for each value."""
MAX_STRUCTURE_BYTES = 8 << 20
"""Maximum size of the text outside strings."""
SMALL_BYTES = 64 << 10
"""No text up to this size has more than `MAX_VALUES` values."""
_ENCODING_BYTES = 4
"""Number of bytes that determine the encoding."""

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z)', re.DOTALL)
"""A string, possibly cut off at the end of the text. If the pattern did not match a string that is
cut off, the search would start again at each of its escaped quotes, in quadratic time."""
_SENTINEL = b"]"
"""Appended to a text. If it is missing after the strings were replaced, the text ends inside a
string."""
_IN_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"{}[]"))
_PASSES = 4
"""Number of times that empty pairs of brackets are removed before the remaining brackets are
counted."""
_DEPTH_CHANGES = {ord("{"): 1, ord("["): 1, ord("}"): -1, ord("]"): -1}


class TooMuchJSONError(ValueError):
    """The JSON exceeds a bound, which the message names."""


def is_small(text: bytes | bytearray) -> bool:
    """Return True if a text certainly exceeds no bound: it is short and has few brackets."""
    return len(text) <= SMALL_BYTES and text.count(b"{") + text.count(b"[") <= MAX_DEPTH


class JSONBoundsCheck:
    """Checks one JSON text, which arrives in pieces, against the bounds."""

    def __init__(self, max_values: int = MAX_VALUES) -> None:
        self._max_values = max_values
        self._max_structure_bytes = MAX_STRUCTURE_BYTES * max(1, max_values // MAX_VALUES)
        self._first_bytes = b""
        """The first bytes, until there are enough to detect the encoding."""
        self._decoder: codecs.IncrementalDecoder | None = None
        """Set if the text is not UTF-8."""
        self._is_utf_8: bool | None = None
        self._is_in_string = False
        self._pending_escape = b""
        """A backslash at the end of the last piece, inside a string."""
        self.values = 0
        """Number of commas and opening brackets so far."""
        self._depth = self._structure_bytes = 0

    def check(self, piece: bytes) -> None:
        """Check the next bytes. Raises TooMuchJSONError."""
        if self._is_utf_8 is None:
            self._first_bytes += piece
            if len(self._first_bytes) < _ENCODING_BYTES:
                return
            piece, self._first_bytes = self._first_bytes, b""
            encoding = json.detect_encoding(piece)
            self._is_utf_8 = encoding.startswith("utf-8")
            if not self._is_utf_8:
                self._decoder = codecs.getincrementaldecoder(encoding)("replace")
        if self._decoder is not None:
            piece = self._decoder.decode(piece).encode("utf-8", "replace")
        if (
            self._is_in_string
            and not self._pending_escape
            and b'"' not in piece
            and b"\\" not in piece
        ):
            return  # the middle of a long string; the search below takes twenty times as long
        self._count_structure(self._mask_strings(self._pending_escape + piece))

    def accept(self, piece: bytes) -> bool:
        """Check the next bytes; return False if a bound is exceeded."""
        try:
            self.check(piece)
        except TooMuchJSONError:
            return False
        return True

    def _mask_strings(self, text: bytes) -> bytes:
        """Return the text with each string replaced by one letter."""
        start, self._pending_escape = 0, b""
        if self._is_in_string:
            start = self._string_end(text, 0)
            if self._is_in_string:
                return b""
        rest = _STRING.sub(b"s", text[start:] + _SENTINEL)
        if rest.endswith(_SENTINEL):
            return rest[:-1]
        self._is_in_string = True
        if (len(text) - len(text.rstrip(b"\\"))) % 2:
            self._pending_escape = b"\\"
        return rest

    def _string_end(self, text: bytes, start: int) -> int:
        """Return the index after the current string, and note whether the string continues."""
        found = _IN_STRING.match(text, start)
        assert found is not None
        end = found.end()
        self._is_in_string = text[end : end + 1] != b'"'
        if self._is_in_string:
            self._pending_escape = text[end:]
        return end + 1

    def _count_structure(self, structure: bytes) -> None:
        self._structure_bytes += len(structure)
        brackets = structure.translate(None, _NO_BRACKETS)
        opened = brackets.count(b"{") + brackets.count(b"[")
        self.values += opened + structure.count(b",")
        if self._structure_bytes > self._max_structure_bytes:
            raise TooMuchJSONError(f"{self._max_structure_bytes >> 20} MiB outside its strings")
        if self.values > self._max_values:
            raise TooMuchJSONError(f"{self._max_values:,} values")
        if self._depth + _depth_bound(brackets) <= MAX_DEPTH:
            self._depth += 2 * opened - len(brackets)
            return
        depths = list(accumulate(map(_DEPTH_CHANGES.__getitem__, brackets), initial=self._depth))
        self._depth = depths[-1]
        if max(depths) > MAX_DEPTH:
            raise TooMuchJSONError(f"{MAX_DEPTH} levels")


def _depth_bound(brackets: bytes) -> int:
    """Return an upper bound of the nesting depth. For flat JSON this is a hundred times as fast as
    following the depth bracket by bracket."""
    passes = 0
    while passes < _PASSES:
        reduced = brackets.replace(b"{}", b"").replace(b"[]", b"")
        if len(reduced) == len(brackets):
            break
        brackets = reduced
        passes += 1
    # Each pass removes one level of objects and one level of lists.
    return brackets.count(b"{") + brackets.count(b"[") + 2 * passes


# Decoding and encoding, several times as fast as the `json` module. Both block the event loop for a
# large value. A thread would not help, because the decoder holds the GIL for a whole string.

_INFINITE = (inf, -inf)


def decode_json(text: str | bytes) -> Any:
    """Decode JSON as `json.loads` does. Raises ValueError, RecursionError."""
    try:
        return from_json(text)
    except (TypeError, ValueError):  # lone surrogates, UTF-16, or invalid JSON
        return json.loads(text)


def encode_json(value: Any) -> bytes:
    """Encode a value as JSON in UTF-8. NaN and infinity become null. Raises TypeError."""
    try:
        return orjson.dumps(value)
    except TypeError:  # an integer of more than 64 bits, or a lone surrogate
        if has_non_finite(value):
            value = _with_nulls(value)
        return json.dumps(value).encode()


def encode_sorted_json(value: Any) -> bytes:
    """Encode a value as JSON with sorted names, for comparisons. The encoding of a value is always
    the same, but may differ from the encoding by `json.dumps`. Raises TypeError."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # see encode_json
        return json.dumps(value, sort_keys=True).encode()


def _with_nulls(value: Any) -> Any:
    """Return a copy of a value with None in place of NaN and infinity."""
    if isinstance(value, dict):
        return {key: _with_nulls(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_nulls(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def has_non_finite(value: Any) -> bool:
    """Return True if a decoded value contains NaN or infinity, which are not JSON."""
    pending: list[Any] = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, dict | list):
            items: Iterable[Any] = value.values() if isinstance(value, dict) else value
            pending += [item for item in items if isinstance(item, dict | list | float)]
        elif value in _INFINITE or value != value:
            return True
    return False
