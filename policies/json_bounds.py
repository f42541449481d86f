"""JSON from outside: bounds, checked while its bytes arrive, before anything is built of it; and a
fast decoder and encoder.

Twenty million empty objects fit into 60 MB. To decode them takes half a minute, in which the server
answers nobody, and gigabytes of memory. Long strings (files in base64) are cheap, so only the
bound on the whole body holds for them.
"""

import codecs
import json
import re
from collections.abc import Iterable
from contextlib import suppress
from itertools import accumulate
from math import inf
from typing import Any

import orjson
from pydantic_core import from_json

MAX_DEPTH = 64
MAX_VALUES = 200_000
"""Commas, and brackets that open: about one for each value."""
MAX_STRUCTURE_BYTES = 8 << 20
"""Everything but the insides of strings."""
SMALL_BYTES = 64 << 10
"""No text up to this length has more than `MAX_VALUES` values."""
_MARK_BYTES = 4
"""So many bytes tell the encoding."""

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z)', re.DOTALL)
"""A string, or the beginning of one that goes on beyond the text. Without the second case the
search would start again at each escaped quote, in time quadratic in the string's length."""
_AFTER = b"]"
"""Appended to a text: it is left after strings are removed, unless the text ends inside one."""
_IN_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"{}[]"))
_PASSES = 4
"""How often empty pairs of brackets are removed before the rest is counted one by one."""
_STEPS = {ord("{"): 1, ord("["): 1, ord("}"): -1, ord("]"): -1}


class TooMuchJSONError(ValueError):
    """The JSON exceeds a bound, which the message names."""


def is_small(text: bytes | bytearray) -> bool:
    """Return True if a text is too short to exceed any bound, which is quick to see."""
    return len(text) <= SMALL_BYTES and text.count(b"{") + text.count(b"[") <= MAX_DEPTH


class JSONBounds:
    """Checks one JSON text, piece by piece."""

    def __init__(self, max_values: int = MAX_VALUES) -> None:
        self._max_values = max_values
        self._max_structure = MAX_STRUCTURE_BYTES * max(1, max_values // MAX_VALUES)
        self._first = b""
        """The beginning, until it tells the encoding."""
        self._decoder: codecs.IncrementalDecoder | None = None
        """Of a body that is not UTF-8."""
        self._is_utf_8: bool | None = None
        self._is_in_string = False
        self._escape = b""
        """A backslash at the end of the last piece, inside a string."""
        self.values = 0
        """Commas and brackets that open, so far."""
        self._depth = self._structure = 0

    def check(self, piece: bytes) -> None:
        """Take the next bytes in. Raises TooMuchJSONError."""
        if self._is_utf_8 is None:
            self._first += piece
            if len(self._first) < _MARK_BYTES:
                return
            piece, self._first = self._first, b""
            encoding = json.detect_encoding(piece)
            self._is_utf_8 = encoding.startswith("utf-8")
            if not self._is_utf_8:
                self._decoder = codecs.getincrementaldecoder(encoding)("replace")
        if self._decoder is not None:
            piece = self._decoder.decode(piece).encode("utf-8", "replace")
        if self._is_in_string and not self._escape and b'"' not in piece and b"\\" not in piece:
            return  # most of a large file: the expressions below take twenty times as long
        self._count(self._outside_strings(self._escape + piece))

    def has_room_for(self, piece: bytes) -> bool:
        """Take the next bytes in; return False once they are too much."""
        try:
            self.check(piece)
        except TooMuchJSONError:
            return False
        return True

    def _outside_strings(self, text: bytes) -> bytes:
        """Return what of the text is outside strings, with one letter for each string."""
        start, self._escape = 0, b""
        if self._is_in_string:
            start = self._string_end(text, 0)
            if self._is_in_string:
                return b""
        rest = _STRING.sub(b"s", text[start:] + _AFTER)
        if rest.endswith(_AFTER):
            return rest[:-1]
        self._is_in_string = True
        if (len(text) - len(text.rstrip(b"\\"))) % 2:
            self._escape = b"\\"
        return rest

    def _string_end(self, text: bytes, start: int) -> int:
        """Return where the string that the text is in ends, and note if it goes on."""
        found = _IN_STRING.match(text, start)
        assert found is not None
        end = found.end()
        self._is_in_string = text[end : end + 1] != b'"'
        if self._is_in_string:
            self._escape = text[end:]
        return end + 1

    def _count(self, structure: bytes) -> None:
        self._structure += len(structure)
        brackets = structure.translate(None, _NO_BRACKETS)
        opened = brackets.count(b"{") + brackets.count(b"[")
        self.values += opened + structure.count(b",")
        if self._structure > self._max_structure:
            raise TooMuchJSONError(f"{self._max_structure >> 20} MiB outside its strings")
        if self.values > self._max_values:
            raise TooMuchJSONError(f"{self._max_values:,} values")
        if self._depth + _height(brackets) <= MAX_DEPTH:
            self._depth += 2 * opened - len(brackets)
            return
        depths = list(accumulate(map(_STEPS.__getitem__, brackets), initial=self._depth))
        self._depth = depths[-1]
        if max(depths) > MAX_DEPTH:
            raise TooMuchJSONError(f"{MAX_DEPTH} levels")


def _height(brackets: bytes) -> int:
    """Return an upper bound of the nesting depth. Flat brackets take a hundredth of the time that
    counting them one by one takes."""
    passes = 0
    while passes < _PASSES:
        left = brackets.replace(b"{}", b"").replace(b"[]", b"")
        if len(left) == len(brackets):
            break
        brackets = left
        passes += 1
    # Each pass takes one level of objects and one of lists away.
    return brackets.count(b"{") + brackets.count(b"[") + 2 * passes


# Decoding and encoding, with large files in it several times as fast as `json` does. The event loop
# stands still meanwhile, and a thread would not help: the interpreter decodes a whole string in one
# call.

LARGE_BYTES = 64 << 10
_INFINITE = (inf, -inf)


def decode_json(text: bytes) -> Any:
    """Decode JSON as `json.loads` does. Raises ValueError, RecursionError."""
    if len(text) > LARGE_BYTES:
        with suppress(ValueError):  # halves of surrogate pairs, UTF-16, or no JSON
            return from_json(text)
    return json.loads(text)


def encode_json(value: Any) -> bytes:
    """Encode a value as JSON in UTF-8; NaN and infinite numbers as null. Raises TypeError."""
    try:
        return orjson.dumps(value)
    except TypeError:  # an integer of more than 64 bits, or half a surrogate pair
        return json.dumps(value).encode()


def has_non_finite(value: Any) -> bool:
    """Return True if a decoded value contains NaN or infinity, which JSON does not have."""
    found: list[Any] = [value]
    while found:
        each = found.pop()
        if isinstance(each, dict | list):
            items: Iterable[Any] = each.values() if isinstance(each, dict) else each
            found += [item for item in items if isinstance(item, dict | list | float)]
        elif each in _INFINITE or each != each:
            return True
    return False
