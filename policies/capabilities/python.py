"""Python, as far as one must read it to know what it is for.

Read by its tokens, not by its grammar: much of it is cut off, wrong, or for another version. A
library counts where it is used, not where it is only imported to see whether it is there.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import pairwise
from keyword import kwlist
from typing import NamedTuple

from policies.capabilities.kinds import COMPUTATION, EXTERNAL, FILES, Code, Use, together
from policies.capabilities.libraries import (
    COMPUTING_CALLS,
    COMPUTING_NAMES,
    COMPUTING_WORDS,
    EXTERNAL_NAMES,
    FILE_CALLS,
    FILE_NAMES,
    NO_COMPUTING_NAMES,
    NUMBER_CALLS,
    PLACE_CALLS,
    SHELL_CALLS,
)

# No group is repeated possessively: Python before 3.11.4 loses its place in those. What stands in
# the groups here never matches in two ways, so there is nothing to go back to either.
_TOKEN = re.compile(
    r'''(?P<blank>[ \t\r\f]++|\\\n|\#[^\n]*+)
    | (?P<string>[rRbBuUfFtT]{0,2}(?:
          """(?:[^\\"]++|\\.|"(?!""))*(?:"""|\Z|\\\Z)
        | \'\'\'(?:[^\\']++|\\.|'(?!\'\'))*(?:\'\'\'|\Z|\\\Z)
        | "(?:[^"\\\n]++|\\.)*"?
        | '(?:[^'\\\n]++|\\.)*'?))
    | (?P<name>[^\W\d]\w*+(?:\.[^\W\d]\w*+)*)
    | (?P<number>(?:\d[\d_]*+(?:\.[\d_]*+)?|\.\d[\d_]*+)(?:[eE][+-]?\d++)?\w*+)
    | (?P<newline>\n)
    | (?P<sign>\*\*=?|//=?|->|[-+*/%@]=?)
    | (?P<other>.)''',
    re.VERBOSE | re.DOTALL,
)
_STRING = re.compile(r"[a-zA-Z]{0,2}(\"\"\"|'''|\"|')", re.DOTALL)
_KEYWORDS = frozenset(kwlist)
_STRONG_SIGNS = frozenset({"*", "/", "%", "//", "**"})
"""The others join texts and lists as often as numbers."""
_OPENING, _CLOSING = frozenset("([{"), frozenset(")]}")
_MAX_ARGUMENTS = 64
"""How many tokens of a call are looked at for the command that it runs."""
_MAX_PARTS = 4


class _Token(NamedTuple):
    kind: str
    text: str

    @property
    def begins_value(self) -> bool:
        """Whether what a sum is made of may begin here; texts are none."""
        if self.kind == "name":
            return self.text not in _KEYWORDS
        return self.kind == "number" or self.text == "("

    @property
    def ends_value(self) -> bool:
        """Whether it may end here."""
        return self.text in (")", "]") or (self.text != "(" and self.begins_value)


_END = _Token("newline", "\n")


def use_of_python(text: str) -> Use:
    """What a script uses."""
    return _Script(text).use()


class _Imports:
    """What the names of a script stand for."""

    def __init__(self) -> None:
        self.meaning: dict[str, str] = {}
        self.wholly: set[str] = set()
        """Modules all of whose names are there."""

    def read(self, statement: str) -> None:
        """Note an import."""
        origin, _, names = statement.partition("import ")
        module = origin.removeprefix("from ").strip()
        for each in names.split(","):
            name, _, alias = (part.strip() for part in each.partition(" as "))
            if name == "*":
                self.wholly.add(module)
            elif module:
                self.meaning[alias or name] = f"{module}.{name}"
            elif alias:
                self.meaning[alias] = name
            else:
                root = name.partition(".")[0]
                self.meaning[root] = root

    def resolved(self, name: str) -> str:
        """An imported name from its module on; nothing for any other."""
        first, dot, rest = name.partition(".")
        return self.meaning[first] + dot + rest if first in self.meaning else ""


class _Script:
    def __init__(self, text: str) -> None:
        self._imports = _Imports()
        self._body = self._without_imports(_tokens(text))
        names = {token.text for token in self._body if token.kind == "name"}
        # Who asks for a version only looks whether the library is there.
        names = {name for name in names if not name.endswith("__version__")}
        resolved = {self._imports.resolved(name) for name in names} | self._imports.wholly
        self._used = [_beginnings(name) for name in resolved]
        self._called = {
            token.text.rpartition(".")[2]
            for token, after in pairwise([*self._body, _END])
            if token.kind == "name" and after.text == "("
        }

    def use(self) -> Use:
        used = [Use(code=tuple(self._commands()))]
        if any(name & EXTERNAL_NAMES for name in self._used):
            used.append(EXTERNAL)
        if self._called & FILE_CALLS or any(name & FILE_NAMES for name in self._used):
            used.append(FILES)
        if self._computes():
            used.append(COMPUTATION)
        return together(used)

    def _without_imports(self, tokens: Sequence[_Token]) -> list[_Token]:
        body: list[_Token] = []
        statement: list[str] = []
        depth, before = 0, _END
        for token in tokens:
            if statement:
                depth += (token.text == "(") - (token.text == ")")
                if token.text == ";" or (token.text == "\n" and depth <= 0):
                    self._imports.read(" ".join(statement))
                    statement = []
                elif token.text not in ("(", ")", "\n"):
                    statement.append(token.text)
            elif before.text in ("\n", ";", ":") and token.text in ("import", "from"):
                statement, depth = [token.text], 0
            else:
                body.append(token)
            before = token
        self._imports.read(" ".join(statement))
        return body

    # Computing

    def _computes(self) -> bool:
        if self._called & COMPUTING_CALLS or any(map(COMPUTING_WORDS.match, self._called)):
            return True
        if any(name & COMPUTING_NAMES and not name & NO_COMPUTING_NAMES for name in self._used):
            return True
        return any(self._is_sum(*each) for each in _signs(self._body))

    def _is_sum(self, before: _Token, sign: _Token, after: _Token) -> bool:
        if not (before.ends_value and after.begins_value):
            return False
        operation = sign.text.removesuffix("=")
        if operation in _STRONG_SIGNS:
            return operation != "/" or not any("pathlib" in name for name in self._used)
        numbers = [token.text for token in (before, after) if token.kind == "number"]
        if operation not in ("+", "-") or numbers == ["1"]:
            return False
        if len(numbers) == 2 or self._called & NUMBER_CALLS:
            return True
        return not numbers and "range" in self._called

    # Commands

    def _commands(self) -> Iterator[Code]:
        for at, token in enumerate(self._body):
            if token.kind == "name" and self._imports.resolved(token.text) in SHELL_CALLS:
                words = _first_argument(self._body[at + 1 : at + _MAX_ARGUMENTS])
                text = words[0] if len(words) == 1 else shlex.join(words)
                yield Code("shell", text)


def _tokens(text: str) -> list[_Token]:
    found = (_Token(str(token.lastgroup), token.group()) for token in _TOKEN.finditer(text))
    return [token for token in found if token.kind != "blank"]


def _beginnings(name: str) -> frozenset[str]:
    """`a`, `a.b` and so on of `a.b.c.d`."""
    parts = name.split(".", _MAX_PARTS)[:_MAX_PARTS]
    return frozenset(".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _signs(body: Sequence[_Token]) -> Iterator[tuple[_Token, _Token, _Token]]:
    """Each sign and what stands beside it, but for places in a text or a list: `text[at - 9 :]`."""
    in_place = [False]
    before = _END
    for token, after in pairwise([*body, _END]):
        if token.text in _OPENING:
            is_index = token.text == "[" and (before.ends_value or before.kind == "string")
            is_place = token.text == "(" and before.text.rpartition(".")[2] in PLACE_CALLS
            in_place.append(in_place[-1] or is_index or is_place)
        elif token.text in _CLOSING and len(in_place) > 1:
            in_place.pop()
        elif token.kind == "sign" and not in_place[-1]:
            yield before, token, after
        before = token


def _first_argument(tokens: Sequence[_Token]) -> list[str]:
    """The command that a call is given: one text, or a list of words."""
    words: list[str] = []
    depth = 0
    for token in tokens:
        depth += (token.text in _OPENING) - (token.text in _CLOSING)
        if depth <= 0 or (depth == 1 and token.text == ","):
            break
        if token.kind == "string":
            words.append(_unquoted(token.text))
        elif token.text == "sys.executable":
            words.append("python3")
    return words


def _unquoted(literal: str) -> str:
    opening = _STRING.match(literal)
    assert opening is not None
    return literal[opening.end() :].removesuffix(opening[1]).replace("\\n", "\n")
