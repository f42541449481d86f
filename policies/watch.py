"""Rules over what a run does: its commands, its files, the hosts that it reaches."""

import posixpath
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from policies.patterns import pattern
from policies.workspace import WORKING_DIR

Act = Literal["command", "file", "egress"]
Action = Literal["deny", "ask", "flag"]
MAX_SUBJECT_CHARS = 1000
"""How much is told of what a rule has met."""
NOBODY = "it needs a person's consent, and nobody can be asked while a run goes on"


@dataclass(frozen=True, slots=True)
class Rule:
    """What is not to be done, or not unseen. Raises ValueError for one that means nothing."""

    name: str
    over: Act  # not `on`, which YAML 1.1 takes for a boolean
    """command: the text that bash is given, or a job; file: the path that the editor views or
    writes, or of a file that is handed back; egress: `host:port`."""
    pattern: str
    """Found anywhere in it, in RE2's syntax: `^` and `$` are its two ends, `(?i)` passes over
    case."""
    action: Action
    """deny: it is not done; ask: neither, for a person would have to be asked; flag: it is done,
    and recorded."""
    reason: str = ""
    """For the model, which is told it."""

    def __post_init__(self) -> None:
        if not self.name.replace("-", "").replace("_", "").isalnum() or not self.name.isascii():
            raise ValueError(f"a rule's name has letters, digits, - and _, not {self.name!r}")
        pattern(self.pattern)

    @property
    def refusal(self) -> str | None:
        """Why it is not done, in words for the model; None where it is."""
        if self.action == "flag":
            return None
        why = [NOBODY] if self.action == "ask" else []
        why += [self.reason] if self.reason else []
        return f"rule {self.name} forbids this{': ' if why else ''}{'; '.join(why)}"


@dataclass(frozen=True, slots=True)
class Watch:
    """All of a run's rules."""

    rules: tuple[Rule, ...] = ()
    """The first that is met holds, and no other."""

    def met(self, over: Act, subject: str) -> Rule | None:
        """The rule that an act meets."""
        of_kind = (rule for rule in self.rules if rule.over == over)
        return next((rule for rule in of_kind if pattern(rule.pattern).is_in(subject)), None)

    def withheld(self, paths: Iterable[str]) -> dict[str, Rule]:
        """Which files are not handed back, and for which rule."""
        met = {path: self.met("file", path) for path in paths} if self.rules else {}
        return {path: rule for path, rule in met.items() if rule and rule.refusal}


def subject(tool: str, arguments: Mapping[str, Any]) -> tuple[Act, str] | None:
    """What a call of one of our tools does, as far as rules look at it."""
    match tool, arguments:
        case "execute_bash", {"command": str(text)}:
            return "command", text
        case "str_replace_editor", {"path": str(path)}:
            return "file", _normal(posixpath.join(WORKING_DIR, path))
    return None


def _normal(path: str) -> str:
    # Two slashes at the beginning, and no more, are kept by normpath.
    return "/" + posixpath.normpath(path).lstrip("/")
