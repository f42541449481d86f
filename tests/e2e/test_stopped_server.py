"""What is told of a run whose server is stopped in good order."""

import asyncio
from pathlib import Path

import anyio
import httpx

from proxy.models.scripted import text_reply
from tests.clients.chat import PATH, client
from tests.e2e.proxy_process import serving
from tests.fakes.backend import Held, scripted_backend

ASKED = {"model": "fake-model", "messages": [{"role": "user", "content": "How many?"}]}
DETACH = {"X-Sandbox-On-Disconnect": "detach"}


async def test_who_listens_when_the_server_stops_is_told_in_the_shape_of_its_answer(
    tmp_path: Path,
) -> None:
    held = Held(text_reply("Never said."), asyncio.Event())
    told: dict[bool, httpx.Response] = {}
    async with scripted_backend([held, held, held]) as backend:
        async with (
            serving(tmp_path, "bubblewrap", backend.base_url) as server,
            client(server.url) as http,
            anyio.create_task_group() as group,
        ):

            async def ask(stream: bool) -> None:
                told[stream] = await http.post(PATH, json={**ASKED, "stream": stream})

            group.start_soon(ask, False)
            group.start_soon(ask, True)
            body = {**ASKED, "stream": True}
            async with http.stream("POST", PATH, json=body, headers=DETACH) as left:
                run = left.headers["x-sandbox-run"]
            with anyio.fail_after(60):
                await backend.arrived(3)
                server.process.terminate()
                await server.ended()
        async with (
            serving(tmp_path, "bubblewrap", backend.base_url) as server,
            client(server.url) as http,
        ):
            found = (await http.get(f"/v1/runs/{run}")).json()
    error = told[False].json()["error"]
    assert (told[False].status_code, error["code"]) == (503, "run_lost")
    assert '"code": "run_lost"' in told[True].text
    assert told[True].text.endswith("data: [DONE]\n\n")
    assert (found["status"], found["error"]["code"]) == ("failed", "run_lost")
