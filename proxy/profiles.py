"""The profiles of this server: built from the configuration, selected for each request, printed.

`build_profiles` reads the shipped profiles and the operator's, `Profiles` selects the profile of a
request, `with_settings` applies settings to a profile, and `profile_table` shows all profiles as
Markdown."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from policies.egress import Egress
from policies.isolation import MIN_LIMITS
from policies.paper_prompts import Domain, ReferencePrompts
from policies.profile import (
    FIXED_FIELDS,
    AgentSettings,
    AuditSettings,
    EffectivePolicy,
    Profile,
    describe_stricter_values,
    get_setting,
    setting_paths,
)
from proxy.config import INVALID_AMOUNT, Config, ConfigError, invalid_amounts
from proxy.errors import BadRequestError, ForbiddenError
from proxy.keys import Key
from proxy.paper_prompts import read_prompts

Tree = Mapping[str, Any]
Prompts = Mapping[Domain, ReferencePrompts]
REMOVED_PROFILES = {
    "finance": "copy it from examples/configs/finance.yaml",
    "offline": "write isolation: {network: {mode: none}} in a profile of your own",
}
"""Profiles that were shipped with the last release, and what to write instead."""
MAX_ENTRIES = 256
"""Maximum length of a list in a profile, because rules are compared pairwise."""


@dataclass(frozen=True, slots=True)
class ModelPolicy:
    """The profile and the restrictions of the models whose names match a pattern with `*`."""

    pattern: str
    profile: str | None = None
    policy: Tree = field(default_factory=dict)


class Profiles:
    """Selects the profile of a request."""

    def __init__(
        self,
        by_name: Mapping[str, Profile],
        default: str = "default",
        models: Sequence[ModelPolicy] = (),
    ) -> None:
        self.by_name = by_name
        self._default = default
        self._models = models
        self._cached_policies: dict[tuple[str, str | None, str], EffectivePolicy] = {}

    @classmethod
    def only(cls, profile: Profile) -> "Profiles":
        """Return a Profiles with this profile only, as the default."""
        return cls({profile.name: profile}, profile.name)

    @property
    def default(self) -> Profile:
        """The profile of a request if neither the request, its model nor its key names one."""
        return self.by_name[self._default]

    def select(self, key: Key, model: str, name: str | None, tree: Tree) -> Profile:
        """Return the profile of a request: the profile `name`, or the default profile of the key
        and the model if `name` is None. The settings in `tree` may only restrict this profile.

        Raises BadRequestError, ForbiddenError.
        """
        allowed = self._effective_policy(key, model, name)
        if not tree:
            return allowed.profile
        try:
            requested = with_settings(allowed.profile, tree)
        except SettingError as error:
            raise BadRequestError(
                f"Invalid value for 'sandbox.{error.path}': {error.reason}.",
                param=f"sandbox.{error.path}",
                code="invalid_value",
            ) from error
        if refusal := allowed.refusal(requested, _override_paths(tree)):
            raise ForbiddenError(refusal.message(), param=f"sandbox.{refusal.path}")
        return requested

    def selectable_names(self, key: Key) -> list[str]:
        """Return the names of the profiles that requests with a key may select."""
        return [name for name in self.by_name if self._may_select(key, name)]

    def _may_select(self, key: Key, name: str) -> bool:
        try:
            self._effective_policy(key, "", name)
        except ForbiddenError:
            return False
        return True

    def _effective_policy(self, key: Key, model: str, name: str | None) -> EffectivePolicy:
        policy = next((each for each in self._models if fnmatchcase(model, each.pattern)), None)
        default_name = self._default_name(key, policy)
        if name is None or name == default_name:
            return self._cached_policy(key, policy, default_name)
        if name not in self.by_name:
            names = ", ".join(map(repr, self.selectable_names(key)))
            raise BadRequestError(
                f"There is no profile {name!r}: one of {names}.",
                param="sandbox.profile",
                code="invalid_value",
            )
        allowed = self._cached_policy(key, policy, name)
        if name not in key.profiles:
            self._require_at_least_as_strict(
                self._cached_policy(key, policy, default_name), allowed.profile
            )
        return allowed

    def _require_at_least_as_strict(
        self, default_policy: EffectivePolicy, requested: Profile
    ) -> None:
        """Raise ForbiddenError if the requested profile, which the key does not list, allows more
        than `default_policy`, the default profile of the key and the model."""
        if refusal := default_policy.refusal(requested, setting_paths(requested)):
            raise ForbiddenError(
                f"Profile {requested.name!r} needs a key that lists it, because it allows more than"
                f" {default_policy.profile.name!r}: {refusal.message()}",
                param="sandbox.profile",
            )

    def _default_name(self, key: Key, model_policy: ModelPolicy | None) -> str:
        if (
            model_policy
            and model_policy.profile
            and (not key.profiles or model_policy.profile in key.profiles)
        ):
            return model_policy.profile
        return key.profiles[0] if key.profiles else self._default

    def _cached_policy(
        self, key: Key, model_policy: ModelPolicy | None, name: str
    ) -> EffectivePolicy:
        known = key.name, model_policy.pattern if model_policy else None, name
        if known not in self._cached_policies:
            allowed = EffectivePolicy(self.by_name[name])
            if model_policy:
                allowed = _restrict_policy(
                    allowed, model_policy.policy, f"model {model_policy.pattern!r}"
                )
            self._cached_policies[known] = _restrict_policy(
                allowed, key.policy, f"key {key.name!r}"
            )
        return self._cached_policies[known]


def _restrict_policy(policy: EffectivePolicy, tree: Tree, source: str) -> EffectivePolicy:
    return policy.with_restrictions(
        with_settings(policy.profile, tree), _override_paths(tree), source
    )


def build_profiles(config: Config) -> Profiles:
    """Return the shipped profiles and the operator's own. A setting that a profile does not name
    comes from the profile that it extends, and finally from config.yaml.

    Raises ConfigError.
    """
    prompts = read_prompts(config.paper)
    base = Profile(
        limits=config.limits,
        isolation=config.isolation,
        inputs=config.inputs,
        artifacts=config.artifacts,
        agent=AgentSettings(prompts=prompts["general"]),
        budgets=config.budgets,
        watch=config.watch,
        audit=AuditSettings(config.audit.enabled, config.audit.required),
        redaction=config.redaction,
    )
    named: dict[str, Profile] = {}
    for name, tree in shipped_profiles().items():
        extended = named[tree["extends"]] if "extends" in tree else base
        named[name] = _extend_profile(extended, name, tree, prompts)
    for name, tree in config.profiles.items():
        extends = tree.get("extends", "default")
        if extends not in named:
            raise ConfigError(f"profiles.{name}.extends: {_unknown_profile_message(extends)}")
        named[name] = _extend_profile(named[extends], name, {**tree, "extends": extends}, prompts)
    models = [
        ModelPolicy(pattern, model.profile, model.policy)
        for pattern, model in config.models.items()
    ]
    _check_references(config, named)
    return Profiles(named, config.profile, models)


def _check_references(config: Config, profiles: Mapping[str, Profile]) -> None:
    """Check each setting that names a profile or restricts one. Raises ConfigError."""
    names = {"profile": [config.profile]}
    policies: dict[str, Tree] = {}
    for pattern, model in config.models.items():
        names[f"models.{pattern}.profile"] = [model.profile] if model.profile else []
        policies[f"models.{pattern}.policy"] = model.policy
    for index, key in enumerate(config.keys):
        names[f"keys.{index}.profiles"] = list(key.profiles)
        policies[f"keys.{index}.policy"] = key.policy
    for place, listed in names.items():
        if unknown := [name for name in listed if name not in profiles]:
            raise ConfigError(f"{place}: {_unknown_profile_message(unknown[0])}")
    for place, tree in policies.items():
        _check_policy(place, tree, profiles)


def _unknown_profile_message(name: str) -> str:
    if instead := REMOVED_PROFILES.get(name):
        return f"there is no profile {name!r} any more: {instead}"
    return f"there is no profile {name!r}; define it in profiles, above those that extend it"


def _check_policy(path: str, tree: Tree, profiles: Mapping[str, Profile]) -> None:
    """Check the settings of a policy, which may restrict any of the profiles. Raises
    ConfigError."""
    for profile in profiles.values():
        try:
            with_settings(profile, tree)
        except SettingError as error:
            raise ConfigError(f"{path}.{error.path}: {error.reason}") from error
    if fixed := FIXED_FIELDS & tree.keys():
        raise ConfigError(f"{path}.{min(fixed)}: this can only be set in profiles")


def _extend_profile(base: Profile, name: str, tree: Tree, prompts: Prompts) -> Profile:
    own = _with_prompts(_with_inherited_entries(base, tree), prompts)
    try:
        return with_settings(base, {**own, "name": name})
    except SettingError as error:
        raise ConfigError(f"profiles.{name}.{error.path}: {error.reason}") from error


def _with_inherited_entries(base: Profile, tree: Tree) -> Tree:
    """Return the settings of `tree`, with the base's entries added to the lists of rules and
    secrets, which would otherwise replace the base's lists."""
    sections = {
        name: dict(tree[name])
        for name in ("watch", "redaction")
        if isinstance(tree.get(name), Mapping)
    }
    for section, settings_of in sections.items():
        for name, own in settings_of.items():
            inherited = asdict(base)[section].get(name)
            if isinstance(own, list) and isinstance(inherited, tuple):
                settings_of[name] = [*inherited, *(each for each in own if each not in inherited)]
    return {**tree, **sections}


def _with_prompts(tree: Tree, prompts: Prompts) -> Tree:
    """Return the settings of `tree`, with the prompts of its domain if it names one."""
    agent = tree.get("agent")
    if not isinstance(agent, Mapping) or agent.get("domain") not in prompts:
        return tree
    found = asdict(prompts[agent["domain"]])
    return {**tree, "agent": {**agent, "prompts": _merge_settings(found, agent.get("prompts", {}))}}


@cache
def shipped_profiles() -> Mapping[str, Any]:
    """Return the settings of the profiles that are shipped with the proxy, `default` first."""
    files = resources.files("policies") / "profiles"
    found = {
        each.name.removesuffix(".yaml"): yaml.safe_load(each.read_text("utf-8"))
        for each in files.iterdir()
        if each.name.endswith(".yaml")
    }
    return dict(sorted(found.items(), key=lambda item: (item[0] != "default", item[0])))


# Settings that override those of a profile


class SettingError(Exception):
    """There is no such setting, or its value is invalid."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class _ProfileModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    profile: Profile


def with_settings(base: Profile, tree: Tree) -> Profile:
    """Return the profile with the settings of a tree. Raises SettingError."""
    if long := next(_too_long_lists(tree), None):
        raise SettingError(long, f"has more than {MAX_ENTRIES} entries")
    merged = _merge_settings(asdict(base), tree)
    try:
        profile = _ProfileModel.model_validate({"profile": merged}).profile
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(step) for step in first["loc"][1:])
        raise SettingError(path, first["msg"]) from error
    if below := next(invalid_amounts(asdict(profile)), None):
        raise SettingError(below, INVALID_AMOUNT)
    for name, minimum in MIN_LIMITS.items():
        value = getattr(profile.isolation, name)
        if value is not None and value < minimum:
            raise SettingError(f"isolation.{name}", f"must be at least {minimum:g}")
    return profile


def _too_long_lists(tree: Tree, prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _too_long_lists(value, f"{prefix}{key}.")
        elif isinstance(value, list | tuple) and len(value) > MAX_ENTRIES:
            yield prefix + key


def _merge_settings(base: Mapping[str, Any], tree: Any) -> Any:
    if not isinstance(tree, Mapping):
        return tree
    merged = {**base}
    for key, value in tree.items():
        below = base.get(key)
        merged[key] = _merge_settings(below, value) if isinstance(below, Mapping) else value
    if "allowed_hosts" in base and "mode" in base:
        merged |= _settings_reset_by_mode(tree, merged["mode"])
    return merged


def _settings_reset_by_mode(network: Tree, mode: object) -> dict[str, Any]:
    """Return the settings to replace, and their new values, after `network` was merged into
    inherited network settings. `mode` is the mode after the merge.

    If `network` sets the mode, no inherited host stays allowed, and the mode `none` also empties
    `headers` and `allowed_cidrs`. If `network` does not set the mode, nothing is replaced, except
    that an inherited mode `none` empties `allowed_hosts`."""
    if "mode" not in network:
        return {"allowed_hosts": ()} if mode == "none" else {}
    kept = {"allowed_hosts": network.get("allowed_hosts", ())}
    return {**kept, "headers": (), "allowed_cidrs": ()} if mode == "none" else kept


def _override_paths(tree: Tree, prefix: str = "") -> list[str]:
    """Return the paths of the settings that a tree of overrides sets. `isolation.network` counts as
    one setting."""
    paths = []
    for key, value in tree.items():
        path = prefix + key
        if isinstance(value, Mapping) and path != "isolation.network":
            paths += _override_paths(value, f"{path}.")
        else:
            paths.append(path)
    return paths


# The table of all profiles

_TABLE_HEAD = ("| setting | default | elsewhere | narrower |", "|---|---|---|---|")


def profile_table(profiles: Mapping[str, Profile], default: Profile) -> Iterator[str]:
    """Yield the lines of a Markdown table with a row for each setting. A row has the setting's
    value in the profile `default`, the profiles that override the value of the profile they extend,
    and the values to which a model, a key or a request may restrict the setting."""
    yield from _TABLE_HEAD
    for path in setting_paths(default):
        value = get_setting(default, path)
        extended = {
            name: get_setting(default if each.extends == name else profiles[each.extends], path)
            for name, each in profiles.items()
        }
        others = [
            f"{name} {_format_value(get_setting(each, path))}"
            for name, each in profiles.items()
            if each is not default and get_setting(each, path) != extended[name]
        ]
        narrower = describe_stricter_values(path, value)
        yield f"| `{path}` | {_format_value(value)} | {', '.join(others)} | {narrower} |"


def _format_value(value: Any) -> str:
    if isinstance(value, Egress):
        value = [value.mode, *value.allowed_hosts]
    elif isinstance(value, tuple):
        value = [getattr(each, "name", each) for each in value]
    if isinstance(value, list):
        return f"`{' '.join(map(str, value))}`" if value else "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"{value:,.12g}"
    return "null" if value is None else str(value)
