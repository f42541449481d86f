"""Files that a request names by URL or id, as its model is shown them: in data URLs."""

import asyncio
import base64
from collections.abc import Callable
from typing import Any

from proxy.body_memory import HeldBody
from proxy.store.records import Upload
from proxy.wire.content_parts import FilePart, shown_type, with_url

MAX_SHOWN_BYTES = 20 << 20
"""The largest file that goes to the model; a larger one is in the sandbox only."""
MAX_ALL_SHOWN_BYTES = 50 << 20
"""All files of a request that go to the model, each as often as it is named: OpenAI takes 50 MB.
Those after it are in the sandbox only."""


class ShownFiles:
    """The files of one request that go to its model. Each is encoded once, however often it is
    named, but counted each time, for the backend's request has it each time."""

    def __init__(self, body: HeldBody | None) -> None:
        """`body` is where their bytes are counted."""
        self._body = body
        self._bytes_left = MAX_ALL_SHOWN_BYTES
        self._urls: dict[tuple[str, str], str] = {}

    async def fetched(self, part: FilePart, mime_type: str, data: bytes) -> dict[str, Any] | None:
        """Return a part that names a picture, sound or video by URL with its bytes in a data URL,
        or None if they are no such thing, or too many. Raises BusyError."""
        known_type = shown_type(part, mime_type)
        if known_type is None:
            return None
        url = await self._url(part, known_type, len(data), lambda: data)
        return None if url is None else with_url(part, url)

    async def uploaded(self, part: FilePart, upload: Upload, mime_type: str) -> Any:
        """Return an uploaded picture as the part that models know, or None if it has too many
        bytes. Raises BusyError."""
        try:
            url = await self._url(part, mime_type, upload.bytes, upload.path.read_bytes)
        except OSError:
            return None  # it has just expired: the sandbox will not have it either, and say so
        if url is None:
            return None
        asked = part.part or {}
        detail = {"detail": asked["detail"]} if asked.get("detail") else {}
        return {"type": "image_url", "image_url": {"url": url, **detail}}

    async def _url(
        self, part: FilePart, mime_type: str, size: int, read: Callable[[], bytes]
    ) -> str | None:
        if size > min(MAX_SHOWN_BYTES, self._bytes_left):
            return None
        self._bytes_left -= size
        head = f"data:{mime_type};base64,"
        key = (part.identity, mime_type)
        if self._body:
            times = 1 if key in self._urls else 2  # in the backend's request, and the string itself
            self._body.take(times * (len(head) + (size + 2) // 3 * 4))
        if key not in self._urls:
            self._urls[key] = await asyncio.to_thread(_encoded, head, read)
        return self._urls[key]


def _encoded(head: str, read: Callable[[], bytes]) -> str:
    return head + base64.b64encode(read()).decode()
