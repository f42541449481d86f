"""Requests in progress when the server shuts down."""

import asyncio
from pathlib import Path

import anyio
import httpx
import pytest
from aiohttp import web

from proxy.models.scripted import text_reply
from tests.clients.chat_http import PATH, http_client
from tests.e2e.proxy_process import serving
from tests.fakes.backend import Held, scripted_backend

BODY = {"model": "fake-model", "messages": [{"role": "user", "content": "How many?"}]}
PLAIN = {**BODY, "model": "fake-model:plain"}
DETACH = {"X-Sandbox-On-Disconnect": "detach"}


async def test_clients_of_a_run_get_the_error_run_lost_as_a_503_or_as_a_stream_event(
    tmp_path: Path,
) -> None:
    held = Held(text_reply("Never said."), asyncio.Event())
    responses: dict[bool, httpx.Response] = {}
    async with scripted_backend([held, held, held]) as backend:
        async with (
            serving(tmp_path, "bubblewrap", backend.base_url) as server,
            http_client(server.url) as http,
            anyio.create_task_group() as group,
        ):

            async def ask(stream: bool) -> None:
                responses[stream] = await http.post(PATH, json={**BODY, "stream": stream})

            group.start_soon(ask, False)
            group.start_soon(ask, True)
            body = {**BODY, "stream": True}
            async with http.stream("POST", PATH, json=body, headers=DETACH) as left:
                run = left.headers["x-sandbox-run"]
            with anyio.fail_after(60):
                await backend.arrived(3)
                server.process.terminate()
                await server.ended()
        async with (
            serving(tmp_path, "bubblewrap", backend.base_url) as server,
            http_client(server.url) as http,
        ):
            found = (await http.get(f"/v1/runs/{run}")).json()
    error = responses[False].json()["error"]
    assert (responses[False].status_code, error["code"]) == (503, "run_lost")
    assert responses[False].headers["retry-after"] == "5"
    assert '"code": "run_lost"' in responses[True].text
    assert responses[True].text.endswith("data: [DONE]\n\n")
    assert (found["status"], found["error"]["code"]) == ("failed", "run_lost")


async def test_clients_that_wait_for_the_backend_get_a_503_with_retry_after(
    tmp_path: Path,
) -> None:
    held = Held(text_reply("Never said."), asyncio.Event())
    responses: dict[str, httpx.Response] = {}
    arrivals = asyncio.Semaphore(0)

    async def never(request: web.Request) -> web.Response:
        arrivals.release()
        await asyncio.Event().wait()
        raise AssertionError

    async with (
        scripted_backend([held, held], elsewhere=never) as backend,
        serving(tmp_path, "bubblewrap", backend.base_url) as server,
        http_client(server.url) as http,
        anyio.create_task_group() as group,
    ):

        async def ask(name: str, path: str, body: dict[str, object]) -> None:
            responses[name] = await http.post(path, json=body)

        group.start_soon(ask, "whole", PATH, PLAIN)
        group.start_soon(ask, "stream", PATH, {**PLAIN, "stream": True})
        group.start_soon(ask, "responses", "/v1/responses", PLAIN)
        group.start_soon(ask, "messages", "/v1/messages", PLAIN)
        group.start_soon(ask, "passed on", "/v1/embeddings", {"input": "Hello."})
        with anyio.fail_after(60):
            await backend.arrived(2)
            for _ in range(3):
                await arrivals.acquire()
            server.process.terminate()
            await server.ended()
    for response in responses.values():
        assert (response.status_code, response.headers["retry-after"]) == (503, "5")
    assert responses.pop("messages").json()["error"]["type"] == "overloaded_error"
    codes = {name: response.json()["error"]["code"] for name, response in responses.items()}
    assert codes == dict.fromkeys(["whole", "stream", "responses", "passed on"], "server_stopped")


async def test_relayed_stream_is_truncated_when_the_server_stops(tmp_path: Path) -> None:
    held = Held(text_reply("Said, and not said."), asyncio.Event(), after_pieces=1)
    async with (
        scripted_backend([held]) as backend,
        serving(tmp_path, "bubblewrap", backend.base_url) as server,
        http_client(server.url) as http,
    ):
        async with http.stream("POST", PATH, json={**PLAIN, "stream": True}) as response:
            pieces = response.aiter_bytes()
            with anyio.fail_after(60):
                assert (await anext(pieces)).startswith(b"data: {")
                server.process.terminate()
                with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
                    await anext(pieces)
        with anyio.fail_after(60):
            await server.ended()
            await backend.requests[0].gone.wait()
