"""Model servers that are killed, busy, or too small for a request, and clients that disconnect."""

import os
import signal

import anyio
import pytest

from bench.servers import free_port
from tests.engines.engine import MODEL
from tests.engines.measured_requests import (
    ANSWERED,
    PATIENCE_S,
    SHORT,
    UNREACHABLE,
    outcome,
    post,
    request,
)
from tests.engines.prompts import PROMPTS
from tests.engines.servers import ENGINE, model_server, proxy

pytestmark = pytest.mark.engine
ENDLESS = request("Count.", max_tokens=1500, ignore_eos=True)
LONG = request("alpha beta " * 1100, max_tokens=10)
LONG_TOKENS = 2200


async def test_requests_fail_while_the_model_server_is_killed_and_succeed_after_its_restart() -> (
    None
):
    port, seen = free_port(), []
    async with proxy(f"http://127.0.0.1:{port}", backend={"max_retries": 1}) as proxy_server:
        url = f"http://127.0.0.1:{proxy_server.port}"

        async def ask() -> None:
            seen.append(outcome(await post(url, ENDLESS)))

        with anyio.fail_after(PATIENCE_S):
            async with model_server(port=port) as server, anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                await server.working()
                os.kill(server.process.pid, signal.SIGKILL)
            seen.append(outcome(await post(url, SHORT)))
            async with model_server(port=port):
                seen.append(outcome(await post(url, SHORT)))
    assert seen == [UNREACHABLE, UNREACHABLE, ANSWERED]


async def test_disconnect_frees_the_model_server() -> None:
    async with model_server() as server, proxy(server.url) as proxy_server:
        with anyio.fail_after(PATIENCE_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(post, f"http://127.0.0.1:{proxy_server.port}", ENDLESS)
                await server.working()
                tasks.cancel_scope.cancel()
            assert (await server.token_counts()).completion < ENDLESS["max_tokens"]


async def test_eight_concurrent_requests_are_answered_by_four_slots() -> None:
    answers: dict[str, str] = {}
    async with model_server() as server, proxy(server.url) as proxy_server:

        async def ask(prompt: str) -> None:
            body = request(prompt, max_tokens=30)
            response = await post(f"http://127.0.0.1:{proxy_server.port}", body)
            assert response.status_code == 200, response.text
            answers[prompt] = response.json()["choices"][0]["message"]["content"]

        with anyio.fail_after(PATIENCE_S):
            async with anyio.create_task_group() as tasks:
                for prompt in PROMPTS[:8]:
                    tasks.start_soon(ask, prompt)
    assert set(answers) == set(PROMPTS[:8])
    assert all(answers.values())


@pytest.mark.parametrize("window", [2048, 8192])
async def test_message_longer_than_the_context_window_is_refused_or_moved_to_a_file(
    window: int,
) -> None:
    async with model_server(window=window, slots=1) as server, proxy(server.url) as proxy_server:
        url = f"http://127.0.0.1:{proxy_server.port}"
        short = outcome(await post(url, SHORT))
        plain = await post(url, {**LONG, "model": f"{MODEL}:plain"})
        long = await post(url, LONG)
    assert short == ANSWERED
    if window < LONG_TOKENS:
        assert (plain.status_code, ENGINE.window_in(plain.json()["error"])) == (400, window)
        assert long.status_code == 200 or ENGINE.window_in(long.json()["error"]) == window
    else:
        assert (plain.status_code, long.status_code) == (200, 200)
