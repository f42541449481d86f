"""Parses Bash scripts into the commands that they run, with their arguments.

The parser takes one pass, without recursion or backtracking. Its time is linear in the length of
the text, except for words with many `#`. So callers limit the text's length. The parser accepts
scripts that bash would refuse.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

_UNQUOTED_TOKEN = re.compile(
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
_QUOTED_TOKEN = re.compile(
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
"""Maximum depth of nested brackets, above which parsing ends. No real script nests so deep."""
_INNER_WORD = "$()"
"""Replaces a command substitution inside a word."""
ARITHMETIC = "$(("
"""The program name of the command that represents an arithmetic expansion."""


@dataclass(frozen=True, slots=True)
class Command:
    """One simple command: a program with its arguments and redirections."""

    words: tuple[str, ...]
    """The command's words without quotes and redirections."""
    stdin: str = ""
    """The standard input, if the script contains it: a here-document, a here-string, or the piped
    output of echo, printf or cat."""
    stdout: str = ""
    """The standard output, if the script contains it: the output of echo, printf and cat."""
    reads_file: bool = False
    """True if the standard input is a file."""
    written_files: tuple[str, ...] = ()
    """The files that the output is redirected to."""
    is_piped: bool = False
    """True if the standard input is a pipe."""


def parse_commands(text: str) -> list[Command]:
    """Return every simple command of a script, including commands nested in others."""
    return _Parser(text).parse()


@dataclass(slots=True, eq=False)
class _CommandDraft:
    """A command that is being parsed."""

    words: list[str] = field(default_factory=list)
    stdin: list[str] = field(default_factory=list)
    reads_file: bool = False
    written_files: list[str] = field(default_factory=list)
    piped_from: "_CommandDraft | None" = None

    def stdout(self) -> str:
        match self.words:
            case ["echo" | "printf", *words]:
                return " ".join(word for word in words if not word.startswith("-"))
            case ["cat"]:
                return "".join(self.stdin)
        return ""

    def command(self) -> Command:
        return Command(
            tuple(self.words),
            "".join(self.stdin) or (self.piped_from.stdout() if self.piped_from else ""),
            self.stdout(),
            self.reads_file,
            tuple(self.written_files),
            self.piped_from is not None,
        )


@dataclass(slots=True, eq=False)
class _Frame:
    """The script, or one level of brackets in it."""

    kind: str = ""
    """The opening bracket; empty for the script."""
    has_no_commands: bool = False
    """True for brackets without commands: an arithmetic expansion or an array."""
    in_word: bool = False
    """True if the bracket is inside a word."""
    draft: _CommandDraft = field(default_factory=_CommandDraft)
    pieces: list[str] | None = None
    """The pieces of the word that is being parsed; None between words."""
    is_quoted: bool = False
    """True inside double quotes."""
    redirection: str = ""
    """The redirection whose target is the next word."""


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0
        self._frames = [_Frame()]
        self._drafts: list[_CommandDraft] = []
        self._heredocs: list[tuple[_CommandDraft, str]] = []

    def parse(self) -> list[Command]:
        while self._position < len(self._text) and len(self._frames) < _MAX_FRAMES:
            pattern = _QUOTED_TOKEN if self._frames[-1].is_quoted else _UNQUOTED_TOKEN
            token = pattern.match(self._text, self._position)
            assert token is not None
            self._position = token.end()
            self._handlers[token.lastgroup](self, token.group())
        while self._frames:
            self._end_command()
            self._frames.pop()
        return [draft.command() for draft in self._drafts]

    # Words

    def _add_to_word(self, piece: str) -> None:
        frame = self._frames[-1]
        if frame.pieces is None:
            frame.pieces = []
        frame.pieces.append(piece)

    def _add_single_quoted(self, value: str) -> None:
        self._add_to_word(value[1:].removesuffix("'"))

    def _add_ansi_quoted(self, value: str) -> None:
        self._add_to_word(value[2:].removesuffix("'").replace("\\n", "\n"))

    def _begin_double_quotes(self, _: str) -> None:
        self._add_to_word("")
        self._frames[-1].is_quoted = True

    def _end_double_quotes(self, _: str) -> None:
        self._frames[-1].is_quoted = False

    def _add_escaped(self, value: str) -> None:
        self._add_to_word(value[1:])

    def _quoted_escape(self, value: str) -> None:
        is_escape = value[1:] in ('"', "\\", "$", "`")
        self._add_to_word(value[1:] if is_escape else value.removesuffix("\\\n"))

    def _skip_comment(self, value: str) -> None:
        if self._frames[-1].pieces is not None:  # `a#b` is one word
            self._add_to_word("#")
            self._position -= len(value) - 1

    def _end_word(self, _: str) -> None:
        frame = self._frames[-1]
        if frame.pieces is None:
            return
        word, frame.pieces = "".join(frame.pieces), None
        redirection, frame.redirection = frame.redirection, ""
        match redirection:
            case "":
                frame.draft.words.append(word)
            case "<":
                frame.draft.reads_file = True
            case "<<<":
                frame.draft.stdin.append(word)
            case _:
                frame.draft.written_files.append(word)

    # Redirections

    def _redirect(self, value: str) -> None:
        frame = self._frames[-1]
        self._end_word("")
        if frame.draft.words[:1] == ["[["] or value[-1].isdigit() or value.endswith("-"):
            return
        self._expect_target("<" if "<" in value and ">" not in value else ">")

    def _expect_target(self, redirection: str) -> None:
        self._end_word("")
        self._frames[-1].redirection = redirection

    def _begin_heredoc(self, value: str) -> None:
        self._end_word("")
        if not self._frames[-1].has_no_commands:
            end = value.removeprefix("<<").removeprefix("-").strip(" \t")
            self._heredocs.append((self._frames[-1].draft, end.strip("'\"").replace("\\", "")))

    def _end_line(self, _: str) -> None:
        self._end_command()
        heredocs, self._heredocs = self._heredocs, []
        for draft, end in heredocs:
            draft.stdin.append(self._read_heredoc(end))

    def _read_heredoc(self, delimiter: str) -> str:
        lines = []
        while self._position < len(self._text):
            stop = self._text.find("\n", self._position)
            stop = len(self._text) if stop < 0 else stop
            line = self._text[self._position : stop]
            self._position = min(stop + 1, len(self._text))
            if line.strip("\t") == delimiter:
                break
            lines.append(line)
        return "\n".join(lines)

    # Commands

    def _end_command(self) -> _CommandDraft:
        self._end_word("")
        frame = self._frames[-1]
        ended, frame.draft, frame.redirection = frame.draft, _CommandDraft(), ""
        if not frame.has_no_commands and (ended.words or ended.reads_file or ended.written_files):
            self._drafts.append(ended)
        return ended

    def _end_at_separator(self, _: str) -> None:
        self._end_command()

    def _begin_piped_command(self, _: str) -> None:
        ended = self._end_command()
        self._frames[-1].draft.piped_from = ended

    # Brackets

    def _open_arithmetic(self, value: str) -> None:
        if value.startswith("$"):
            self._add_to_word(_INNER_WORD)
            self._drafts.append(_CommandDraft([ARITHMETIC]))
        self._frames += [_Frame("(", has_no_commands=True, in_word=True) for _ in range(2)]

    def _open_substitution(self, _: str) -> None:
        self._add_to_word(_INNER_WORD)
        self._frames.append(_Frame("$(", in_word=True))

    def _toggle_backtick(self, _: str) -> None:
        if self._frames[-1].kind == "`":
            self._end_command()
            self._frames.pop()
            return
        self._add_to_word(_INNER_WORD)
        self._frames.append(_Frame("`", in_word=True))

    def _open_bracket(self, _: str) -> None:
        frame = self._frames[-1]
        is_array = frame.pieces is not None
        if not is_array:
            self._end_command()
        self._frames.append(
            _Frame("(", has_no_commands=is_array or frame.has_no_commands, in_word=is_array)
        )

    def _close_bracket(self, _: str) -> None:
        self._end_command()
        if len(self._frames) == 1 or self._frames[-1].kind == "`":
            return
        closed = self._frames.pop()
        if closed.kind == "(" and closed.in_word:
            self._end_word("")
            if self._frames[-1].draft.words[-1:] != [_INNER_WORD]:
                self._end_command()  # `name()` before a function's body, or an array

    # Tokens

    _handlers: ClassVar[Mapping[str | None, Callable[["_Parser", str], None]]] = {
        "blank": _end_word,
        "newline": _end_line,
        "comment": _skip_comment,
        "single": _add_single_quoted,
        "ansi": _add_ansi_quoted,
        "double": _begin_double_quotes,
        "end": _end_double_quotes,
        "escape": _add_escaped,
        "quoted_escape": _quoted_escape,
        "sum": _open_arithmetic,
        "inner": _open_substitution,
        "tick": _toggle_backtick,
        "herestring": _expect_target,
        "heredoc": _begin_heredoc,
        "redirect": _redirect,
        "pipe": _begin_piped_command,
        "separator": _end_at_separator,
        "open": _open_bracket,
        "close": _close_bracket,
        "plain": _add_to_word,
        "dollar": _add_to_word,
    }
    """The method that handles each kind of token."""
