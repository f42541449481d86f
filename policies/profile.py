"""The profile: every policy that holds for a run, as one value, and who may change what of it.

A profile holds for a model, the model's settings for a key, and the key's for a request. Each of
them can only narrow what it is given: what a model or a key sets wider has no effect, what a
request asks wider is refused.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

from policies.artifacts import ArtifactLimits
from policies.budgets import DailyBudget
from policies.egress import Egress, intersection, is_subset
from policies.file_names import covered_patterns
from policies.isolation import Isolation
from policies.limits import Limits
from policies.observation import ObservationLimits
from policies.redaction import Redaction
from policies.reference_style import ReferencePrompts
from policies.rules import RuleSet
from policies.workspace import InputLimits


@dataclass(frozen=True, slots=True)
class AuditSettings:
    """The audit log of a run."""

    enabled: bool = False
    required: bool = True
    """Whether a run fails if its log cannot be written."""


@dataclass(frozen=True, slots=True)
class StyleSettings:
    """How the loop talks to a model: in our own way, or as the paper's reference does."""

    kind: Literal["own", "paper"] = "own"
    """paper: what a model observes is the reference's, byte for byte."""
    words: ReferencePrompts = ReferencePrompts()
    """The prompts of the paper's manner."""


Computer = Literal["always", "auto", "never"]
PromptStyle = Literal["strict", "neutral", "none"]


@dataclass(frozen=True, slots=True)
class Profile:
    """A named bundle of policies."""

    name: str = "default"
    about: str = ""
    """What it is for, in a paragraph."""
    computer: Computer = "auto"
    """The requests that get a sandbox. always: every request, from its start; auto: requests that
    may use one, from the first tool call; never: none."""
    weak_models: tuple[str, ...] = ()
    """auto: models, by name or pattern (`*`), that answer better without a sandbox (in the paper
    Qwen3-4B loses 13 points in mathematics)."""
    prompt: PromptStyle = "neutral"
    """What the model is told to do with its sandbox. strict: derive every answer by computing;
    neutral: use it where it helps; none: nothing beside the tools' own descriptions."""
    limits: Limits = Limits()
    isolation: Isolation = Isolation()
    inputs: InputLimits = InputLimits()
    observation: ObservationLimits = ObservationLimits()
    artifacts: ArtifactLimits = ArtifactLimits()
    manner: StyleSettings = StyleSettings()
    per_day: DailyBudget = DailyBudget()
    """Of all runs of one key together."""
    watch: RuleSet = RuleSet()
    audit: AuditSettings = AuditSettings()
    redact: Redaction = Redaction()


# Which of two values of a setting is the narrower


@dataclass(frozen=True, slots=True)
class SettingOrder:
    """How two values of one setting compare, the allowed one and the one that is asked for."""

    description: str
    """The narrower values, in words."""
    is_stricter: Callable[[Any, Any], bool]
    """Returns True if the asked value is at most as wide as the allowed one."""
    combine: Callable[[Any, Any], Any] | None = None
    """Returns the part of the asked value that is allowed; if None, the allowed value is taken."""


def is_at_least_as_strict(path: str, allowed: Any, asked: Any) -> bool:
    """Return True if the asked value of a setting is at most as wide as the allowed one."""
    return bool(asked == allowed or SETTING_ORDERS.get(path, _BY_TYPE).is_stricter(allowed, asked))


def strictest(path: str, allowed: Any, asked: Any) -> Any:
    """Return the widest value that is within both."""
    if is_at_least_as_strict(path, allowed, asked):
        return asked
    both = SETTING_ORDERS.get(path, _BY_TYPE).combine
    return both(allowed, asked) if both and asked is not None else allowed


def describe_stricter(path: str, allowed: Any) -> str:
    """Return a description of the values that are narrower than the allowed one."""
    if path in SETTING_ORDERS:
        return SETTING_ORDERS[path].description
    return "`false`" if isinstance(allowed, bool) else "less"


def _only_value(value: object, words: str) -> SettingOrder:
    """Return the order of a setting that only this value narrows."""
    return SettingOrder(words, lambda _, asked: bool(asked == value))


def _is_stricter_by_type(allowed: Any, asked: Any) -> bool:
    """Compare by type: a switch may be switched off, a number reduced, and a limit set where there
    is none (None)."""
    if isinstance(allowed, bool):
        return allowed
    if allowed is None:
        return True
    return asked is not None and isinstance(allowed, int | float) and bool(asked < allowed)


def _union(allowed: tuple[Any, ...], asked: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys((*allowed, *asked)))


def _intersection(allowed: tuple[str, ...], asked: tuple[str, ...]) -> tuple[str, ...]:
    return _union(covered_patterns(asked, allowed), covered_patterns(allowed, asked))


_BY_TYPE = SettingOrder("less", _is_stricter_by_type)
_FREE = SettingOrder("anything", lambda _, __: True)
_GROWING = SettingOrder(
    "more, behind those there are",
    lambda allowed, asked: bool(asked[: len(allowed)] == allowed),
    _union,
)
SETTING_ORDERS = {
    "computer": SettingOrder("the others, of `auto`", lambda allowed, _: bool(allowed == "auto")),
    "prompt": _FREE,
    "inputs.move_text_over_tokens": _FREE,
    "artifacts.list_files": _FREE,
    "isolation.level": _only_value("strict", "`strict`"),
    "isolation.egress": SettingOrder(
        "what reaches less", lambda allowed, asked: is_subset(asked, allowed), intersection
    ),
    "artifacts.allow_types": SettingOrder(
        "fewer",
        lambda allowed, asked: (
            allowed is None or (asked is not None and covered_patterns(asked, allowed) == asked)
        ),
        _intersection,
    ),
    "artifacts.deny_types": SettingOrder(
        "more", lambda allowed, asked: covered_patterns(allowed, asked) == allowed, _union
    ),
    "watch.rules": _GROWING,
    "redact.secrets": _GROWING,
    "redact.patterns": _GROWING,
    "audit.enabled": _only_value(True, "`true`"),
    "audit.required": _only_value(True, "`true`"),
}
"""The orders of settings that do not compare `_is_stricter_by_type`."""


# Who may change what

FIXED_FIELDS = frozenset({"name", "about", "weak_models", "manner"})
"""Fields of a profile that no key and no request changes."""
_COMPARED_WHOLE = ("isolation.egress",)
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

    def message(self) -> str:
        """Return the error message for the client."""
        allowed = _shown(self.allowed)
        if isinstance(self.allowed, Egress) and self.allowed.mode == "allowlist":
            allowed = f"allowlist: {', '.join(self.allowed.allow)}"
        return f"{self.path}: {_shown(self.asked)} is more than {self.by} allows ({allowed})."


@dataclass(frozen=True, slots=True)
class EffectivePolicy:
    """The widest profile that a request may ask for."""

    profile: Profile
    by: Mapping[str, str] = field(default_factory=dict)
    """The model or key that narrowed a setting, by the setting's path. The profile itself bounds
    the others."""

    def restricted(self, asked: Profile, paths: Iterable[str], by: str) -> "EffectivePolicy":
        """Return a copy in which these settings are at most as wide as those of `asked`."""
        profile, bounds = self.profile, dict(self.by)
        for path in paths:
            before = get_setting(profile, path)
            now = strictest(path, before, get_setting(asked, path))
            if now != before:
                profile = with_setting(profile, path, now)
                bounds[path] = by
        return EffectivePolicy(profile, bounds)

    def refusal(self, asked: Profile, paths: Iterable[str]) -> Refusal | None:
        """Return a refusal for the first of these settings that is asked wider than is allowed, or
        None."""
        for path in paths:
            allowed, wanted = get_setting(self.profile, path), get_setting(asked, path)
            if not is_at_least_as_strict(path, allowed, wanted):
                by = self.by.get(path, f"profile {self.profile.name!r}")
                return Refusal(path, wanted, allowed, by)
        return None


def setting_paths(profile: Profile) -> Iterator[str]:
    """Yield the path of each setting that can be narrowed, in the order of the fields."""
    yield from (path for path in _paths(profile) if path.partition(".")[0] not in FIXED_FIELDS)


def _paths(value: Any, above: str = "") -> Iterator[str]:
    for each in fields(value):
        path = above + each.name
        inner = getattr(value, each.name)
        if is_dataclass(inner) and path not in _COMPARED_WHOLE:
            yield from _paths(inner, f"{path}.")
        else:
            yield path


def get_setting(value: Any, path: str) -> Any:
    """Return the value at a path."""
    for name in path.split("."):
        value = getattr(value, name)
    return value


def with_setting(profile: Profile, path: str, value: Any) -> Profile:
    """Return a copy of the profile with another value at a path."""
    owner, _, name = path.rpartition(".")
    if not owner:
        return replace(profile, **{name: value})
    return with_setting(profile, owner, replace(get_setting(profile, owner), **{name: value}))


def _shown(value: object) -> str:
    return value.mode if isinstance(value, Egress) else str(value)
