"""Signed links to produced files, where clients send them back.

A link opens a file without a key, for a day. The model and its backend need no such thing: they are
told the file's path, or the link without what opens it.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

MARK = "/v1/containers/"
"""Part of every link."""
_LINK = re.compile(
    r"(?P<place>(?:https?://[^\s\"'<>()\[\]/]{1,255}(?:/[\w.~-]{1,64}){0,8})?/v1/containers/"
    r"(?P<container>[\w-]{1,128})/files/(?:(?P<file>cfile_\w{1,64})/)?content)"
    r"\?exp=\d{1,12}&(?:amp;)?sig=[0-9a-f]{64}"
)
Link = tuple[str, str]
"""A container's id and a file's."""
PathOf = Callable[[Link], str | None]


def links_in(value: Any) -> Iterator[Link]:
    """Yield the file of each signed link in a text, or in the texts of JSON."""
    if isinstance(value, str):
        if _may_link(value):
            yield from ((m["container"], m["file"]) for m in _LINK.finditer(value) if m["file"])
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from links_in(item)


def without_links(value: Any, path_of: PathOf = lambda link: None) -> Any:
    """Return JSON with each signed link replaced by its file's path, or, where that is not known,
    by the link without its signature. What has no link in it is returned as it is."""
    if isinstance(value, str):
        return _LINK.sub(lambda m: _instead(m, path_of), value) if _may_link(value) else value
    if isinstance(value, dict):
        fields = {name: without_links(item, path_of) for name, item in value.items()}
        return fields if any(fields[name] is not value[name] for name in value) else value
    if isinstance(value, list):
        items = [without_links(item, path_of) for item in value]
        return items if _differ(items, value) else value
    return value


def _may_link(text: str) -> bool:
    return not text.startswith("data:") and MARK in text


def _instead(match: re.Match[str], path_of: PathOf) -> str:
    path = path_of((match["container"], match["file"])) if match["file"] else None
    return path or match["place"]


def _differ(items: Sequence[Any], others: Sequence[Any]) -> bool:
    return any(one is not other for one, other in zip(items, others, strict=True))
