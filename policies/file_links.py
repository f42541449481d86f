"""Signed links to produced files, where clients send them back.

A link opens a file without a key, for a day. The model and its backend need no such thing: they are
told the file's path, or the link without what opens it.
"""

import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

MARK = "/v1/containers/"
"""Part of every link."""
_LINK = re.compile(
    r"(?P<place>(?:https?://[^\s\"'<>()\[\]/]{1,255}(?:/[\w.~-]{1,64}){0,8})?/v1/containers/"
    r"(?P<container>[\w-]{1,128})/files/(?:(?P<file>cfile_\w{1,64})/)?content)"
    r"\?exp=\d{1,12}&(?:amp;)?sig=[0-9a-f]{64}"
)
_URL_FIELDS = ("image_url", "video_url", "audio_url", "file_url")
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


def naming_files(message: Mapping[str, Any], files: Container[Link]) -> Mapping[str, Any]:
    """Return a message whose parts name these files by their ids, `container/file`, where they
    named them by signed links: nobody else need be asked for a file that is kept here."""
    content = message.get("content")
    if not isinstance(content, list) or message.get("role") == "assistant":
        return message
    parts = [_naming(part, files) if isinstance(part, dict) else part for part in content]
    return {**message, "content": parts} if _differ(parts, content) else message


def _naming(part: dict[str, Any], files: Container[Link]) -> dict[str, Any]:
    nested = part.get("file")
    fields = nested if isinstance(nested, dict) else part
    for name in _URL_FIELDS:
        value = fields.get(name)
        url = value.get("url") if isinstance(value, dict) else value
        link = _LINK.fullmatch(url) if isinstance(url, str) and _may_link(url) else None
        if link is None or (link["container"], link["file"]) not in files:
            continue
        file_id = f"{link['container']}/{link['file']}"
        if name != "image_url":
            return {"type": "input_file", "file_id": file_id}
        detail = (value if isinstance(value, dict) else part).get("detail")
        return {"type": "input_image", "file_id": file_id, "detail": detail}
    return part


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
