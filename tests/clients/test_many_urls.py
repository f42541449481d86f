"""Requests with many URLs: lookups, fetches and their limits."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from proxy.fetch import MAX_CONCURRENT_CHECKS, MAX_HOSTS, Fetcher
from proxy.inputs import MAX_FETCHES, InputLoader
from proxy.models.scripted import text_reply
from sandbox_runtime.egress.dialer import Resolve
from tests.clients.test_input_files import (
    PNG,
    SUBMIT,
    complete,
    image_part,
    texts_of,
    user,
    user_content,
)
from tests.fakes.backend import scripted_backend
from tests.fakes.server import running_proxy
from tests.sandbox_runtime.egress.internet import PUBLIC, Internet, Reader, Writer

MANY = MAX_FETCHES + 8


def plain_body(*urls: str) -> dict[str, Any]:
    return {"model": "fake-model:plain", "messages": user(*map(image_part, urls))}


async def post_urls(
    tmp_path: Path, internet: Internet, *urls: str, resolve: Resolve | None = None
) -> httpx.Response:
    fetcher = Fetcher(resolve=resolve or internet.resolve, connect=internet.connect)
    async with (
        scripted_backend([text_reply("Seen.")]) as backend,
        running_proxy(backend, "memory", tmp_path, inputs=InputLoader(fetcher=fetcher)) as url,
        httpx.AsyncClient(base_url=f"{url}/v1", timeout=30) as client,
    ):
        return await client.post("/chat/completions", json=plain_body(*urls))


async def test_urls_of_one_host_cause_one_host_lookup(tmp_path: Path) -> None:
    internet = Internet()
    urls = [f"http://allowed.example/{number}.png" for number in range(MANY)]
    assert (await post_urls(tmp_path, internet, *urls)).status_code == 200
    assert internet.lookups == ["allowed.example"]


async def test_request_with_too_many_hosts_is_refused(tmp_path: Path) -> None:
    internet = Internet({f"host{number}.example": [PUBLIC] for number in range(MAX_HOSTS + 1)})
    urls = [f"http://{host}/" for host in internet.names]
    assert (await post_urls(tmp_path, internet, *urls[1:])).status_code == 200
    answer = await post_urls(tmp_path, internet, *urls)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_many_urls")
    assert f"more than {MAX_HOSTS} hosts" in answer.json()["error"]["message"]


async def test_private_host_among_public_hosts_is_refused(tmp_path: Path) -> None:
    internet = Internet({"allowed.example": [PUBLIC], "inside.example": ["10.0.0.1"]})
    urls = ["http://allowed.example/a.png", "http://inside.example/b.png"]
    answer = await post_urls(tmp_path, internet, *urls)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "url_not_allowed")
    assert "inside.example/b.png" in answer.json()["error"]["message"]


async def test_hosts_of_urls_are_looked_up_concurrently(tmp_path: Path) -> None:
    internet, barrier = Internet(), asyncio.Barrier(MAX_CONCURRENT_CHECKS)

    async def resolve(host: str) -> Sequence[str]:
        await barrier.wait()
        return [PUBLIC]

    with anyio.fail_after(20):
        urls = [f"http://host{number}.example/" for number in range(MAX_CONCURRENT_CHECKS)]
        answer = await post_urls(tmp_path, internet, *urls, resolve=resolve)
    assert answer.status_code == 200


@pytest.mark.parametrize("path", ["chat/completions", "messages", "embeddings"])
async def test_disconnect_cancels_the_lookup_of_hosts(path: str, tmp_path: Path) -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def resolve(host: str) -> Sequence[str]:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.set()
            raise
        raise AssertionError

    fetcher = Fetcher(resolve=resolve, connect=Internet().connect, connect_timeout_s=3600)
    async with (
        scripted_backend([]) as backend,
        running_proxy(backend, "memory", tmp_path, inputs=InputLoader(fetcher=fetcher)) as url,
    ):
        with anyio.fail_after(20):
            async with httpx.AsyncClient(base_url=f"{url}/v1/", timeout=None) as client:
                body = {**plain_body("http://slow.example/"), "max_tokens": 5}
                asking = asyncio.create_task(client.post(path, json=body))
                await started.wait()
                asking.cancel()
                await asyncio.wait([asking])
            await ended.wait()


async def test_only_the_newest_urls_are_fetched(tmp_path: Path) -> None:
    async def site(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: 11\r\n\r\n"
        writer.write(head + PNG)

    internet = Internet()
    fetcher = Fetcher(resolve=internet.resolve, connect=internet.connect)
    parts = [image_part(f"http://allowed.example/{number}.png") for number in range(MANY)]
    async with (
        scripted_backend([SUBMIT]) as backend,
        internet.server(site),
        running_proxy(backend, "memory", tmp_path, inputs=InputLoader(fetcher=fetcher)) as url,
    ):
        await complete(url, user(*parts))
    content = user_content(backend)
    missing = [note for note in texts_of(content) if "was not fetched" in note]
    assert [note.partition(" ")[0] for note in missing] == [
        f"[http://allowed.example/{number}.png" for number in range(MANY - MAX_FETCHES)
    ]
    assert f"the newest {MAX_FETCHES} URLs" in missing[0]
    assert sum(part["type"] == "image_url" for part in content) == MAX_FETCHES
