"""The page of all settings of config.yaml."""

from collections.abc import Iterator
from typing import Any

from docs.generate.declarations import (
    item_section,
    leaves,
    members,
    row,
    section_type,
    table,
    type_words,
    value_words,
)
from policies.profile import Profile
from proxy.config import Config

_TABLE_HEAD = table("setting", "type", "default", "meaning")


def settings() -> str:
    """Return the page of all settings of config.yaml."""
    lines = [
        "# Settings",
        "",
        "Every setting of `config.yaml`, as the code declares it. *In a profile*: a profile, a"
        " model's `policy` and a key's `policy` may set it too, a policy only to something"
        " stricter. A request may set those that [Request fields](request-fields.md) lists.",
        "",
    ]
    in_profile = {name: section_type(kind) for name, kind, *_ in members(Profile)}
    for name, kind, default, words in members(Config):
        section = section_type(kind)
        lines += [f"## {name}", ""]
        if words:
            lines += [words, ""]
        if section is None:
            lines += [f"Type: {type_words(kind)}. Default: {value_words(default)}.", ""]
            if inner := item_section(kind):
                lines += [*_TABLE_HEAD, *_rows(inner, f"{name}.*", None), ""]
            continue
        if name in in_profile:
            lines += [_in_profile(section, in_profile[name]), ""]
        lines += [*_TABLE_HEAD, *_rows(section, name, default), ""]
    lines += ["## A profile", "", "Settings of a profile that no section above has.", ""]
    shared = set(Config.model_fields)
    lines += [
        *_TABLE_HEAD,
        *(line for line in _rows(Profile, "", Profile()) if line.split(".")[0][3:] not in shared),
    ]
    return "\n".join(lines)


def _in_profile(section: type, of_profile: type | None) -> str:
    """Return the line that says which settings of a section a profile may set."""
    names = [name for name, *_ in members(section)]
    allowed = names if of_profile is None else [name for name, *_ in members(of_profile)]
    if set(names) <= set(allowed):
        return "In a profile: yes."
    return "In a profile: " + ", ".join(f"`{name}`" for name in names if name in allowed) + "."


def _rows(section: type, path: str, value: Any) -> Iterator[str]:
    for name, kind, default, words in leaves(section, path, value):
        yield row(f"`{name}`", kind, value_words(default), words)
