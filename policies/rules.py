"""An operator's rules over what a run does (its commands, its files, the hosts that it reaches) and
the regular expressions that operators write."""

import posixpath
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import re2

from policies.workspace import WORKING_DIR

# Patterns

Span = tuple[int, int]


class Pattern:
    """A regular expression in RE2's syntax, without look-around and back references. A search takes
    time linear in the text."""

    def __init__(self, written: str) -> None:
        """Raises ValueError."""
        options = re2.Options()
        options.log_errors = False
        try:
            self._compiled: Any = re2.compile(written, options=options)
        except re2.error as error:
            (told,) = error.args
            words = told.decode(errors="replace") if isinstance(told, bytes) else str(told)
            raise ValueError(f"{written!r} is no pattern: {words}") from error
        if self._compiled.search("") is not None:
            raise ValueError(f"{written!r} is no pattern: it is found in any text")

    def matches(self, text: str) -> bool:
        """Return True if the pattern matches anywhere in the text."""
        return self._compiled.search(_encodable(text)) is not None

    def spans(self, text: str) -> list[tuple[Span, Span]]:
        """Return the spans of each match: the whole, and its first group, if it has one."""
        found = self._compiled.finditer(_encodable(text))
        return [(match.span(), _meant(match)) for match in found]


@lru_cache(maxsize=1024)
def compile_pattern(written: str) -> Pattern:
    """Compile a pattern, or return it from the cache. Raises ValueError."""
    return Pattern(written)


def _meant(match: Any) -> Span:
    span: Span = match.span(1) if match.re.groups else match.span()
    return match.span() if span == (-1, -1) else span


def _encodable(text: str) -> str:
    """Return the text, of the same length, with `?` for halves of surrogate pairs."""
    return text if text.isascii() else text.encode(errors="replace").decode()


# Rules

RuleTarget = Literal["command", "file", "egress"]
Action = Literal["deny", "ask", "flag"]
MAX_SUBJECT_CHARS = 1000
"""How much is told of the subject that a rule has matched."""
_NOBODY = "it needs a person's consent, and nobody can be asked while a run goes on"


@dataclass(frozen=True, slots=True)
class Rule:
    """An act that is denied or recorded. Raises ValueError for a malformed name or pattern."""

    name: str
    over: RuleTarget  # not `on`, which YAML 1.1 takes for a boolean
    """What the pattern is searched in. command: the text that bash or a job is given; file: the
    path that the editor views or writes, or that of a produced file; egress: `host:port`."""
    pattern: str
    """In RE2's syntax, found anywhere in the subject: `^` and `$` are its two ends, `(?i)` ignores
    case."""
    action: Action
    """deny: the act is refused; ask: also, because nobody can be asked for consent while a run goes
    on; flag: it is done and recorded."""
    reason: str = ""
    """What the model is told of it."""

    def __post_init__(self) -> None:
        if not self.name.replace("-", "").replace("_", "").isalnum() or not self.name.isascii():
            raise ValueError(f"a rule's name has letters, digits, - and _, not {self.name!r}")
        compile_pattern(self.pattern)

    @property
    def refusal(self) -> str | None:
        """Why the act is refused, in words for the model, or None if it is done."""
        if self.action == "flag":
            return None
        why = [_NOBODY] if self.action == "ask" else []
        why += [self.reason] if self.reason else []
        return f"rule {self.name} forbids this{': ' if why else ''}{'; '.join(why)}"


@dataclass(frozen=True, slots=True)
class RuleSet:
    """All of a run's rules."""

    rules: tuple[Rule, ...] = ()
    """Only the first that matches holds."""

    def first_match(self, over: RuleTarget, subject: str) -> Rule | None:
        """Return the rule that holds for an act, or None."""
        of_kind = (rule for rule in self.rules if rule.over == over)
        return next(
            (rule for rule in of_kind if compile_pattern(rule.pattern).matches(subject)), None
        )

    def withheld_files(self, paths: Iterable[str]) -> dict[str, Rule]:
        """Return the files that are not returned to the client, each with its rule."""
        met = {path: self.first_match("file", path) for path in paths} if self.rules else {}
        return {path: rule for path, rule in met.items() if rule and rule.refusal}


def rule_subject(tool: str, arguments: Mapping[str, Any]) -> tuple[RuleTarget, str] | None:
    """Return what rules see of a call of one of our tools, or None for nothing."""
    match tool, arguments:
        case "execute_bash", {"command": str(text)}:
            return "command", text
        case "str_replace_editor", {"path": str(path)}:
            absolute = posixpath.normpath(posixpath.join(WORKING_DIR, path))
            return "file", "/" + absolute.lstrip("/")  # normpath keeps two slashes at the start
    return None
