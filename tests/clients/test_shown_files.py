"""Files that one request references many times: how often the model gets them."""

import asyncio
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from proxy.body_memory import BodyMemory
from proxy.fetch import Fetcher
from proxy.inputs import MAX_ALL_SHOWN_BYTES, InputLoader
from proxy.models.scripted import text_reply
from tests.clients.test_input_files import data_url, image_part, user, user_content
from tests.fakes.backend import Held, scripted_backend
from tests.fakes.server import running_proxy
from tests.fakes.uploads import DirectoryUploads
from tests.sandbox_runtime.egress.internet import Internet, Reader, Writer

MIB = 1 << 20
PICTURE = b"\x89PNG" + bytes(5 * MIB)
ENCODED = data_url("image/png", PICTURE)
MAX_SHOWN = MAX_ALL_SHOWN_BYTES // len(PICTURE)


async def site(reader: Reader, writer: Writer) -> None:
    await reader.readuntil(b"\r\n\r\n")
    head = f"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: {len(PICTURE)}\r\n\r\n"
    writer.write(head.encode() + PICTURE)


def shown(content: Any) -> list[str]:
    return [part["image_url"]["url"] for part in content if part["type"] == "image_url"]


@pytest.mark.parametrize("kind", ["fetched", "uploaded"])
async def test_copies_of_an_image_beyond_the_shown_limit_are_neither_sent_nor_counted_as_memory(
    kind: str, tmp_path: Path
) -> None:
    internet = Internet()
    fetcher = Fetcher(resolve=internet.resolve, connect=internet.connect)
    uploads = DirectoryUploads(tmp_path)
    uploaded = {"type": "input_image", "file_id": uploads.add("", "p.png", PICTURE)}
    part = uploaded if kind == "uploaded" else image_part("http://allowed.example/p.png")
    needed = (1 + MAX_SHOWN) * len(ENCODED) + (len(PICTURE) if kind == "fetched" else 0)
    small = BodyMemory(needed)
    small.take("another", 1)
    released = asyncio.Event()
    memory = BodyMemory()
    inputs = InputLoader(fetcher=fetcher, uploads=uploads)
    body = {"model": "m", "messages": user(*(MAX_SHOWN + 3) * [part])}
    async with (
        scripted_backend([Held(text_reply("Seen."), released)]) as backend,
        internet.server(site),
        running_proxy(backend, "memory", tmp_path / "a", inputs=inputs, body_memory=memory) as url,
        running_proxy(backend, "memory", tmp_path / "b", inputs=inputs, body_memory=small) as full,
        httpx.AsyncClient(timeout=30) as client,
        anyio.create_task_group() as group,
    ):
        group.start_soon(lambda: client.post(f"{url}/v1/chat/completions", json=body))
        with anyio.fail_after(20):
            await backend.arrived(1)
        assert shown(user_content(backend)) == MAX_SHOWN * [ENCODED]
        assert memory.held_bytes == needed
        refused = await client.post(f"{full}/v1/chat/completions", json=body)
        assert refused.json()["error"]["code"] == "server_busy"
        released.set()
