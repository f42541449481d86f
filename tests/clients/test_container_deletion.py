"""Deleting a container while runs work in it or in other containers."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import anyio
import pytest

from proxy.models.scripted import call, text_reply, tool_reply
from tests.clients.chat_http import ConcurrentRequests, answer_text, http_client, post_chat
from tests.fakes.backend import Held, scripted_backend
from tests.fakes.memory_sandbox import MemorySandboxes
from tests.fakes.server import make_services, model_client, serve

NAMED = {"X-Sandbox-Session": "mine"}
MAKE = tool_reply(call("execute_bash", command="echo one > file; echo one > output/shown"))
LOOK = tool_reply(call("execute_bash", command="ls; ls output"))


@pytest.mark.parametrize("used_before", [True, False])
@pytest.mark.parametrize("held_call", [0, 1])
@pytest.mark.parametrize("headers", [{}, {"X-Sandbox-On-Disconnect": "detach"}])
async def test_deleting_a_container_cancels_its_run(
    headers: Mapping[str, str], held_call: int, used_before: bool, tmp_path: Path
) -> None:
    """Cover new and used containers, and runs at their first and second model call."""
    never = asyncio.Event()
    first = [MAKE, text_reply("Done.")] if used_before else []
    ended = [MAKE, text_reply("Never said.")]
    ended[held_call] = Held(ended[held_call], never)
    script = [*first, *ended[: held_call + 1], LOOK, text_reply("Seen.")]
    async with scripted_backend(script) as backend:
        sandboxes, model = MemorySandboxes(), model_client(backend)
        services = make_services(model, sandboxes, tmp_path)
        with anyio.fail_after(20):
            async with serve(services) as url, http_client(url) as http:
                if used_before:
                    await post_chat(http, NAMED)
                async with anyio.create_task_group() as group:
                    requests = ConcurrentRequests(http, group)
                    requests.begin({**NAMED, **headers})
                    await backend.arrived(len(first) + held_call + 1)
                    listed = (await http.get("/v1/containers")).json()["data"]
                    (path,) = [f"/v1/containers/{each['id']}" for each in listed]
                    assert (await http.delete(path)).json()["deleted"] is True
                assert (await http.get(path)).status_code == 404
                assert answer_text(await post_chat(http, NAMED)) == "Seen."
        await model.aclose()
    assert requests.responses[0].json()["error"]["code"] == "run_cancelled"
    observation = backend.requests[-1].body["messages"][-1]["content"]
    assert observation.partition("[stdout]\n")[2] == "documents\noutput"
    assert sandboxes.opened == sandboxes.closed


async def test_deleting_a_container_leaves_other_runs_alone(tmp_path: Path) -> None:
    release = asyncio.Event()
    script = [MAKE, text_reply("Done."), Held(text_reply("42"), release)]
    async with scripted_backend(script) as backend:
        model = model_client(backend)
        with anyio.fail_after(20):
            async with (
                serve(make_services(model, MemorySandboxes(), tmp_path)) as url,
                http_client(url) as http,
                anyio.create_task_group() as group,
            ):
                container = (await post_chat(http, NAMED)).headers["x-sandbox-container"]
                requests = ConcurrentRequests(http, group)
                requests.begin({"X-Sandbox-Session": "another"})
                await backend.arrived(3)
                await http.delete(f"/v1/containers/{container}")
                release.set()
        await model.aclose()
    assert answer_text(requests.responses[0]) == "42"
