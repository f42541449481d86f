"""The memory budget that all request bodies share; a body that exceeds it is refused with 503."""

import asyncio
import gc
import json
import weakref
from functools import partial
from pathlib import Path

import anyio
import httpx
import pytest

from proxy.body_memory import COLLECTED_BYTES, BodyMemory
from proxy.models.scripted import text_reply
from tests.fakes.backend import Held, scripted_backend
from tests.fakes.server import EachKey, running_proxy
from tests.fakes.waiting import until

MIB = 1 << 20
HELLO = {"model": "m", "messages": [{"role": "user", "content": "Hello."}]}


def large_body(mib: int, model: str = "m:plain") -> bytes:
    content = "x" * (mib * MIB)
    return json.dumps({"model": model, "messages": [{"role": "user", "content": content}]}).encode()


async def test_second_large_body_gets_503_while_the_first_holds_the_memory_and_a_small_body_passes(
    tmp_path: Path,
) -> None:
    answers: list[int] = []
    release = asyncio.Event()
    held = Held(text_reply("Long."), release)
    memory = BodyMemory(15 * MIB)
    async with (
        scripted_backend([held, text_reply("Hi."), text_reply("Again.")]) as backend,
        running_proxy(backend, "memory", tmp_path, body_memory=memory) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as client,
    ):

        async def send(body: bytes) -> httpx.Response:
            answer = await client.post("/v1/chat/completions", content=body)
            answers.append(answer.status_code)
            return answer

        async with anyio.create_task_group() as group:
            group.start_soon(send, large_body(3))
            await backend.arrived(1)
            refused = await send(large_body(3))
            assert refused.json()["error"]["code"] == "server_busy"
            assert int(refused.headers["retry-after"]) > 0
            await send(json.dumps({**HELLO, "model": "m:plain"}).encode())
            release.set()
        await send(large_body(3))
    assert answers == [503, 200, 200, 200]


@pytest.mark.parametrize(
    ("text", "in_utf_8", "weight"),
    [("x", True, 3), ("x\u00e9", True, 3), ("x\u20ac", True, 4), ("x\U0001f600", True, 6),
     ("x\U0001f600", False, 6)],
)  # fmt: skip
async def test_body_memory_counts_the_received_parsed_and_relayed_copies_of_a_body(
    text: str, in_utf_8: bool, weight: int, tmp_path: Path
) -> None:
    """Python stores each character of a string in as many bytes as its widest one needs."""
    release, memory = asyncio.Event(), BodyMemory()
    content = MIB * "x" + text
    fields = {"model": "m:plain", "messages": [{"role": "user", "content": content}]}
    body = json.dumps(fields, ensure_ascii=not in_utf_8).encode()
    async with (
        scripted_backend([Held(text_reply("Long."), release)]) as backend,
        running_proxy(backend, "memory", tmp_path, body_memory=memory) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as client,
        anyio.create_task_group() as group,
    ):
        group.start_soon(post_status, client, body)
        await backend.arrived(1)
        assert memory.held_bytes // MIB == weight
        release.set()
        await until(lambda: memory.held_bytes == 0)
    tiny = BodyMemory(weight * MIB)
    async with (
        scripted_backend([]) as backend,
        running_proxy(backend, "memory", tmp_path / "tiny", body_memory=tiny) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as client,
    ):
        assert await post_status(client, body) == 413  # however long its client waits
    assert tiny.held_bytes == 0


async def test_malformed_or_too_large_body_releases_its_memory(tmp_path: Path) -> None:
    memory = BodyMemory(7 * MIB)
    async with (
        scripted_backend([text_reply("Hi.")]) as backend,
        running_proxy(backend, "memory", tmp_path, body_memory=memory) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as client,
    ):
        for _ in range(3):
            broken = await client.post("/v1/chat/completions", content=large_body(2)[:-1])
            assert broken.status_code == 400
            for path in ("/v1/embeddings", "/v1/chat/completions"):
                too_large = await client.post(
                    path, content=large_body(4), headers={"content-type": "application/json"}
                )
                assert too_large.status_code == 413
        for path in ("/v1/embeddings", "/v1/chat/completions"):
            answer = await client.post(
                path, content=large_body(2), headers={"content-type": "application/json"}
            )
            assert answer.status_code in (200, 404)
    assert memory.held_bytes == 0


async def test_body_of_a_background_or_detached_run_counts_as_memory_until_the_run_ends(
    tmp_path: Path,
) -> None:
    memory = BodyMemory(15 * MIB)
    first, second = asyncio.Event(), asyncio.Event()
    script = [Held(text_reply("One."), first), Held(text_reply("Two."), second), text_reply("3.")]
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path, body_memory=memory) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as client,
    ):
        with anyio.fail_after(30):
            whole = {"model": "m", "input": "x" * (3 * MIB), "background": True}
            made = await client.post("/v1/responses", json=whole)
            assert made.json()["status"] == "queued"
            await backend.arrived(1)
            assert await post_status(client, large_body(3)) == 503
            first.set()
            await until(lambda: memory.held_bytes == 0)

            leaving = json.loads(large_body(3, "m")) | {"sandbox": {"on_disconnect": "detach"}}
            async with anyio.create_task_group() as group:
                group.start_soon(partial(client.post, "/v1/chat/completions", json=leaving))
                await backend.arrived(2)
                group.cancel_scope.cancel()
            assert await post_status(client, large_body(3)) == 503
            second.set()
            await until(lambda: memory.held_bytes == 0)
            assert await post_status(client, large_body(3)) == 200


async def post_status(client: httpx.AsyncClient, body: bytes) -> int:
    return (await client.post("/v1/chat/completions", content=body)).status_code


async def test_key_is_limited_to_its_share_of_the_body_memory(tmp_path: Path) -> None:
    release = asyncio.Event()
    script = [Held(text_reply("Long."), release), text_reply("Hi.")]
    memory = BodyMemory(24 * MIB, max_bytes_per_owner=12 * MIB)
    with anyio.fail_after(30):
        async with (
            scripted_backend(script) as backend,
            running_proxy(
                backend, "memory", tmp_path, body_memory=memory, keyring=EachKey()
            ) as url,
            httpx.AsyncClient(base_url=url, headers=bearer_header("one"), timeout=30) as one,
            httpx.AsyncClient(base_url=url, headers=bearer_header("two"), timeout=30) as two,
            anyio.create_task_group() as group,
        ):
            group.start_soon(post_status, one, large_body(3))
            await backend.arrived(1)
            refused = await one.post("/v1/chat/completions", content=large_body(3))
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                429,
                "rate_limit_exceeded",
            )
            assert int(refused.headers["retry-after"]) > 0
            assert await post_status(two, large_body(3)) == 200
            release.set()


def bearer_header(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


class Cycle:
    """An object that refers to itself, as the objects of a run do."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_of_ended_requests_is_collected_before_more_memory_is_reserved() -> None:
    """Six bodies of 100 MB, one after the other, took 1.4 GB: reference cycles kept each."""
    memory = BodyMemory()
    gc.disable()
    try:
        ended = weakref.ref(Cycle())
        memory.take("owner", COLLECTED_BYTES)
        memory.release("owner", COLLECTED_BYTES)
        assert ended() is not None
        memory.take("owner", 1)
        assert ended() is None
    finally:
        gc.enable()
