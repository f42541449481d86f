"""The profiles of this server, and who gets which."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from policies.isolation import LEAST
from policies.profile import SETTLED, Allowed, Audit, Manner, Profile, settings
from policies.reference_style import PaperWords
from proxy.config import NO_AMOUNT, Config, ConfigError, no_amounts
from proxy.errors import BadRequestError, ForbiddenError
from proxy.keys import Key
from proxy.prompt_file import read_words

Tree = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ModelPolicy:
    """What holds for models of a name, or of all names that a pattern (`*`) has."""

    pattern: str
    profile: str | None = None
    policy: Tree = field(default_factory=dict)


class Profiles:
    """Decides what a request is allowed."""

    def __init__(
        self,
        named: Mapping[str, Profile],
        default: str = "default",
        models: Sequence[ModelPolicy] = (),
    ) -> None:
        self.named = named
        self._default = default
        self._models = models
        self._known: dict[tuple[str, str | None, str], Allowed] = {}

    @classmethod
    def only(cls, profile: Profile) -> "Profiles":
        """That one for everybody."""
        return cls({profile.name: profile}, profile.name)

    @property
    def default(self) -> Profile:
        """What holds for who names none."""
        return self.named[self._default]

    def of(self, key: Key, model: str, name: str | None, tree: Tree) -> Profile:
        """What holds for a request that asks for the profile of that name, and for less of it than
        it allows.

        Raises BadRequestError, ForbiddenError.
        """
        allowed = self._allowed(key, model, name)
        if not tree:
            return allowed.profile
        try:
            asked = overlaid(allowed.profile, tree)
        except SettingError as error:
            raise BadRequestError(
                f"Invalid value for 'sandbox.{error.path}': {error.why}.",
                param=f"sandbox.{error.path}",
                code="invalid_value",
            ) from error
        if refusal := allowed.refusal(asked, _set_by(tree)):
            raise ForbiddenError(refusal.words(), param=f"sandbox.{refusal.path}")
        return asked

    def open_to(self, key: Key) -> list[str]:
        """Return the names of the profiles that a key may ask for."""
        return [name for name in self.named if self._is_open_to(key, name)]

    def _is_open_to(self, key: Key, name: str) -> bool:
        try:
            self._allowed(key, "", name)
        except ForbiddenError:
            return False
        return True

    def _allowed(self, key: Key, model: str, name: str | None) -> Allowed:
        its = next((each for each in self._models if fnmatchcase(model, each.pattern)), None)
        usual = self._usual(key, its)
        if name is None or name == usual:
            return self._narrowed(key, its, usual)
        if name not in self.named:
            names = ", ".join(map(repr, self.open_to(key)))
            raise BadRequestError(
                f"There is no profile {name!r}: one of {names}.",
                param="sandbox.profile",
                code="invalid_value",
            )
        allowed = self._narrowed(key, its, name)
        if name not in key.profiles:
            self._require_within(self._narrowed(key, its, usual), allowed.profile)
        return allowed

    def _require_within(self, usual: Allowed, asked: Profile) -> None:
        """A profile that was not given to somebody is theirs if it allows nothing more."""
        if refusal := usual.refusal(asked, settings(asked)):
            raise ForbiddenError(
                f"Profile {asked.name!r} needs a key that lists it, for it allows more than"
                f" {usual.profile.name!r}: {refusal.words()}",
                param="sandbox.profile",
            )

    def _usual(self, key: Key, model: ModelPolicy | None) -> str:
        if model and model.profile and (not key.profiles or model.profile in key.profiles):
            return model.profile
        return key.profiles[0] if key.profiles else self._default

    def _narrowed(self, key: Key, model: ModelPolicy | None, name: str) -> Allowed:
        known = key.name, model.pattern if model else None, name
        if known not in self._known:
            allowed = Allowed(self.named[name])
            if model:
                allowed = _narrowed(allowed, model.policy, f"model {model.pattern!r}")
            self._known[known] = _narrowed(allowed, key.policy, f"key {key.name!r}")
        return self._known[known]


def _narrowed(allowed: Allowed, tree: Tree, by: str) -> Allowed:
    return allowed.narrowed(overlaid(allowed.profile, tree), _set_by(tree), by)


def build_profiles(config: Config) -> Profiles:
    """Those that are shipped and the operator's own, over what config.yaml says for all.

    Raises ConfigError.
    """
    base = Profile(
        limits=config.limits,
        isolation=config.sandbox.isolation,
        inputs=config.inputs,
        artifacts=config.artifacts,
        manner=Manner(words=_words(config)),
        per_day=config.per_day,
        watch=config.watch,
        audit=Audit(config.audit.enabled, config.audit.required),
        redact=config.redact,
    )
    named = {name: _bundle(base, name, tree) for name, tree in shipped().items()}
    for name, tree in config.profiles.items():
        extends = tree.get("extends", "default")
        if extends not in named:
            raise ConfigError(f"profiles.{name}.extends: there is no profile {extends!r} above it")
        own = {key: value for key, value in tree.items() if key != "extends"}
        named[name] = _bundle(named[extends], name, own)
    models = [
        ModelPolicy(pattern, model.profile, model.policy)
        for pattern, model in config.models.items()
    ]
    _check(config, named)
    return Profiles(named, config.profile, models)


def _words(config: Config) -> PaperWords:
    """What models are told in the paper's manner. Raises ConfigError."""
    file = config.paper.prompt_file
    return PaperWords() if file is None else read_words(file)


def _check(config: Config, named: Mapping[str, Profile]) -> None:
    """Whatever names a profile or narrows one. Raises ConfigError."""
    names = {"profile": [config.profile]}
    policies: dict[str, Tree] = {}
    for pattern, model in config.models.items():
        names[f"models.{pattern}.profile"] = [model.profile] if model.profile else []
        policies[f"models.{pattern}.policy"] = model.policy
    for index, key in enumerate(config.keys):
        names[f"keys.{index}.profiles"] = list(key.profiles)
        policies[f"keys.{index}.policy"] = key.policy
    for place, asked in names.items():
        if unknown := [name for name in asked if name not in named]:
            raise ConfigError(f"{place}: there is no profile {unknown[0]!r}")
    for place, tree in policies.items():
        _check_policy(place, tree, named)


def _check_policy(place: str, tree: Tree, named: Mapping[str, Profile]) -> None:
    """What narrows a profile, for it may be any of them. Raises ConfigError."""
    for profile in named.values():
        try:
            overlaid(profile, tree)
        except SettingError as error:
            raise ConfigError(f"{place}.{error.path}: {error.why}") from error
    if settled := SETTLED & tree.keys():
        raise ConfigError(f"{place}.{min(settled)}: only a profile says that of itself")


def _bundle(base: Profile, name: str, tree: Tree) -> Profile:
    try:
        return overlaid(base, {**_added(base, tree), "name": name})
    except SettingError as error:
        raise ConfigError(f"profiles.{name}.{error.path}: {error.why}") from error


def _added(base: Profile, tree: Tree) -> Tree:
    """A bundle whose rules and secrets come behind those that hold already."""
    whole = {section: dict(tree[section]) for section in ("watch", "redact") if section in tree}
    for section, said in whole.items():
        for name, new in said.items():
            before = asdict(base)[section][name]
            if isinstance(new, list) and isinstance(before, tuple):
                said[name] = [*before, *(each for each in new if each not in before)]
    return {**tree, **whole}


@cache
def shipped() -> Mapping[str, Any]:
    """The bundles that come with the house, `default` first."""
    files = resources.files("policies") / "profiles"
    found = {
        each.name.removesuffix(".yaml"): yaml.safe_load(each.read_text("utf-8"))
        for each in files.iterdir()
        if each.name.endswith(".yaml")
    }
    return dict(sorted(found.items(), key=lambda item: (item[0] != "default", item[0])))


# From a tree to a profile

MAX_ENTRIES = 256
"""Of one list: rules are compared with each other."""


class SettingError(Exception):
    """A setting that is none, or has no such value."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path = path
        self.why = why


class _Read(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    profile: Profile


def overlaid(base: Profile, tree: Tree) -> Profile:
    """The profile with what the tree says in its place. Raises SettingError."""
    if long := next(_too_long(tree), None):
        raise SettingError(long, f"has more than {MAX_ENTRIES} entries")
    merged = _merged(asdict(base), tree)
    try:
        profile = _Read.model_validate({"profile": merged}).profile
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(step) for step in first["loc"][1:])
        raise SettingError(path, first["msg"]) from error
    if below := next(no_amounts(asdict(profile)), None):
        raise SettingError(below, NO_AMOUNT)
    for name, least in LEAST.items():
        value = getattr(profile.isolation, name)
        if value is not None and value < least:
            raise SettingError(f"isolation.{name}", f"is at least {least:g}")
    return profile


def _too_long(tree: Tree, above: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _too_long(value, f"{above}{key}.")
        elif isinstance(value, list | tuple) and len(value) > MAX_ENTRIES:
            yield above + key


def _merged(base: Mapping[str, Any], tree: Any) -> Any:
    if not isinstance(tree, Mapping):
        return tree
    merged = {**base}
    for key, value in tree.items():
        below = base.get(key)
        merged[key] = _merged(below, value) if isinstance(below, Mapping) else value
    if "allow" in base and "mode" in base:
        merged |= _what_goes_with(tree, merged["mode"])
    return merged


def _what_goes_with(egress: Tree, mode: object) -> dict[str, Any]:
    """Another mode has other hosts, and hosts alone mean nothing where there is no network."""
    if "mode" not in egress:
        return {"allow": ()} if mode == "none" else {}
    kept = {"allow": egress.get("allow", ())}
    return {**kept, "headers": (), "allow_cidrs": ()} if mode == "none" else kept


def _set_by(tree: Tree, above: str = "") -> list[str]:
    """The paths of all settings in a tree."""
    paths = []
    for key, value in tree.items():
        path = above + key
        if isinstance(value, Mapping) and path != "isolation.egress":
            paths += _set_by(value, f"{path}.")
        else:
            paths.append(path)
    return paths
