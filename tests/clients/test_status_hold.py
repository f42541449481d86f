"""The HTTP status of a streamed response: held until the backend answers, within limits."""

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import anyio
import httpx
import openai
import pytest

from proxy.models.scripted import text_reply
from tests.clients.openai_errors import MESSAGES
from tests.fakes.backend import Held, Item, Refusal, scripted_backend
from tests.fakes.server import ATTEMPTS, running_proxy

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "fake-model", "messages": MESSAGES, "stream": True},
    RESPONSES: {"model": "fake-model", "input": "Hello.", "stream": True},
    "/v1/messages": {
        "model": "fake-model",
        "messages": MESSAGES,
        "max_tokens": 1000,
        "stream": True,
    },
}
BUSY = Refusal(500, "busy", type="InternalServerError")
LONG_S = 60.0
"""Longer than any of these tests may take, in seconds."""


def never_answered() -> Held:
    return Held(text_reply("Never said."), asyncio.Event())


def stream_request(
    http: httpx.AsyncClient, path: str = CHAT, **headers: str
) -> AbstractAsyncContextManager[httpx.Response]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return http.stream("POST", path, json=BODIES[path], headers=named)


REFUSALS = [
    (Refusal(404, "The model `m` does not exist.", code="model_not_found"), openai.NotFoundError),
    (
        Refusal(400, "This model's maximum context length is 4096 tokens."),
        openai.BadRequestError,
    ),
    (Refusal(429, "too many", headers={"Retry-After": "1000"}), openai.RateLimitError),
    (BUSY, openai.InternalServerError),
    (Refusal(401, "Incorrect API key provided."), openai.AuthenticationError),
]


@pytest.mark.parametrize(("refusal", "kind"), REFUSALS, ids=lambda each: str(each)[:20])
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_sdk_raises_the_error_that_the_backend_sent(
    path: str, refusal: Refusal, kind: type[openai.APIStatusError], tmp_path: Path
) -> None:
    async with (
        scripted_backend(lambda _: refusal) as backend,
        running_proxy(backend, "memory", tmp_path, status_wait_s=LONG_S) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as sdk,
    ):
        create: Any = sdk.chat.completions.create if path == CHAT else sdk.responses.create
        with anyio.fail_after(20), pytest.raises(kind) as caught:
            await create(**BODIES[path])
    error = caught.value
    assert error.status_code == refusal.status
    assert refusal.message in error.message
    assert error.response.headers.get("retry-after") == refusal.headers.get("Retry-After")
    # A context error is retried once without the proxy's prompt and tools.
    expected_calls = {BUSY.status: ATTEMPTS, 400: 2}.get(refusal.status, 1)
    assert len(backend.requests) == expected_calls


@pytest.mark.parametrize("refusal", [refusal for refusal, _ in REFUSALS], ids=str)
@pytest.mark.parametrize("path", BODIES)
async def test_stream_that_the_backend_refuses_gets_the_status_and_error_of_an_unstreamed_answer(
    path: str, refusal: Refusal, tmp_path: Path
) -> None:
    async with (
        scripted_backend(lambda _: refusal) as backend,
        running_proxy(backend, "memory", tmp_path, status_wait_s=LONG_S) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        with anyio.fail_after(20):
            streamed = await http.post(path, json=BODIES[path])
            whole = await http.post(path, json={**BODIES[path], "stream": False})
    assert streamed.status_code == whole.status_code == refusal.status
    assert streamed.headers["content-type"] == whole.headers["content-type"]
    for name in ("retry-after", "x-should-retry"):
        assert streamed.headers.get(name) == whole.headers.get(name)
    assert streamed.json()["error"] == whole.json()["error"]


@pytest.mark.parametrize("path", BODIES)
async def test_stream_starts_when_the_backend_responds_even_before_any_content(
    path: str, tmp_path: Path
) -> None:
    release = asyncio.Event()
    script = [Held(text_reply("It is a fish."), release, after_pieces=1)]
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path, status_wait_s=LONG_S) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as http,
    ):
        with anyio.fail_after(20):
            async with stream_request(http, path) as answer:
                assert answer.status_code == 200
                pieces = answer.aiter_text()
                first = await anext(pieces)
                release.set()
                rest = "".join([piece async for piece in pieces])
    assert "fish" not in first
    assert "fish" in rest


@pytest.mark.parametrize("path", BODIES)
async def test_stream_of_a_silent_backend_gets_status_200_after_the_status_wait(
    path: str, tmp_path: Path
) -> None:
    speak = asyncio.Event()
    async with (
        scripted_backend([Held(BUSY, speak), text_reply("42")]) as backend,
        running_proxy(
            backend, "memory", tmp_path, status_wait_s=0.05, status_hold_s=0.1, keep_alive_s=0.02
        ) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as http,
    ):
        with anyio.fail_after(20):
            async with stream_request(http, path) as answer:
                assert answer.status_code == 200
                read = ""
                async for piece in answer.aiter_text():
                    read += piece
                    if read.count("keep-alive") + read.count("event: ping") > 2:
                        speak.set()
    # Once the status is sent, retries follow the usual rules.
    assert "42" in read
    assert len(backend.requests) == 2


async def test_stream_sends_no_http_status_while_failed_backend_calls_are_retried(
    tmp_path: Path,
) -> None:
    fail = asyncio.Event()

    def script(body: dict[str, Any]) -> Item:
        if body["messages"][-1]["content"] == "Only wait.":
            return never_answered()
        return next(answers)

    answers = iter([BUSY, Held(BUSY, fail), *[BUSY] * ATTEMPTS])
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path, status_wait_s=0.5) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as http,
        anyio.create_task_group() as group,
    ):
        found: list[httpx.Response] = []

        async def ask() -> None:
            found.append(await http.post(CHAT, json=BODIES[CHAT]))

        with anyio.fail_after(20):
            group.start_soon(ask)
            await backend.arrived(2)
            # A second request, whose backend stays silent, shows when the wait is over.
            said = [{"role": "user", "content": "Only wait."}]
            async with http.stream("POST", CHAT, json={**BODIES[CHAT], "messages": said}) as other:
                assert other.status_code == 200
            assert found == []
            fail.set()
            while not found:
                await anyio.lowlevel.checkpoint()
    assert found[0].status_code == 500


async def test_streamed_request_is_not_retried_beyond_the_status_hold(tmp_path: Path) -> None:
    async with (
        scripted_backend([BUSY] * ATTEMPTS) as backend,
        running_proxy(backend, "memory", tmp_path, status_hold_s=1.9) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        with anyio.fail_after(20):
            answer = await http.post(CHAT, json=BODIES[CHAT])
    assert (answer.status_code, len(backend.requests)) == (500, 1)
    assert "x-should-retry" not in answer.headers


async def test_status_hold_does_not_limit_the_retries_of_an_unstreamed_request(
    tmp_path: Path,
) -> None:
    async with (
        scripted_backend([BUSY, text_reply("42")]) as backend,
        running_proxy(backend, "memory", tmp_path, status_hold_s=0.0) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        with anyio.fail_after(20):
            answer = await http.post(CHAT, json={**BODIES[CHAT], "stream": False})
    assert (answer.status_code, len(backend.requests)) == (200, 2)


async def test_status_200_of_a_stream_is_sent_when_the_status_hold_ends(tmp_path: Path) -> None:
    async with (
        scripted_backend([BUSY, never_answered()]) as backend,
        running_proxy(backend, "memory", tmp_path, status_wait_s=LONG_S, status_hold_s=4.0) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as http,
    ):
        with anyio.fail_after(20):
            async with stream_request(http) as answer:
                assert answer.status_code == 200
    assert len(backend.requests) == 2


async def test_status_is_sent_before_the_read_timeout_of_the_client(tmp_path: Path) -> None:
    async with (
        scripted_backend([never_answered()]) as backend,
        running_proxy(
            backend, "memory", tmp_path, status_wait_s=LONG_S, status_hold_s=LONG_S
        ) as url,
        httpx.AsyncClient(base_url=url, timeout=2) as http,
        stream_request(http, x_stainless_read_timeout="2") as answer,
    ):
        assert answer.status_code == 200


@pytest.mark.parametrize("path", BODIES)
async def test_disconnect_before_the_status_is_sent_ends_the_run(path: str, tmp_path: Path) -> None:
    async with (
        scripted_backend([never_answered()]) as backend,
        running_proxy(
            backend, "memory", tmp_path, status_wait_s=LONG_S, status_hold_s=LONG_S
        ) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as http,
        anyio.create_task_group() as group,
    ):
        with anyio.fail_after(20):
            group.start_soon(lambda: http.post(path, json=BODIES[path]))
            seen = await backend.arrived(1)
            group.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await seen.gone.wait()


async def test_client_that_joins_an_accepted_run_gets_the_status_at_once(tmp_path: Path) -> None:
    script = [Held(text_reply("The answer is 42."), asyncio.Event(), after_pieces=1)]
    async with (
        scripted_backend(script) as backend,
        running_proxy(
            backend, "memory", tmp_path, status_wait_s=LONG_S, status_hold_s=LONG_S
        ) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as http,
    ):
        with anyio.fail_after(20):
            async with (
                stream_request(http, idempotency_key="once") as first,
                stream_request(http, idempotency_key="once") as second,
            ):
                assert first.status_code == second.status_code == 200
                assert first.headers["x-sandbox-run"] == second.headers["x-sandbox-run"]
    assert len(backend.requests) == 1


async def test_client_that_joins_a_failing_run_gets_the_backend_status(tmp_path: Path) -> None:
    fail = asyncio.Event()
    async with (
        scripted_backend([Held(Refusal(404, "no such model"), fail)]) as backend,
        running_proxy(
            backend, "memory", tmp_path, status_wait_s=LONG_S, status_hold_s=LONG_S
        ) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as http,
    ):
        found: list[int] = []

        async def ask(stream: bool) -> None:
            body, headers = {**BODIES[CHAT], "stream": stream}, {"Idempotency-Key": "once"}
            found.append((await http.post(CHAT, json=body, headers=headers)).status_code)

        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                for stream in (False, True, True):
                    group.start_soon(ask, stream)
                await backend.arrived(1)
                fail.set()
    assert found == [404] * 3


async def test_request_whose_choices_are_refused_gets_the_status_of_the_first_choice(
    tmp_path: Path,
) -> None:
    async with (
        scripted_backend(lambda _: Refusal(404, "no such model")) as backend,
        running_proxy(backend, "memory", tmp_path, status_wait_s=LONG_S) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as http,
    ):
        with anyio.fail_after(20):
            answer = await http.post(CHAT, json={**BODIES[CHAT], "n": 2})
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, "no such model")


async def test_deadline_missed_before_the_status_is_sent_is_a_504(tmp_path: Path) -> None:
    async with (
        scripted_backend(lambda _: never_answered()) as backend,
        running_proxy(
            backend, "memory", tmp_path, status_wait_s=LONG_S, status_hold_s=LONG_S
        ) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as http,
    ):
        with anyio.fail_after(20):
            answer = await http.post(CHAT, json=BODIES[CHAT], headers={"X-Sandbox-Deadline": "0.1"})
    assert answer.status_code == 504
    assert "the client's deadline of 0.1 s" in answer.json()["error"]["message"]
