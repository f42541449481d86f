"""Runs whose server was killed: reported as lost, and started again."""

import asyncio
from asyncio.subprocess import Process
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from proxy.models.scripted import text_reply
from tests.clients.chat_http import PATH, answer_text, http_client, post_chat
from tests.e2e.proxy_process import serving
from tests.fakes.backend import Held, scripted_backend

HEADERS = {"Idempotency-Key": "order-1", "X-Sandbox-On-Disconnect": "detach"}
BODY = {"model": "fake-model", "messages": [{"role": "user", "content": "How many?"}]}


async def test_run_of_a_killed_server_has_failed_and_its_retry_starts_a_new_run(
    tmp_path: Path,
) -> None:
    script = [Held(text_reply("Never said."), asyncio.Event()), text_reply("42")]
    async with scripted_backend(script) as backend:
        async with (
            serving(tmp_path, "bubblewrap", backend.base_url) as server,
            http_client(server.url) as http,
            http.stream("POST", PATH, json={**BODY, "stream": True}, headers=HEADERS) as begun,
        ):
            with anyio.fail_after(30):
                await backend.arrived(1)
                server.process.kill()
                await server.ended()
        path = f"/v1/runs/{begun.headers['x-sandbox-run']}"
        async with (
            serving(tmp_path, "bubblewrap", backend.base_url) as server,
            http_client(server.url) as http,
        ):
            with anyio.fail_after(30):
                found = (await http.get(path)).json()
                ended = await http.delete(path)
                again = await post_chat(http, HEADERS)
                kept = await http.get(f"/v1/runs/{again.headers['x-sandbox-run']}")
    assert (found["status"], found["error"]["code"]) == ("failed", "run_lost")
    assert ended.json() == found
    assert answer_text(again) == "42"
    assert kept.json()["completion"] == again.json()


@pytest.mark.parametrize("end", [Process.kill, Process.terminate])
async def test_answer_of_a_retry_says_that_the_first_run_was_lost(
    end: Callable[[Process], None], tmp_path: Path
) -> None:
    script = [Held(text_reply("Never said."), asyncio.Event()), *[text_reply("42")] * 2]
    async with scripted_backend(script) as backend:
        async with (
            serving(tmp_path, "bubblewrap", backend.base_url) as server,
            http_client(server.url) as http,
            http.stream("POST", PATH, json={**BODY, "stream": True}, headers=HEADERS) as begun,
        ):
            with anyio.fail_after(30):
                await backend.arrived(1)
                end(server.process)
                await server.ended()
        async with (
            serving(tmp_path, "bubblewrap", backend.base_url) as server,
            http_client(server.url) as http,
        ):
            with anyio.fail_after(30):
                again = await post_chat(http, HEADERS)
                replayed = await post_chat(http, HEADERS)
                other = await post_chat(http, {"Idempotency-Key": "order-2"})
    (warning,) = again.json()["sandbox"]["warnings"]
    assert warning["code"] == "run_restarted"
    assert begun.headers["x-sandbox-run"] in warning["message"]
    assert replayed.json() == again.json()
    assert "warnings" not in other.json()["sandbox"]
