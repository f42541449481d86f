"""URLs in requests that a backend would fetch by itself, from inside the operator's network."""

from collections.abc import Iterator, Mapping
from typing import Any

_URL_FIELDS = ("image_url", "video_url", "audio_url", "file_url", "server_url")
"""What content parts of chat completions and of the Responses API, and MCP tools, name URLs in."""
_SCHEMES = ("http://", "https://")
_WITHOUT_PARTS = frozenset({"annotations", "functions", "metadata", "response_format"})
"""Fields in which a URL is only text."""


def is_remote(url: str) -> bool:
    """Return True if a string is a URL that is fetched over HTTP."""
    return url[:8].lower().startswith(_SCHEMES)


def remote_urls(body: Any) -> Iterator[str]:
    """Yield each URL of a request's body that its backend would fetch."""
    if isinstance(body, list):
        for item in body:
            if not isinstance(item, str):
                yield from remote_urls(item)
    elif isinstance(body, dict):
        yield from _named(body)
        for name, value in body.items():
            if isinstance(value, dict | list) and name not in _WITHOUT_PARTS:
                yield from remote_urls(value)


def _named(part: Mapping[str, Any]) -> Iterator[str]:
    """Yield the URLs in one part's own fields; Anthropic's sources have theirs in `url`."""
    fields = (*_URL_FIELDS, "url") if part.get("type") == "url" else _URL_FIELDS
    for name in fields:
        value = part.get(name)
        url = value.get("url") if isinstance(value, dict) else value
        if isinstance(url, str) and is_remote(url):
            yield url
