"""Real server processes that share a PostgreSQL database, one of which is killed."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import anyio
import httpx
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from openai.types.chat import ChatCompletion

from proxy.models.scripted import call, text_reply, tool_reply
from tests.e2e.proxy_process import serving
from tests.fakes.backend import Held, scripted_backend
from tests.postgresql import PostgresqlServer, new_database, server_for_tests

VARIABLE = "LLM_SANDBOX_STORE__DATABASE_URL"
TIMEOUT_S = 90
"""Beyond the lease of a process, after which the others know that it was killed."""


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresqlServer]:
    with server_for_tests() as found:
        yield found


async def test_client_of_a_killed_server_gets_its_answer_from_another_server(
    server: PostgresqlServer, tmp_path: Path
) -> None:
    new_database(server, tmp_path.name)
    variables = {VARIABLE: f"{server.url}?options=-csearch_path%3D{tmp_path.name}"}
    step = tool_reply(call("execute_bash", command="echo 42"))
    script = [step, Held(text_reply("Never said."), asyncio.Event()), step, text_reply("42")]
    errors: list[httpx.Response] = []

    async def note_error(response: httpx.Response) -> None:
        if response.is_error:
            await response.aread()
            errors.append(response)

    homes = [tmp_path / "one", tmp_path / "two"]
    for home in homes:
        home.mkdir()
    async with (
        scripted_backend(script) as backend,
        serving(homes[0], "bubblewrap", backend.base_url, **variables) as one,
        serving(homes[1], "bubblewrap", backend.base_url, **variables) as two,
    ):

        def ask(url: str, max_retries: int) -> "asyncio.Task[ChatCompletion]":
            async def answer() -> ChatCompletion:
                async with AsyncOpenAI(
                    base_url=f"{url}/v1",
                    api_key="any",
                    max_retries=max_retries,
                    http_client=DefaultAsyncHttpxClient(event_hooks={"response": [note_error]}),
                ) as client:
                    return await client.chat.completions.create(
                        model="fake-model",
                        messages=[{"role": "user", "content": "How many?"}],
                        extra_headers={"Idempotency-Key": "order-1"},
                    )

            return asyncio.create_task(answer())

        with anyio.fail_after(TIMEOUT_S):
            begun = ask(one.url, max_retries=0)
            await backend.arrived(2)
            joined = ask(two.url, max_retries=5)
            await backend.arrived(2)
            one.process.kill()
            await one.ended()
            await asyncio.wait([begun])
            completion = await joined
    assert begun.exception() is not None
    assert completion.choices[0].message.content == "42"
    (warning,) = completion.model_dump()["sandbox"]["warnings"]
    assert warning["code"] == "run_restarted"
    assert len(backend.requests) == 4
    assert [error.json()["error"]["code"] for error in errors] == ["run_lost"]
    assert [error.headers["retry-after"] for error in errors] == ["1"]
