"""The profile: every policy that holds for a run, as one value, and who may change what of it.

A profile holds for a model, the model's settings for a key, and the key's for a request. Each of
them can only narrow what it is given: what a model or a key sets wider has no effect, what a
request asks wider is refused.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

from policies.artifacts import ArtifactLimits
from policies.budgets import Budgets
from policies.egress import Egress, intersection, is_within
from policies.file_names import within
from policies.isolation import Isolation
from policies.limits import Limits
from policies.observation import ObservationLimits
from policies.redaction import Redaction
from policies.reference_style import ReferencePrompts
from policies.rules import RuleSet
from policies.workspace import InputLimits


@dataclass(frozen=True, slots=True)
class Audit:
    """The audit log of a run."""

    enabled: bool = False
    required: bool = True
    """True if a run fails when its log cannot be written."""


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """How the loop presents tools, observations and turns to the model."""

    style: Literal["default", "reference"] = "default"
    """reference: the observations are those of the paper's reference implementation, byte for
    byte."""
    prompts: ReferencePrompts = ReferencePrompts()
    """The prompts of the style `reference`."""


Enabled = Literal["always", "auto", "never"]
PromptStyle = Literal["compute_first", "neutral", "none"]


@dataclass(frozen=True, slots=True)
class Profile:
    """A named bundle of policies."""

    name: str = "default"
    about: str = ""
    """One paragraph on the purpose of the profile."""
    enabled: Enabled = "auto"
    """The requests that get a sandbox. always: every request, from its start; auto: requests that
    may use one, from the first tool call; never: none."""
    skip_models: tuple[str, ...] = ()
    """auto: models, by name or pattern (`*`), that answer better without a sandbox (in the paper
    Qwen3-4B loses 13 points in mathematics)."""
    prompt: PromptStyle = "neutral"
    """The instructions on the use of the sandbox. compute_first: derive every answer by computing;
    neutral: use the sandbox where it helps; none: only the tools' own descriptions."""
    limits: Limits = Limits()
    isolation: Isolation = Isolation()
    inputs: InputLimits = InputLimits()
    observation: ObservationLimits = ObservationLimits()
    artifacts: ArtifactLimits = ArtifactLimits()
    agent: AgentSettings = AgentSettings()
    budgets: Budgets = Budgets()
    watch: RuleSet = RuleSet()
    audit: Audit = Audit()
    redaction: Redaction = Redaction()


# Which of two values of a setting is the narrower


@dataclass(frozen=True, slots=True)
class Order:
    """How two values of one setting compare, the allowed one and the one that is asked for."""

    words: str
    """The narrower values, in words."""
    narrows: Callable[[Any, Any], bool]
    """Returns True if the asked value is at most as wide as the allowed one."""
    both: Callable[[Any, Any], Any] | None = None
    """Returns the part of the asked value that is allowed; if None, the allowed value is taken."""


def narrows(path: str, allowed: Any, asked: Any) -> bool:
    """Return True if the asked value of a setting is at most as wide as the allowed one."""
    return bool(asked == allowed or ORDERS.get(path, _BY_TYPE).narrows(allowed, asked))


def narrower(path: str, allowed: Any, asked: Any) -> Any:
    """Return the widest value that is within both."""
    if narrows(path, allowed, asked):
        return asked
    both = ORDERS.get(path, _BY_TYPE).both
    return both(allowed, asked) if both and asked is not None else allowed


def in_words(path: str, allowed: Any) -> str:
    """Return a description of the values that are narrower than the allowed one."""
    if path in ORDERS:
        return ORDERS[path].words
    return "`false`" if isinstance(allowed, bool) else "less"


def _only(value: object, words: str) -> Order:
    """Return the order of a setting that only this value narrows."""
    return Order(words, lambda _, asked: bool(asked == value))


def _by_type(allowed: Any, asked: Any) -> bool:
    """Compare by type: a switch may be switched off, a number reduced, and a limit set where there
    is none (None)."""
    if isinstance(allowed, bool):
        return allowed
    if allowed is None:
        return True
    return asked is not None and isinstance(allowed, int | float) and bool(asked < allowed)


def _joined(allowed: tuple[Any, ...], asked: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys((*allowed, *asked)))


def _shared(allowed: tuple[str, ...], asked: tuple[str, ...]) -> tuple[str, ...]:
    return _joined(within(asked, allowed), within(allowed, asked))


_BY_TYPE = Order("less", _by_type)
_FREE = Order("anything", lambda _, __: True)
_GROWING = Order(
    "more, behind those there are",
    lambda allowed, asked: bool(asked[: len(allowed)] == allowed),
    _joined,
)
ORDERS = {
    "enabled": Order("the others, of `auto`", lambda allowed, _: bool(allowed == "auto")),
    "prompt": _FREE,
    "inputs.offload_text_over_tokens": _FREE,
    "artifacts.list_files": _FREE,
    "isolation.level": _only("strict", "`strict`"),
    "isolation.network": Order(
        "what reaches less", lambda allowed, asked: is_within(asked, allowed), intersection
    ),
    "artifacts.allow_types": Order(
        "fewer",
        lambda allowed, asked: (
            allowed is None or (asked is not None and within(asked, allowed) == asked)
        ),
        _shared,
    ),
    "artifacts.deny_types": Order(
        "more", lambda allowed, asked: within(allowed, asked) == allowed, _joined
    ),
    "watch.rules": _GROWING,
    "redaction.detectors": _GROWING,
    "redaction.patterns": _GROWING,
    "audit.enabled": _only(True, "`true`"),
    "audit.required": _only(True, "`true`"),
}
"""The orders of settings that do not compare `_by_type`."""


# Who may change what

SETTLED = frozenset({"name", "about", "skip_models", "agent"})
"""Fields of a profile that no key and no request changes."""
_WHOLE = ("isolation.network",)
"""Settings of several fields that are compared as one."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request may not have what it asks for."""

    path: str
    """Of the setting, such as `limits.max_turns`."""
    asked: object
    allowed: object
    by: str
    """The profile, model or key that allows no more."""

    def words(self) -> str:
        """Return the error message for the client."""
        allowed = _shown(self.allowed)
        if isinstance(self.allowed, Egress) and self.allowed.mode == "allowlist":
            allowed = f"allowlist: {', '.join(self.allowed.allowed_hosts)}"
        return f"{self.path}: {_shown(self.asked)} is more than {self.by} allows ({allowed})."


@dataclass(frozen=True, slots=True)
class EffectivePolicy:
    """The widest profile that a request may ask for."""

    profile: Profile
    by: Mapping[str, str] = field(default_factory=dict)
    """The model or key that narrowed a setting, by the setting's path. The profile itself bounds
    the others."""

    def narrowed(self, asked: Profile, paths: Iterable[str], by: str) -> "EffectivePolicy":
        """Return a copy in which these settings are at most as wide as those of `asked`."""
        profile, bounds = self.profile, dict(self.by)
        for path in paths:
            before = get(profile, path)
            now = narrower(path, before, get(asked, path))
            if now != before:
                profile = with_value(profile, path, now)
                bounds[path] = by
        return EffectivePolicy(profile, bounds)

    def refusal(self, asked: Profile, paths: Iterable[str]) -> Refusal | None:
        """Return a refusal for the first of these settings that is asked wider than is allowed, or
        None."""
        for path in paths:
            allowed, wanted = get(self.profile, path), get(asked, path)
            if not narrows(path, allowed, wanted):
                by = self.by.get(path, f"profile {self.profile.name!r}")
                return Refusal(path, wanted, allowed, by)
        return None


def settings(profile: Profile) -> Iterator[str]:
    """Yield the path of each setting that can be narrowed, in the order of the fields."""
    yield from (path for path in _paths(profile) if path.partition(".")[0] not in SETTLED)


def _paths(value: Any, above: str = "") -> Iterator[str]:
    for each in fields(value):
        path = above + each.name
        inner = getattr(value, each.name)
        if is_dataclass(inner) and path not in _WHOLE:
            yield from _paths(inner, f"{path}.")
        else:
            yield path


def get(value: Any, path: str) -> Any:
    """Return the value at a path."""
    for name in path.split("."):
        value = getattr(value, name)
    return value


def with_value(profile: Profile, path: str, value: Any) -> Profile:
    """Return a copy of the profile with another value at a path."""
    owner, _, name = path.rpartition(".")
    if not owner:
        return replace(profile, **{name: value})
    return with_value(profile, owner, replace(get(profile, owner), **{name: value}))


def _shown(value: object) -> str:
    return value.mode if isinstance(value, Egress) else str(value)
