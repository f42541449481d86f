"""What is told, and what is done again, of a run whose server was killed."""

import asyncio
from pathlib import Path

import anyio

from proxy.models.scripted import text_reply
from tests.clients.chat import PATH, answer, ask, client
from tests.e2e.proxy_process import serving
from tests.fakes.backend import Held, scripted_backend

HEADERS = {"Idempotency-Key": "order-1", "X-Sandbox-On-Disconnect": "detach"}
ASKED = {"model": "fake-model", "messages": [{"role": "user", "content": "How many?"}]}


async def test_a_run_that_died_with_its_server_says_so_and_is_begun_anew(tmp_path: Path) -> None:
    script = [Held(text_reply("Never said."), asyncio.Event()), text_reply("42")]
    async with scripted_backend(script) as backend:
        async with (
            serving(tmp_path, "bubblewrap", backend.base_url) as server,
            client(server.url) as http,
            http.stream("POST", PATH, json={**ASKED, "stream": True}, headers=HEADERS) as begun,
        ):
            with anyio.fail_after(30):
                await backend.arrived(1)
                server.process.kill()
                await server.ended()
        path = f"/v1/runs/{begun.headers['x-sandbox-run']}"
        async with (
            serving(tmp_path, "bubblewrap", backend.base_url) as server,
            client(server.url) as http,
        ):
            with anyio.fail_after(30):
                found = (await http.get(path)).json()
                ended = await http.delete(path)
                again = await ask(http, HEADERS)
                kept = await http.get(f"/v1/runs/{again.headers['x-sandbox-run']}")
    assert (found["status"], found["error"]["code"]) == ("failed", "run_lost")
    assert ended.json() == found
    assert answer(again) == "42"
    assert kept.json()["completion"] == again.json()
