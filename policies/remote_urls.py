"""URLs in requests that a backend would fetch by itself, from inside the operator's network."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

URL_FIELDS = frozenset(
    {
        *("image", "images", "image_data", "image_url", "image_urls"),
        *("audio", "audios", "audio_data", "audio_url", "audio_urls", "ref_audio"),
        *("video", "videos", "video_data", "video_url", "video_urls"),
        *("file_url", "server_url", "url"),
    }
)
"""Fields that name a file to be fetched. Some backends, such as SGLang, open paths here too."""
_WITHOUT_PARTS = frozenset(
    {
        *("action", "annotations", "arguments", "citations", "functions", "headers", "metadata"),
        *("format", "guided_json", "input_schema", "json", "json_schema", "parameters"),
        *("response_format", "schema"),
    }
)
"""Fields in which a URL is only text, however deep."""
_REPORTS = ("web_search", "web_fetch")
"""Prefixes of the types of items that report which pages a model has seen."""
_INSIDE = r"[\t\r\n]*"
"""URL parsers ignore these characters wherever they stand."""
_SCHEMES = "|".join(_INSIDE.join(scheme) for scheme in ("http", "https", "file"))
_URL = re.compile(rf"[\s\0-\x1f]*(?:{_SCHEMES}){_INSIDE}:", re.IGNORECASE)
_LEFT_OUT = re.compile("[\t\r\n]")
_BLANKS = "".join(map(chr, range(33)))
_MARKDOWN_IMAGE = re.compile(r"!\[\]\(([^)]{1,4096})")
_MAX_PATH_CHARS = 4096
_PATH_BEGINNINGS = ("/", "~", "./", "../")
_JPEG = "/9j/"
"""The beginning of a JPEG in base64."""


def is_url(text: str) -> bool:
    """Return True for a URL, not a path."""
    return _URL.match(text) is not None


def remote_urls(body: Any) -> Iterator[str]:
    """Yield each URL of a request's body that its backend would fetch, and each path that it would
    open."""
    left: list[tuple[str, Any]] = [("", body)]
    while left:
        name, value = left.pop()
        if isinstance(value, str):
            yield from _named(name, value)
        elif isinstance(value, list):
            kinds = (dict, list, str) if name in URL_FIELDS else (dict, list)
            left += [(name, item) for item in value if isinstance(item, kinds)]
        elif isinstance(value, dict):
            left += _fields(name, value)


def _fields(name: str, part: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what may name URLs in a part that stands in the field `name`."""
    kind = part.get("type")
    kind = kind if isinstance(kind, str) else ""
    for field, item in part.items():
        if field in _WITHOUT_PARTS or not isinstance(item, dict | list | str):
            continue
        if field == "url" and not _is_fetched(name, kind):
            continue
        if field == "input" and isinstance(item, dict) and kind.endswith("tool_use"):
            continue  # the arguments of a call
        if field == "input" and part.get("modality", "text") != "text":
            field = "url"
        yield field, item


def _is_fetched(name: str, kind: str) -> bool:
    """Return True if the `url` of a part of this type in this field is fetched: where it belongs to
    a document, it only says where its text is from."""
    if not name or name in URL_FIELDS or name == "source":
        return True
    return bool(kind) and not kind.startswith(_REPORTS)


def _named(name: str, value: str) -> Iterator[str]:
    if name == "inputs":  # TGI fetches the images of Markdown
        for image in _MARKDOWN_IMAGE.finditer(value):
            if _URL.match(image[1]):
                yield _clean(image[1])
    elif name in URL_FIELDS and (_URL.match(value) or _is_path(value)):
        yield _clean(value)


def _clean(url: str) -> str:
    return _LEFT_OUT.sub("", url).strip().strip(_BLANKS)


def _is_path(value: str) -> bool:
    """Return True for a string that is a path of a file, not one in base64."""
    if len(value) > _MAX_PATH_CHARS or value.startswith(_JPEG):
        return False
    return value.startswith(_PATH_BEGINNINGS)
