"""Stored responses and conversations after a server process was killed."""

import asyncio
import signal
from pathlib import Path

import anyio
import openai

from proxy.models.scripted import text_reply
from tests.clients.responses_sdk import MODEL, bash, tool_results
from tests.e2e.proxy_process import Server, serving
from tests.fakes.backend import Held, scripted_backend


def sdk_client(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="mine", max_retries=0)


async def test_stored_responses_survive_a_server_kill_and_unfinished_responses_become_failed(
    tmp_path: Path,
) -> None:
    script = [
        *(bash("echo one > file"), text_reply("Done.")),
        Held(text_reply("Never said."), asyncio.Event()),
        *(bash("cat file"), text_reply("One.")),
    ]
    async with scripted_backend(script) as backend:
        with anyio.fail_after(60):
            async with (
                serving(tmp_path, "bubblewrap", backend.base_url) as server,
                sdk_client(server) as mine,
            ):
                first = await mine.responses.create(model=MODEL, input="Begin.")
                made = await mine.responses.create(
                    model=MODEL, input="Go on.", previous_response_id=first.id, background=True
                )
                await backend.arrived(3)
                server.process.send_signal(signal.SIGKILL)
                await server.ended()
            async with (
                serving(tmp_path, "bubblewrap", backend.base_url) as server,
                sdk_client(server) as mine,
            ):
                assert (await mine.responses.retrieve(first.id)).output_text == "Done."
                assert (await mine.responses.retrieve(made.id)).status == "failed"
                again = await mine.responses.create(
                    model=MODEL, input="Go on.", previous_response_id=made.id
                )
    assert again.output_text == "One."
    assert "one" in tool_results(backend, 4)[0]
