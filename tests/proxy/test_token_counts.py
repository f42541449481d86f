"""TextTokenCounter: cached counts, a maximum number of texts, and a timeout."""

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import anyio
from aiohttp import web

from proxy.inputs import MAX_COUNTED_TEXTS, TextTokenCounter
from proxy.models.openai_http import OpenAIHTTPModel
from tests.fakes.backend import scripted_backend

TIMEOUT_S = 0.05


@asynccontextmanager
async def token_counter(
    tokenize: Callable[[web.Request], Any], timeout_s: float = 20
) -> AsyncIterator[TextTokenCounter]:
    async with scripted_backend([], elsewhere=tokenize) as backend:
        model = OpenAIHTTPModel(backend.base_url, api_key=None, timeout_s=20)
        async with aclosing(model):
            with anyio.fail_after(20):
                yield TextTokenCounter(model, timeout_s)


async def test_token_counts_are_cached_per_model() -> None:
    requests: list[tuple[str, str]] = []

    async def tokenize(request: web.Request) -> web.Response:
        body = await request.json()
        requests.append((body["model"], body["prompt"]))
        return web.json_response({"count": len(body["prompt"])})

    async with token_counter(tokenize) as counter:
        assert await counter.token_counts("m", ["one", "three", "one"]) == {"one": 3, "three": 5}
        assert await counter.token_counts("m", ["three", "one\ud800"]) == {
            "three": 5,
            "one\ud800": 4,
        }
        assert await counter.token_counts("n", ["one"]) == {"one": 3}
    assert requests == [("m", "one"), ("m", "three"), ("m", "one\ud800"), ("n", "one")]


async def test_only_the_first_texts_of_a_request_are_counted() -> None:
    async def tokenize(request: web.Request) -> web.Response:
        return web.json_response({"count": 1})

    texts = [str(number) for number in range(MAX_COUNTED_TEXTS + 1)]
    async with token_counter(tokenize) as counter:
        assert await counter.token_counts("m", texts) == dict.fromkeys(texts[:-1], 1)
        assert await counter.token_counts("m", texts) == dict.fromkeys(texts, 1)


async def test_token_counts_leave_out_texts_that_are_not_counted_in_time() -> None:
    forever = anyio.Event()

    async def tokenize(request: web.Request) -> web.Response:
        if (await request.json())["prompt"] == "slow":
            await forever.wait()
        return web.json_response({"count": 1})

    async with token_counter(tokenize, TIMEOUT_S) as counter:
        while "quick" not in (found := await counter.token_counts("m", ["quick", "slow", "late"])):
            pass  # under load even the quick count may time out
        forever.set()
    assert found == {"quick": 1}
