"""The profile, which contains every policy of a run, and the rules for overriding its settings.

A model overrides settings of a profile, a key overrides settings of a model, and a request
overrides settings of a key. An override can only make a setting stricter, except for a few settings
that accept any value, such as `prompt`. A less strict value of a model or key has no effect; a
request with a less strict value is refused.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

from policies.artifacts import ArtifactLimits
from policies.budgets import Budgets
from policies.egress import Egress, intersection, is_subset
from policies.file_names import covered_patterns
from policies.isolation import Isolation
from policies.limits import Limits
from policies.observation import ObservationLimits
from policies.paper_prompts import Domain, ReferencePrompts
from policies.redaction import Redaction
from policies.rules import RuleSet
from policies.workspace import InputLimits


@dataclass(frozen=True, slots=True)
class AuditSettings:
    """Settings of the audit log of runs."""

    enabled: bool = False
    """True if each run writes an audit log."""
    required: bool = True
    """True if a run fails when its audit log cannot be written."""


Capture = Literal["none", "messages", "tokens"]
"""The part of a run that is kept as its trajectory. messages: the model calls with their messages,
the tool calls with their observations, and the result. tokens: also the token ids and the log
probabilities of each model call."""


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """The style of the loop: prompts, tool descriptions and observations."""

    style: Literal["default", "reference"] = "default"
    """default: the proxy's own style. reference: the style of the paper's reference implementation,
    with its observations byte for byte."""
    domain: Domain = "general"
    """The domain of the paper that selects the prompts of the reference style."""
    prompts: ReferencePrompts = ReferencePrompts()
    """The prompts of the reference style."""
    capture_tokens: bool = False
    """True if requests may have `sandbox.capture: tokens`, which records token ids for training.
    For these requests the proxy does not fall back to a model call without tools if the model
    cannot use tools."""
    capture: Capture = "none"
    """The `sandbox.capture` of requests that do not set it. tokens: requests may also set `tokens`
    themselves, as with `capture_tokens`; a request without a sandbox, or with redaction of secrets,
    gets messages."""

    @property
    def allows_token_capture(self) -> bool:
        """True if requests may have `sandbox.capture: tokens`."""
        return self.capture_tokens or self.capture == "tokens"


Enabled = Literal["always", "auto", "never"]
PromptStyle = Literal["compute_first", "neutral", "none"]


@dataclass(frozen=True, slots=True)
class Profile:
    """A named set of policies."""

    name: str = "default"
    about: str = ""
    """A paragraph on the purpose of the profile."""
    extends: str = "default"
    """The profile whose settings apply where this profile sets none. The extended profile must be
    defined earlier in the file."""
    enabled: Enabled = "auto"
    """The requests that get a sandbox. always: every request, from its start. auto: requests that
    may need a sandbox, from the first tool call. never: none."""
    skip_models: tuple[str, ...] = ()
    """Models, by name or pattern (`*`), that get no sandbox in mode auto because they answer better
    without it (in the paper Qwen3-4B loses 13 points in mathematics)."""
    prompt: PromptStyle = "neutral"
    """The system prompt about the sandbox. compute_first: derive every answer by computing.
    neutral: use the sandbox if it helps. none: no prompt, only the tools' own descriptions."""
    limits: Limits = Limits()
    isolation: Isolation = Isolation()
    inputs: InputLimits = InputLimits()
    observation: ObservationLimits = ObservationLimits()
    artifacts: ArtifactLimits = ArtifactLimits()
    agent: AgentSettings = AgentSettings()
    budgets: Budgets = Budgets()
    watch: RuleSet = RuleSet()
    audit: AuditSettings = AuditSettings()
    redaction: Redaction = Redaction()


# The strictness of settings


@dataclass(frozen=True, slots=True)
class SettingOrder:
    """The order of a setting's values by strictness. Both functions take the allowed and the
    requested value."""

    description: str
    """The stricter values, in words, for the documentation."""
    is_stricter: Callable[[Any, Any], bool]
    """Returns True if the requested value is stricter. Called only for values that differ."""
    combine: Callable[[Any, Any], Any] | None = None
    """Returns the loosest value that is at least as strict as both values. None: the values cannot
    be combined, and the allowed value applies."""


def is_at_least_as_strict(path: str, allowed: Any, requested: Any) -> bool:
    """Return True if the requested value of a setting is at least as strict as the allowed
    value."""
    order = SETTING_ORDERS.get(path, _TYPE_ORDER)
    return bool(requested == allowed or order.is_stricter(allowed, requested))


def stricter_value(path: str, allowed: Any, requested: Any) -> Any:
    """Return the loosest value of a setting that is at least as strict as both values. Return the
    allowed value if the requested value is less strict and the setting's order cannot combine
    values."""
    if is_at_least_as_strict(path, allowed, requested):
        return requested
    combine = SETTING_ORDERS.get(path, _TYPE_ORDER).combine
    return combine(allowed, requested) if combine and requested is not None else allowed


def describe_stricter_values(path: str, allowed: Any) -> str:
    """Return a description of the values that are stricter than the allowed value."""
    if path in SETTING_ORDERS:
        return SETTING_ORDERS[path].description
    return "`false`" if isinstance(allowed, bool) else "less"


def _strictest_value_order(value: object, description: str) -> SettingOrder:
    """Return an order in which only `value` is stricter than other values."""
    return SettingOrder(description, lambda _, requested: bool(requested == value))


def _is_stricter_by_type(allowed: Any, requested: Any) -> bool:
    """Return True if the requested value turns a switch off, reduces a number, or sets a limit
    instead of None."""
    if isinstance(allowed, bool):
        return allowed
    if allowed is None:
        return True
    return requested is not None and isinstance(allowed, int | float) and bool(requested < allowed)


def _union(allowed: tuple[Any, ...], requested: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys((*allowed, *requested)))


def _intersection(allowed: tuple[str, ...], requested: tuple[str, ...]) -> tuple[str, ...]:
    return _union(covered_patterns(requested, allowed), covered_patterns(allowed, requested))


_TYPE_ORDER = SettingOrder("less", _is_stricter_by_type)
_ANY_VALUE = SettingOrder("anything", lambda _, __: True)
_APPENDED_ENTRIES = SettingOrder(
    "further entries after the present ones",
    lambda allowed, requested: bool(requested[: len(allowed)] == allowed),
    _union,
)
SETTING_ORDERS = {
    "enabled": SettingOrder(
        "`always` or `never` instead of `auto`", lambda allowed, _: bool(allowed == "auto")
    ),
    "prompt": _ANY_VALUE,
    "inputs.offload_text_over_tokens": _ANY_VALUE,
    "artifacts.list_files": _ANY_VALUE,
    "isolation.level": _strictest_value_order("strict", "`strict`"),
    "isolation.network": SettingOrder(
        "rules that permit less",
        lambda allowed, requested: is_subset(requested, allowed),
        intersection,
    ),
    "artifacts.allow_types": SettingOrder(
        "fewer",
        lambda allowed, requested: (
            allowed is None
            or (requested is not None and covered_patterns(requested, allowed) == requested)
        ),
        _intersection,
    ),
    "artifacts.deny_types": SettingOrder(
        "more", lambda allowed, requested: covered_patterns(allowed, requested) == allowed, _union
    ),
    "watch.rules": _APPENDED_ENTRIES,
    "redaction.detectors": _APPENDED_ENTRIES,
    "redaction.patterns": _APPENDED_ENTRIES,
    "audit.enabled": _strictest_value_order(True, "`true`"),
    "audit.required": _strictest_value_order(True, "`true`"),
}
"""The orders of settings by path. All other settings are ordered by type."""


# Overrides

FIXED_FIELDS = frozenset({"name", "about", "extends", "skip_models", "agent"})
"""Fields of a profile that keys and requests cannot override."""
_INDIVISIBLE_SETTINGS = ("isolation.network",)
"""Settings with several fields that are compared as one value."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The refusal of a requested setting that is not strict enough."""

    path: str
    """The path of the setting, such as `limits.max_turns`."""
    requested: object
    allowed: object
    bound_by: str
    """The profile, model or key that sets the allowed value."""

    def message(self) -> str:
        """Return the error message for the client."""
        allowed = _shown_value(self.allowed)
        if isinstance(self.allowed, Egress) and self.allowed.mode == "allowlist":
            allowed = f"allowlist: {', '.join(self.allowed.allowed_hosts)}"
        requested = _shown_value(self.requested)
        return f"{self.path}: {requested} is more than {self.bound_by} allows ({allowed})."


@dataclass(frozen=True, slots=True)
class EffectivePolicy:
    """The loosest profile that a request may ask for."""

    profile: Profile
    bounds: Mapping[str, str] = field(default_factory=dict)
    """The model or key that made a setting stricter, by the setting's path."""

    def with_restrictions(
        self, overrides: Profile, paths: Iterable[str], bound_by: str
    ) -> "EffectivePolicy":
        """Return a copy whose settings at `paths` are at least as strict as in `overrides`.
        `bound_by` names the model or key for refusals."""
        profile, bounds = self.profile, dict(self.bounds)
        for path in paths:
            before = get_setting(profile, path)
            after = stricter_value(path, before, get_setting(overrides, path))
            if after != before:
                profile = with_setting(profile, path, after)
                bounds[path] = bound_by
        return EffectivePolicy(profile, bounds)

    def refusal(self, requested: Profile, paths: Iterable[str]) -> Refusal | None:
        """Return a refusal of the first setting at `paths` that is not strict enough, or None."""
        for path in paths:
            allowed, value = get_setting(self.profile, path), get_setting(requested, path)
            if not is_at_least_as_strict(path, allowed, value):
                bound_by = self.bounds.get(path, f"profile {self.profile.name!r}")
                return Refusal(path, value, allowed, bound_by)
        return None


def setting_paths(profile: Profile) -> Iterator[str]:
    """Yield the path of each setting that can be overridden, in the order of the fields."""
    yield from (path for path in _leaf_paths(profile) if path.partition(".")[0] not in FIXED_FIELDS)


def _leaf_paths(value: Any, prefix: str = "") -> Iterator[str]:
    for member in fields(value):
        path = prefix + member.name
        nested = getattr(value, member.name)
        if is_dataclass(nested) and path not in _INDIVISIBLE_SETTINGS:
            yield from _leaf_paths(nested, f"{path}.")
        else:
            yield path


def get_setting(value: Any, path: str) -> Any:
    """Return the value of the setting at a path."""
    for name in path.split("."):
        value = getattr(value, name)
    return value


def with_setting(profile: Profile, path: str, value: Any) -> Profile:
    """Return a copy of the profile with another value at a path."""
    owner, _, name = path.rpartition(".")
    if not owner:
        return replace(profile, **{name: value})
    return with_setting(profile, owner, replace(get_setting(profile, owner), **{name: value}))


def _shown_value(value: object) -> str:
    return value.mode if isinstance(value, Egress) else str(value)
