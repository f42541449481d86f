"""Who may change what of a profile.

A profile holds for a model, the model's settings for a key, and the key's for a request. Each of
them can only narrow what it is given: what a model or a key sets wider has no effect, what a
request asks wider is refused.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from policies.egress import Egress
from policies.orders import narrower, narrows
from policies.profile import Profile

SETTLED = frozenset({"name", "about", "weak_models", "manner"})
"""What a profile says of itself."""
_WHOLE = ("isolation.egress",)
"""What is compared as one."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request may not have what it asks for."""

    path: str
    """Of the setting, such as `limits.max_turns`."""
    asked: object
    allowed: object
    by: str
    """Who allows no more."""

    def words(self) -> str:
        """For the client."""
        return f"{self.path}: {_shown(self.asked)} is more than {self.by} allows ({_allows(self)})."


@dataclass(frozen=True, slots=True)
class Allowed:
    """What somebody may have."""

    profile: Profile
    by: Mapping[str, str] = field(default_factory=dict)
    """Who has narrowed what, by the path of the setting; else it is the profile."""

    def narrowed(self, asked: Profile, paths: Iterable[str], by: str) -> "Allowed":
        """The same where those settings are at most what is asked."""
        profile, bounds = self.profile, dict(self.by)
        for path in paths:
            before = get(profile, path)
            now = narrower(path, before, get(asked, path))
            if now != before:
                profile = with_value(profile, path, now)
                bounds[path] = by
        return Allowed(profile, bounds)

    def refusal(self, asked: Profile, paths: Iterable[str]) -> Refusal | None:
        """The first of these settings in which more is asked for than is allowed."""
        for path in paths:
            allowed, wanted = get(self.profile, path), get(asked, path)
            if not narrows(path, allowed, wanted):
                by = self.by.get(path, f"profile {self.profile.name!r}")
                return Refusal(path, wanted, allowed, by)
        return None


def settings(profile: Profile) -> Iterator[str]:
    """The path of everything that can be narrowed, in the order of the types."""
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
    """What stands at a path."""
    for name in path.split("."):
        value = getattr(value, name)
    return value


def with_value(profile: Profile, path: str, value: Any) -> Profile:
    """The profile with that at the path."""
    changed: Profile = _with(profile, path.split("."), value)
    return changed


def _with(tree: Any, path: list[str], value: Any) -> Any:
    name, *below = path
    return replace(tree, **{name: _with(getattr(tree, name), below, value) if below else value})


def _shown(value: object) -> str:
    return value.mode if isinstance(value, Egress) else str(value)


def _allows(refusal: Refusal) -> str:
    allowed = refusal.allowed
    if isinstance(allowed, Egress) and allowed.mode == "allowlist":
        return f"allowlist: {', '.join(allowed.allow)}"
    return _shown(allowed)
