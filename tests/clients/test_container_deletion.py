"""A container that is deleted is gone, whatever is under way in it."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import anyio
import pytest

from proxy.models.scripted import call, text_reply, tool_reply
from tests.clients.chat import Asking, answer, ask, client
from tests.fakes.backend import Held, scripted_backend
from tests.fakes.memory_sandbox import MemorySandboxes
from tests.fakes.server import make_services, model_client, serve

NAMED = {"X-Sandbox-Session": "mine"}
MAKE = tool_reply(call("execute_bash", command="echo one > file; echo one > output/shown"))
LOOK = tool_reply(call("execute_bash", command="ls; ls output"))


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("held", [0, 1])
@pytest.mark.parametrize("headers", [{}, {"X-Sandbox-On-Disconnect": "detach"}])
async def test_a_run_at_work_in_it_ends_with_it(
    headers: Mapping[str, str], held: int, before: bool, tmp_path: Path
) -> None:
    """Whether or not it was used before; at the run's first model call, and at its second."""
    never = asyncio.Event()
    first = [MAKE, text_reply("Done.")] if before else []
    ended = [MAKE, text_reply("Never said.")]
    ended[held] = Held(ended[held], never)
    script = [*first, *ended[: held + 1], LOOK, text_reply("Seen.")]
    async with scripted_backend(script) as backend:
        sandboxes, model = MemorySandboxes(), model_client(backend)
        services = make_services(model, sandboxes, tmp_path)
        with anyio.fail_after(20):
            async with serve(services) as url, client(url) as http:
                if before:
                    await ask(http, NAMED)
                async with anyio.create_task_group() as group:
                    asking = Asking(http, group)
                    asking.begin({**NAMED, **headers})
                    await backend.arrived(len(first) + held + 1)
                    listed = (await http.get("/v1/containers")).json()["data"]
                    (path,) = [f"/v1/containers/{each['id']}" for each in listed]
                    assert (await http.delete(path)).json()["deleted"] is True
                assert (await http.get(path)).status_code == 404
                assert answer(await ask(http, NAMED)) == "Seen."
        await model.aclose()
    assert asking.responses[0].json()["error"]["code"] == "run_cancelled"
    told = backend.requests[-1].body["messages"][-1]["content"]
    assert told.partition("[stdout]\n")[2] == "documents\noutput"
    assert sandboxes.opened == sandboxes.closed


async def test_runs_in_others_go_on(tmp_path: Path) -> None:
    release = asyncio.Event()
    script = [MAKE, text_reply("Done."), Held(text_reply("42"), release)]
    async with scripted_backend(script) as backend:
        model = model_client(backend)
        with anyio.fail_after(20):
            async with (
                serve(make_services(model, MemorySandboxes(), tmp_path)) as url,
                client(url) as http,
                anyio.create_task_group() as group,
            ):
                container = (await ask(http, NAMED)).headers["x-sandbox-container"]
                asking = Asking(http, group)
                asking.begin({"X-Sandbox-Session": "another"})
                await backend.arrived(3)
                await http.delete(f"/v1/containers/{container}")
                release.set()
        await model.aclose()
    assert answer(asking.responses[0]) == "42"
