"""Reads Bash as far as is needed to know which programs it runs, and with what arguments.

One pass, no recursion, no backtracking: the time is linear in the text, whatever it is. Text that
bash would refuse is read as far as it makes sense.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

_BARE = re.compile(
    r"""(?P<blank>[ \t\r]++|\\\n)
    | (?P<newline>\n)
    | (?P<comment>\#[^\n]*+)
    | (?P<single>'[^']*+'?)
    | (?P<ansi>\$'(?:[^'\\]++|\\.)*'?)
    | (?P<double>")
    | (?P<escape>\\.?)
    | (?P<sum>\$?\(\()
    | (?P<inner>\$\(|[<>]\()
    | (?P<tick>`)
    | (?P<herestring><<<)
    | (?P<heredoc><<-?[ \t]*+(?:'[^'\n]*'|"[^"\n]*"|[^\s<>|&;()'"]++))
    | (?P<redirect>(?:&|\d{0,3})(?:>>|>\||<>|>|<)(?:&(?:\d|-)?)?)
    | (?P<pipe>\|&?(?!\|))
    | (?P<separator>\|\||&&|;;?&?|&)
    | (?P<open>\()
    | (?P<close>\))
    | (?P<plain>[^\s'"\\$`|&;()<>\#]++|.)""",
    re.VERBOSE | re.DOTALL,
)
_QUOTED = re.compile(
    r"""(?P<plain>[^"\\$`]++)
    | (?P<quoted_escape>\\.?)
    | (?P<sum>\$\(\()
    | (?P<inner>\$\()
    | (?P<tick>`)
    | (?P<end>")
    | (?P<dollar>\$)""",
    re.VERBOSE | re.DOTALL,
)
_MAX_FRAMES = 64
"""How deep brackets in brackets are read: no real script nests so deep."""
_INNER_WORD = "$()"
"""Stands in a word for the output of a command in it."""
SUM = "$(("
"""Stands for a sum that the shell computes."""


@dataclass(frozen=True, slots=True)
class Command:
    """One simple command."""

    words: tuple[str, ...]
    """Without quotes and redirections."""
    stdin: str = ""
    """Its input, if the script contains it: a here-document, or what is echoed into its pipe."""
    stdout: str = ""
    """Its output, if the script contains it."""
    reads_file: bool = False
    """True if its input is a file."""
    written_files: tuple[str, ...] = ()
    """The files that its output goes to."""
    is_piped: bool = False
    """True if its input is a pipe."""


def parse_commands(text: str) -> list[Command]:
    """Return every simple command of a script, also those inside others."""
    return _Reader(text).read()


@dataclass(slots=True, eq=False)
class _Draft:
    """A command that is being read."""

    words: list[str] = field(default_factory=list)
    given: list[str] = field(default_factory=list)
    reads: bool = False
    writes: list[str] = field(default_factory=list)
    fed_by: "_Draft | None" = None

    def said(self) -> str:
        match self.words:
            case ["echo" | "printf", *words]:
                return " ".join(word for word in words if not word.startswith("-"))
            case ["cat"]:
                return "".join(self.given)
        return ""

    def finished(self) -> Command:
        given = "".join(self.given) or (self.fed_by.said() if self.fed_by else "")
        return Command(
            tuple(self.words),
            given,
            self.said(),
            self.reads,
            tuple(self.writes),
            self.fed_by is not None,
        )


@dataclass(slots=True, eq=False)
class _Frame:
    """A place with commands: the script, or brackets in it."""

    kind: str = ""
    is_silent: bool = False
    """True for brackets without commands: a sum, an array."""
    in_word: bool = False
    """True if it began inside a word."""
    draft: _Draft = field(default_factory=_Draft)
    pieces: list[str] | None = None
    """The pieces of the word that is being read."""
    is_quoted: bool = False
    awaits: str = ""
    """The redirection whose target comes next."""


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._frames = [_Frame()]
        self._drafts: list[_Draft] = []
        self._heredocs: list[tuple[_Draft, str]] = []

    def read(self) -> list[Command]:
        while self._at < len(self._text) and len(self._frames) < _MAX_FRAMES:
            pattern = _QUOTED if self._frames[-1].is_quoted else _BARE
            token = pattern.match(self._text, self._at)
            assert token is not None
            self._at = token.end()
            self._takers[token.lastgroup](self, token.group())
        while self._frames:
            self._end_command()
            self._frames.pop()
        return [draft.finished() for draft in self._drafts]

    # Words

    def _add(self, piece: str) -> None:
        frame = self._frames[-1]
        if frame.pieces is None:
            frame.pieces = []
        frame.pieces.append(piece)

    def _single(self, value: str) -> None:
        self._add(value[1:].removesuffix("'"))

    def _ansi(self, value: str) -> None:
        self._add(value[2:].removesuffix("'").replace("\\n", "\n"))

    def _double(self, _: str) -> None:
        self._add("")
        self._frames[-1].is_quoted = True

    def _end(self, _: str) -> None:
        self._frames[-1].is_quoted = False

    def _escape(self, value: str) -> None:
        self._add(value[1:])

    def _quoted_escape(self, value: str) -> None:
        is_taken = value[1:] in ('"', "\\", "$", "`")
        self._add(value[1:] if is_taken else value.removesuffix("\\\n"))

    def _comment(self, value: str) -> None:
        if self._frames[-1].pieces is not None:  # `a#b` is one word
            self._add("#")
            self._at -= len(value) - 1

    def _blank(self, _: str) -> None:
        frame = self._frames[-1]
        if frame.pieces is None:
            return
        word, frame.pieces = "".join(frame.pieces), None
        awaits, frame.awaits = frame.awaits, ""
        match awaits:
            case "":
                frame.draft.words.append(word)
            case "<":
                frame.draft.reads = True
            case "<<<":
                frame.draft.given.append(word)
            case _:
                frame.draft.writes.append(word)

    # Redirections

    def _redirect(self, value: str) -> None:
        frame = self._frames[-1]
        self._blank("")
        if frame.draft.words[:1] == ["[["] or value[-1].isdigit() or value.endswith("-"):
            return
        self._await("<" if "<" in value and ">" not in value else ">")

    def _await(self, redirection: str) -> None:
        self._blank("")
        self._frames[-1].awaits = redirection

    def _heredoc(self, value: str) -> None:
        self._blank("")
        if not self._frames[-1].is_silent:
            end = value.removeprefix("<<").removeprefix("-").strip(" \t")
            self._heredocs.append((self._frames[-1].draft, end.strip("'\"").replace("\\", "")))

    def _newline(self, _: str) -> None:
        self._end_command()
        heredocs, self._heredocs = self._heredocs, []
        for draft, end in heredocs:
            draft.given.append(self._body(end))

    def _body(self, end: str) -> str:
        lines = []
        while self._at < len(self._text):
            stop = self._text.find("\n", self._at)
            stop = len(self._text) if stop < 0 else stop
            line = self._text[self._at : stop]
            self._at = min(stop + 1, len(self._text))
            if line.strip("\t") == end:
                break
            lines.append(line)
        return "\n".join(lines)

    # Commands

    def _end_command(self) -> _Draft:
        self._blank("")
        frame = self._frames[-1]
        ended, frame.draft, frame.awaits = frame.draft, _Draft(), ""
        if not frame.is_silent and (ended.words or ended.reads or ended.writes):
            self._drafts.append(ended)
        return ended

    def _separator(self, _: str) -> None:
        self._end_command()

    def _pipe(self, _: str) -> None:
        ended = self._end_command()
        self._frames[-1].draft.fed_by = ended

    # Brackets

    def _sum(self, value: str) -> None:
        if value.startswith("$"):
            self._add(_INNER_WORD)
            self._drafts.append(_Draft([SUM]))
        self._frames += [_Frame("(", is_silent=True, in_word=True) for _ in range(2)]

    def _inner(self, _: str) -> None:
        self._add(_INNER_WORD)
        self._frames.append(_Frame("$(", in_word=True))

    def _tick(self, _: str) -> None:
        if self._frames[-1].kind == "`":
            self._end_command()
            self._frames.pop()
            return
        self._add(_INNER_WORD)
        self._frames.append(_Frame("`", in_word=True))

    def _open(self, _: str) -> None:
        frame = self._frames[-1]
        is_array = frame.pieces is not None
        if not is_array:
            self._end_command()
        self._frames.append(_Frame("(", is_silent=is_array or frame.is_silent, in_word=is_array))

    def _close(self, _: str) -> None:
        self._end_command()
        if len(self._frames) == 1 or self._frames[-1].kind == "`":
            return
        closed = self._frames.pop()
        if closed.kind == "(" and closed.in_word:
            self._blank("")
            if self._frames[-1].draft.words[-1:] != [_INNER_WORD]:
                self._end_command()  # `name()` before a function's body, or an array

    # Tokens

    _takers: ClassVar[Mapping[str | None, Callable[["_Reader", str], None]]] = {
        "blank": _blank,
        "newline": _newline,
        "comment": _comment,
        "single": _single,
        "ansi": _ansi,
        "double": _double,
        "end": _end,
        "escape": _escape,
        "quoted_escape": _quoted_escape,
        "sum": _sum,
        "inner": _inner,
        "tick": _tick,
        "herestring": _await,
        "heredoc": _heredoc,
        "redirect": _redirect,
        "pipe": _pipe,
        "separator": _separator,
        "open": _open,
        "close": _close,
        "plain": _add,
        "dollar": _add,
    }
    """The method for each kind of token."""
