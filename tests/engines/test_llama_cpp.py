"""Features of the llama.cpp server: its own request fields, and the time of loading its model."""

import json
from typing import Any

import anyio
import pytest

from bench.servers import free_port
from tests.engines.conftest import Served
from tests.engines.measured_requests import (
    ANSWERED,
    PATIENCE_S,
    SHORT,
    UNREACHABLE,
    ask,
    outcome,
    post,
    request,
)
from tests.engines.prompts import CITY, book
from tests.engines.servers import model_server, proxy

pytestmark = pytest.mark.engine
WINDOW = 2048
LOADING = (503, "503")


async def test_json_schema_field_is_enforced(served: Served) -> None:
    body = request("What is the capital of France?", max_tokens=100, json_schema=CITY)
    answer = await ask(served.url, served.server, body)
    assert answer.status == 200, answer.body
    assert list(json.loads(answer.text)) == ["city"]


async def test_context_error_contains_the_token_counts(served: Served) -> None:
    body = request("Hello.")
    body["messages"].insert(0, {"role": "system", "content": book(400)})
    response = await post(served.url, body)
    error = response.json()["error"]
    assert error["n_ctx"] == WINDOW < error["n_prompt_tokens"]


async def test_proxy_waits_for_a_loading_server_or_reports_it() -> None:
    port = free_port()
    backend, seen = f"http://127.0.0.1:{port}", []
    async with (
        proxy(backend, backend={"max_retries": 0}) as once,
        proxy(backend, backend={"max_retries": 9}) as again,
        anyio.create_task_group() as tasks,
    ):

        async def ask_until_it_answers() -> None:
            while not seen or seen[-1] != ANSWERED:
                seen.append(outcome(await post(f"http://127.0.0.1:{once.port}", SHORT)))
            answered_at_last.set()

        async def ask_once() -> None:
            waited.append(outcome(await post(f"http://127.0.0.1:{again.port}", SHORT)))
            answered.set()

        waited: list[tuple[int, Any]] = []
        answered, answered_at_last = anyio.Event(), anyio.Event()
        with anyio.fail_after(PATIENCE_S):
            tasks.start_soon(ask_until_it_answers)
            tasks.start_soon(ask_once)
            async with model_server(port=port):
                await answered.wait()
                await answered_at_last.wait()
    assert waited == [ANSWERED]
    assert set(seen) <= {UNREACHABLE, LOADING, ANSWERED}
