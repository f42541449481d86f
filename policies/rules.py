"""An operator's rules for the actions of a run (its commands, its files, its connections), and the
regular expressions in settings."""

import posixpath
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from policies.workspace import WORKING_DIR

# Patterns

Span = tuple[int, int]


class Pattern:
    """A regular expression in RE2's syntax, without look-around and back references, so that a
    search takes time linear in the text."""

    def __init__(self, expression: str) -> None:
        """Compile the expression. Raises ValueError if it is invalid, or if it matches the empty
        text and therefore every text."""
        import re2

        options = re2.Options()
        options.log_errors = False
        try:
            self._compiled: Any = re2.compile(expression, options=options)
        except re2.error as error:
            (cause,) = error.args
            message = cause.decode(errors="replace") if isinstance(cause, bytes) else str(cause)
            raise ValueError(f"{expression!r} is not a valid pattern: {message}") from error
        if self._compiled.search("") is not None:
            raise ValueError(f"{expression!r} is not a valid pattern: it matches every text")

    def matches(self, text: str) -> bool:
        """Return True if the pattern matches anywhere in the text."""
        return self._compiled.search(_replace_surrogates(text)) is not None

    def spans(self, text: str) -> list[tuple[Span, Span]]:
        """Return a pair of spans for each match: the span of the match, and the span of its first
        group. Without a group, both are the span of the match."""
        matches = self._compiled.finditer(_replace_surrogates(text))
        return [(match.span(), _group_span(match)) for match in matches]


@lru_cache(maxsize=1024)
def compile_pattern(expression: str) -> Pattern:
    """Return the compiled pattern, from a cache if possible. Raises ValueError."""
    return Pattern(expression)


def _group_span(match: Any) -> Span:
    span: Span = match.span(1) if match.re.groups else match.span()
    return match.span() if span == (-1, -1) else span


def _replace_surrogates(text: str) -> str:
    """Return the text with `?` in place of lone surrogates, which RE2 cannot search. The length
    stays the same."""
    return text if text.isascii() else text.encode(errors="replace").decode()


# Rules

RuleTarget = Literal["command", "file", "egress"]
Action = Literal["deny", "log"]
MAX_SUBJECT_CHARS = 1000
"""Maximum length of a matched subject in events and logs."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule that denies or records an action. Raises ValueError for an invalid name or pattern."""

    name: str
    """The name of the rule, of letters, digits, - and _."""
    target: RuleTarget  # not `on`, which YAML 1.1 takes for a boolean
    """The subject of the rule. command: a bash command, or the input of a job. file: the path of a
    file that the editor views or writes, or of an artifact. egress: the `host:port` of a
    connection."""
    pattern: str
    """A regular expression in RE2's syntax that is searched anywhere in the subject. `^` and `$`
    match its start and end, `(?i)` ignores case."""
    action: Action
    """deny: refuse the action. log: allow the action and record it."""
    reason: str = ""
    """The reason of a refusal, for the model."""

    def __post_init__(self) -> None:
        if not self.name.replace("-", "").replace("_", "").isalnum() or not self.name.isascii():
            raise ValueError(f"a rule's name has letters, digits, - and _, not {self.name!r}")
        compile_pattern(self.pattern)

    @property
    def refusal(self) -> str | None:
        """The refusal for the model, or None if the action is allowed."""
        if self.action == "log":
            return None
        reason = f": {self.reason}" if self.reason else ""
        return f"rule {self.name} forbids this{reason}"


@dataclass(frozen=True, slots=True)
class RuleSet:
    """The rules of a run."""

    rules: tuple[Rule, ...] = ()
    """The rules in order; only the first match of an action applies."""

    def first_match(self, target: RuleTarget, subject: str) -> Rule | None:
        """Return the first rule that matches the subject of an action, or None."""
        for rule in self.rules:
            if rule.target == target and compile_pattern(rule.pattern).matches(subject):
                return rule
        return None

    def withheld_files(self, paths: Iterable[str]) -> dict[str, Rule]:
        """Return the paths of artifacts that a rule refuses, each with its rule."""
        rules = {path: self.first_match("file", path) for path in paths} if self.rules else {}
        return {path: rule for path, rule in rules.items() if rule and rule.refusal}


def rule_subject(tool: str, arguments: Mapping[str, Any]) -> tuple[RuleTarget, str] | None:
    """Return the rule target and the rule subject of a call of a sandbox tool, or None if no rule
    can apply to the call."""
    match tool, arguments:
        case "execute_bash", {"command": str(text)}:
            return "command", text
        case "str_replace_editor", {"path": str(path)}:
            absolute = posixpath.normpath(posixpath.join(WORKING_DIR, path))
            return "file", "/" + absolute.lstrip("/")  # normpath keeps two slashes at the start
    return None
