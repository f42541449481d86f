"""All that a profile settles, and what it is in each, as a table in Markdown."""

from collections.abc import Iterator, Mapping
from typing import Any

from policies.egress import Egress
from policies.profile import Profile, get, in_words, settings

HEAD = ("| setting | default | elsewhere | narrower |", "|---|---|---|---|")


def table(profiles: Mapping[str, Profile], usual: Profile) -> Iterator[str]:
    """Its lines: of each setting the usual value, that of the profiles where it is another, and
    what a model, a key or a request may make of it."""
    yield from HEAD
    for path in settings(usual):
        value = get(usual, path)
        others = [
            f"{name} {_shown(get(each, path))}"
            for name, each in profiles.items()
            if get(each, path) != value
        ]
        narrower = in_words(path, value)
        yield f"| `{path}` | {_shown(value)} | {', '.join(others)} | {narrower} |"


def _shown(value: Any) -> str:
    if isinstance(value, Egress):
        value = [value.mode, *value.allow]
    elif isinstance(value, tuple):
        value = [getattr(each, "name", each) for each in value]
    if isinstance(value, list):
        return f"`{' '.join(map(str, value))}`" if value else "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"{value:,.12g}"
    return "null" if value is None else str(value)
