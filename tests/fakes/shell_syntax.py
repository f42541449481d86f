"""Parses the subset of bash that MemorySandbox supports. Other syntax is refused."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_INSIDE_PARENTHESES = r"(?:[^()]|\([^()]*\))*"
_SUBSTITUTION = rf"\$\({_INSIDE_PARENTHESES}\)"
PIECE = re.compile(
    r"'(?P<single>[^']*)'"
    rf'|"(?P<double>(?:\\.|{_SUBSTITUTION}|[^"\\])*+)"'
    r"|\\(?P<escaped>.)"
    rf"|(?P<expansion>{_SUBSTITUTION}|\$\{{[^}}]*\}}|\$[A-Za-z_]\w*|\$[?$!#@*0-9])"
    r"|(?P<literal>[^\s;&|<>()'\"\\$`]+|\$)",
    re.DOTALL,
)
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_BLANK = re.compile(r"(?:[ \t]|\\\n)+")
_COMMENT = re.compile(r"#[^\n]*")
_REDIRECT = re.compile(r"(\d?)(<<|>>|>&|<|>)")
_OPERATOR = re.compile(r"&&|\|\||[\n;&|()]")
_ARRAY = re.compile(r"[A-Za-z_]\w*=\(")
_UNSUPPORTED = re.compile(r"`|[<>]\(|<<[-<]|&>|\$\(\(|\$'|\[\[")
_CLOSERS = frozenset({"}", "do", "done", "then", "elif", "else", "fi"})


class ShellSyntaxError(Exception):
    """The script is invalid in real bash, too."""


class UnsupportedShellError(Exception):
    """The fake does not support this part of bash. Extend the fake or change the test."""


@dataclass(frozen=True, slots=True)
class Redirect:
    fd: int
    operator: str
    target: str
    """A word; for a heredoc its text."""
    literal: bool = False
    """True if the text of a heredoc is literal."""


@dataclass(frozen=True, slots=True)
class Simple:
    assignments: tuple[str, ...]
    words: tuple[str, ...]
    redirects: tuple[Redirect, ...]


@dataclass(frozen=True, slots=True)
class Pipeline:
    parts: tuple["Command", ...]
    negated: bool


@dataclass(frozen=True, slots=True)
class AndOr:
    first: Pipeline
    rest: tuple[tuple[str, Pipeline], ...]


@dataclass(frozen=True, slots=True)
class Sequence:
    items: tuple[tuple[AndOr, bool], ...]
    """The commands; True if one runs in the background."""


@dataclass(frozen=True, slots=True)
class Group:
    body: Sequence
    subshell: bool
    redirects: tuple[Redirect, ...]


@dataclass(frozen=True, slots=True)
class Function:
    name: str
    body: "Command"


@dataclass(frozen=True, slots=True)
class Loop:
    condition: Sequence
    body: Sequence
    until: bool


@dataclass(frozen=True, slots=True)
class For:
    name: str
    words: tuple[str, ...]
    body: Sequence


@dataclass(frozen=True, slots=True)
class If:
    condition: Sequence
    then: Sequence
    otherwise: "Sequence | If | None"


Command = Simple | Group | Function | Loop | For | If


@dataclass(slots=True)
class Token:
    kind: str
    """One of word, operator, redirect and end."""
    text: str
    fd: int = 0
    target: str = ""
    literal: bool = False


def parse(script: str) -> Sequence:
    """Return the tree of a script. Raises ShellSyntaxError and UnsupportedShellError."""
    parser = _Parser(list(_tokens(script)))
    tree = parser.sequence()
    if parser.next.kind != "end":
        raise ShellSyntaxError(f"syntax error near unexpected token `{parser.next.text}'")
    return tree


def words_of(text: str) -> tuple[str, ...]:
    """Return the words between an array's parentheses."""
    return tuple(token.text for token in _tokens(text) if token.kind == "word")


def _tokens(script: str) -> Iterator[Token]:
    heredocs: list[Token] = []
    at = 0
    while at < len(script):
        if blank := _BLANK.match(script, at) or _COMMENT.match(script, at):
            at = blank.end()
        elif found := _UNSUPPORTED.match(script, at):
            raise UnsupportedShellError(f"{found[0]!r} in {script!r}")
        elif redirect := _REDIRECT.match(script, at):
            fd = int(redirect[1] or redirect[2][0] != "<")
            token = Token("redirect", redirect[2], fd)
            blank = _BLANK.match(script, redirect.end())
            start = blank.end() if blank else redirect.end()
            at = _word_end(script, start)
            token.target = script[start:at]
            if token.text == "<<":
                heredocs.append(token)
            yield token
        elif operator := _OPERATOR.match(script, at):
            at = operator.end()
            if operator[0] == "\n":
                at = _read_heredocs(script, at, heredocs)
            yield Token("operator", operator[0])
        else:
            end = _word_end(script, at)
            yield Token("word", script[at:end])
            at = end
    yield Token("end", "end of file")


def _word_end(script: str, at: int) -> int:
    start = at
    if array := _ARRAY.match(script, at):
        at = array.end()
        while piece := PIECE.match(script, at) or re.compile(r"\s+").match(script, at):
            at = piece.end()
        return at + 1
    while piece := PIECE.match(script, at):
        if found := _UNSUPPORTED.match(script, at):
            raise UnsupportedShellError(f"{found[0]!r} in {script!r}")
        at = piece.end()
    if script[at : at + 1] in ("'", '"'):
        raise ShellSyntaxError(f"unexpected EOF while looking for matching `{script[at]}'")
    if at == start:
        raise ShellSyntaxError(f"syntax error near unexpected token `{script[at : at + 1]}'")
    return at


def _read_heredocs(script: str, at: int, heredocs: list[Token]) -> int:
    for token in heredocs:
        delimiter = re.sub(r"['\"\\]", "", token.target)
        token.literal = delimiter != token.target
        lines = []
        while at < len(script):
            line, newline, _ = script[at:].partition("\n")
            at += len(line) + len(newline)
            if line == delimiter:
                break
            lines.append(line + newline)
        token.target = "".join(lines)
    heredocs.clear()
    return at


class _Parser:
    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._at = 0

    @property
    def next(self) -> Token:
        return self._tokens[self._at]

    def _take(self) -> Token:
        token = self.next
        self._at += 1
        return token

    def _accept(self, kind: str, *texts: str) -> bool:
        if self.next.kind == kind and self.next.text in texts:
            self._at += 1
            return True
        return False

    def _expect(self, kind: str, text: str) -> None:
        if not self._accept(kind, text):
            raise ShellSyntaxError(f"syntax error near unexpected token `{self.next.text}'")

    def _skip_newlines(self) -> None:
        while self._accept("operator", "\n"):
            pass

    def sequence(self) -> Sequence:
        items: list[tuple[AndOr, bool]] = []
        self._skip_newlines()
        while not self._at_closer():
            and_or = self._and_or()
            background = self._accept("operator", "&")
            items.append((and_or, background))
            separated = background or self._accept("operator", ";", "\n")
            self._skip_newlines()
            if not separated and not self._at_closer():
                break
        return Sequence(tuple(items))

    def _at_closer(self) -> bool:
        token = self.next
        closing_word = token.kind == "word" and token.text in _CLOSERS
        return token.kind == "end" or token.text == ")" or closing_word

    def _and_or(self) -> AndOr:
        first = self._pipeline()
        rest = []
        while self.next.kind == "operator" and self.next.text in ("&&", "||"):
            operator = self._take().text
            self._skip_newlines()
            rest.append((operator, self._pipeline()))
        return AndOr(first, tuple(rest))

    def _pipeline(self) -> Pipeline:
        negated = self._accept("word", "!")
        parts = [self._command()]
        while self._accept("operator", "|"):
            self._skip_newlines()
            parts.append(self._command())
        return Pipeline(tuple(parts), negated)

    def _command(self) -> Command:
        if self._accept("operator", "("):
            return self._group(")", "operator")
        if self._accept("word", "{"):
            return self._group("}", "word")
        if self.next.kind == "word" and self.next.text in ("while", "until"):
            return self._loop(self._take().text == "until")
        if self._accept("word", "for"):
            return self._for()
        if self._accept("word", "if"):
            return self._if()
        return self._function() if self._at_function() else self._simple()

    def _group(self, closer: str, kind: str) -> Group:
        body = self.sequence()
        self._expect(kind, closer)
        return Group(body, kind == "operator", self._redirects())

    def _redirects(self) -> tuple[Redirect, ...]:
        found = []
        while self.next.kind == "redirect":
            found.append(self._redirect())
        return tuple(found)

    def _redirect(self) -> Redirect:
        token = self._take()
        return Redirect(token.fd, token.text, token.target, token.literal)

    def _loop(self, until: bool) -> Loop:
        condition = self.sequence()
        return Loop(condition, self._do_block(), until)

    def _do_block(self) -> Sequence:
        self._expect("word", "do")
        body = self.sequence()
        self._expect("word", "done")
        return body

    def _for(self) -> For:
        name = self._take().text
        self._expect("word", "in")
        words = []
        while self.next.kind == "word":
            words.append(self._take().text)
        self._accept("operator", ";", "\n")
        self._skip_newlines()
        return For(name, tuple(words), self._do_block())

    def _if(self) -> If:
        condition = self.sequence()
        self._expect("word", "then")
        then = self.sequence()
        if self._accept("word", "elif"):
            return If(condition, then, self._if())
        otherwise = self.sequence() if self._accept("word", "else") else None
        self._expect("word", "fi")
        return If(condition, then, otherwise)

    def _at_function(self) -> bool:
        following = self._tokens[self._at + 1 : self._at + 3]
        return self.next.kind == "word" and [token.text for token in following] == ["(", ")"]

    def _function(self) -> Function:
        name = self._take().text
        self._at += 2
        self._skip_newlines()
        return Function(name, self._command())

    def _simple(self) -> Simple:
        assignments: list[str] = []
        words: list[str] = []
        redirects: list[Redirect] = []
        while self.next.kind in ("word", "redirect"):
            if self.next.kind == "redirect":
                redirects.append(self._redirect())
            elif not words and ASSIGNMENT.fullmatch(self.next.text):
                assignments.append(self._take().text)
            else:
                words.append(self._take().text)
        if not assignments and not words and not redirects:
            raise ShellSyntaxError(f"syntax error near unexpected token `{self.next.text}'")
        return Simple(tuple(assignments), tuple(words), tuple(redirects))
