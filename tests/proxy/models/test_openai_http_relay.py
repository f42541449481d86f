"""Relays and connections of the door to OpenAI-compatible servers."""

import asyncio
from contextlib import aclosing

import anyio
import pytest

from proxy.agent.events import ModelDelta
from proxy.errors import BackendError
from proxy.models.openai_http import OpenAIHTTPModel
from proxy.models.scripted import text_reply
from tests.fakes.backend import (
    Frames,
    Held,
    Item,
    Raw,
    Refusal,
    ScriptedBackend,
    chunk,
    frames,
    scripted_backend,
)
from tests.proxy.models.heard import Heard

BODY = {"model": "fake-model", "messages": [{"role": "user", "content": "What is 6 times 7?"}]}
KEY = "sk-very-secret-key"


def door(backend: ScriptedBackend) -> aclosing[OpenAIHTTPModel]:
    return aclosing(OpenAIHTTPModel(backend.base_url, api_key=KEY, timeout_s=5))


async def test_relayed_bytes_are_untouched() -> None:
    pieces = [b'data: {"odd" :  1}\r\n', b"\r\n: comment\n\nda", b"ta: [DONE]\n\n", b"\xff\x00"]
    async with scripted_backend([Frames(pieces)]) as backend, door(backend) as model:
        with anyio.fail_after(5):
            relayed = await model.relay({**BODY, "stream": True}, {})
            body = b"".join([piece async for piece in relayed.body])
    assert body == b"".join(pieces)


async def test_a_relayed_answer_keeps_only_the_headers_that_are_for_the_client() -> None:
    headers = {
        "Content-Type": "application/problem+json",
        "Retry-After": "3",
        "X-Request-Id": "abc",
        "X-RateLimit-Remaining-Tokens": "12",
        "OpenAI-Processing-Ms": "7",
        "X-Should-Retry": "false",
        "Set-Cookie": "session=1",
        "X-Internal-Host": "gpu-7",
    }
    item = Raw(503, b"not JSON at all", headers)
    async with scripted_backend([item]) as backend, door(backend) as model:
        with anyio.fail_after(5):
            relayed = await model.relay(BODY, {})
            body = b"".join([piece async for piece in relayed.body])
    assert (relayed.status, body) == (503, b"not JSON at all")
    assert relayed.headers == {
        "content-type": "application/problem+json",
        "retry-after": "3",
        "x-request-id": "abc",
        "x-ratelimit-remaining-tokens": "12",
        "openai-processing-ms": "7",
        "x-should-retry": "false",
    }


@pytest.mark.parametrize("pieces_read", [0, 1])
async def test_a_relayed_body_that_is_closed_ends_the_backends_work(pieces_read: int) -> None:
    held = Held(text_reply("It is 42."), until=asyncio.Event(), after_pieces=1)
    async with scripted_backend([held]) as backend, door(backend) as model:
        with anyio.fail_after(5):
            relayed = await model.relay({**BODY, "stream": True}, {})
            for _ in range(pieces_read):
                await anext(aiter(relayed.body))
            await relayed.body.aclose()
            await backend.requests[0].gone.wait()


async def test_a_relayed_answer_that_breaks_off_is_an_error() -> None:
    item = Frames(frames(chunk({"content": "4"})), cut=True)
    async with scripted_backend([item]) as backend, door(backend) as model:
        with anyio.fail_after(5):
            relayed = await model.relay({**BODY, "stream": True}, {})
            with pytest.raises(BackendError, match="closed before the answer was complete"):
                async for _ in relayed.body:
                    pass


async def test_a_run_that_is_cancelled_ends_the_backends_work() -> None:
    held = Held(text_reply("It is 42."), until=asyncio.Event(), after_pieces=1)
    async with scripted_backend([held]) as backend, door(backend) as model:
        with anyio.fail_after(5):
            run = asyncio.create_task(model.complete(BODY, Heard()))
            seen = await backend.arrived(1)
            run.cancel()
            await seen.gone.wait()
            with pytest.raises(asyncio.CancelledError):
                await run


async def test_a_whole_request_that_is_cancelled_ends_the_backends_work() -> None:
    held = Held(text_reply("It is 42."), until=asyncio.Event())
    async with scripted_backend([held]) as backend, door(backend) as model:
        with anyio.fail_after(5):
            run = asyncio.create_task(model.complete(BODY, None))
            seen = await backend.arrived(1)
            run.cancel()
            await seen.gone.wait()
            with pytest.raises(asyncio.CancelledError):
                await run


async def test_what_a_listener_raises_passes_as_it_is_and_ends_the_backends_work() -> None:
    async def refuse(delta: ModelDelta) -> None:
        raise TimeoutError("the client is too slow")

    # The listener fails at the first text, the second piece; from the third on all is held.
    held = Held(text_reply("The answer is 42."), until=asyncio.Event(), after_pieces=2)
    async with scripted_backend([held]) as backend, door(backend) as model:
        with anyio.fail_after(5):
            with pytest.raises(TimeoutError, match="the client is too slow"):
                await model.complete(BODY, refuse)
            await backend.requests[0].gone.wait()


async def test_replies_one_after_another_share_a_connection() -> None:
    script: list[Item] = [
        text_reply("1"),
        text_reply("2"),
        Refusal(400),
        text_reply("3"),
        text_reply("4"),
    ]
    async with scripted_backend(script) as backend, door(backend) as model:
        with anyio.fail_after(5):
            await model.complete(BODY, Heard())
            await model.complete(BODY, None)
            with pytest.raises(BackendError):
                await model.complete(BODY, None)
            relayed = await model.relay({**BODY, "stream": True}, {})
            async for _ in relayed.body:
                pass
            await model.complete(BODY, Heard())
    assert len({seen.peer for seen in backend.requests}) == 1


async def test_many_requests_are_in_flight_at_once() -> None:
    count, release = 150, asyncio.Event()
    script = [Held(text_reply("42"), until=release)] * count
    async with scripted_backend(script) as backend, door(backend) as model:
        with anyio.fail_after(20):
            runs = [asyncio.create_task(model.complete(BODY, Heard())) for _ in range(count)]
            await backend.arrived(count)  # none is answered before all have arrived
            release.set()
            replies = await asyncio.gather(*runs)
    assert [reply.message["content"] for reply in replies] == ["42"] * count
