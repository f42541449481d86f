"""Texts are counted by the backend: each once, only so many, and only if that is quick."""

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import anyio
from aiohttp import web

from proxy.inputs import MAX_COUNTED, TextLengths
from proxy.models.openai_http import OpenAIHTTPModel
from tests.fakes.backend import scripted_backend

PATIENCE_S = 0.05


@asynccontextmanager
async def lengths(
    tokenize: Callable[[web.Request], Any], patience_s: float = 20
) -> AsyncIterator[TextLengths]:
    async with scripted_backend([], elsewhere=tokenize) as backend:
        model = OpenAIHTTPModel(backend.base_url, api_key=None, timeout_s=20)
        async with aclosing(model):
            with anyio.fail_after(20):
                yield TextLengths(model, patience_s)


async def test_each_text_is_counted_once_for_each_model() -> None:
    asked: list[tuple[str, str]] = []

    async def tokenize(request: web.Request) -> web.Response:
        body = await request.json()
        asked.append((body["model"], body["prompt"]))
        return web.json_response({"count": len(body["prompt"])})

    async with lengths(tokenize) as counter:
        assert await counter.counted("m", ["one", "three", "one"]) == {"one": 3, "three": 5}
        assert await counter.counted("m", ["three", "one\ud800"]) == {"three": 5, "one\ud800": 4}
        assert await counter.counted("n", ["one"]) == {"one": 3}
    assert asked == [("m", "one"), ("m", "three"), ("m", "one\ud800"), ("n", "one")]


async def test_of_many_texts_the_first_are_counted() -> None:
    async def tokenize(request: web.Request) -> web.Response:
        return web.json_response({"count": 1})

    texts = [str(number) for number in range(MAX_COUNTED + 1)]
    async with lengths(tokenize) as counter:
        assert await counter.counted("m", texts) == dict.fromkeys(texts[:-1], 1)
        assert await counter.counted("m", texts) == dict.fromkeys(texts, 1)


async def test_what_is_not_counted_in_time_is_not_waited_for() -> None:
    forever = anyio.Event()

    async def tokenize(request: web.Request) -> web.Response:
        if (await request.json())["prompt"] == "slow":
            await forever.wait()
        return web.json_response({"count": 1})

    async with lengths(tokenize, PATIENCE_S) as counter:
        while "quick" not in (found := await counter.counted("m", ["quick", "slow", "late"])):
            pass  # under load not even that one may be there in time
        forever.set()
    assert found == {"quick": 1}
