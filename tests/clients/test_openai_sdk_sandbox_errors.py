"""Sandbox failures and internal errors, as exceptions of the openai SDK."""

import asyncio
from pathlib import Path
from typing import Any

import anyio
import openai
import pytest

from proxy.agent.tools import MAX_LOSSES
from proxy.models.scripted import call, tool_reply
from sandbox_runtime.errors import NoCapacityError, NoFreeSandboxError, SandboxStartError
from tests.clients.openai_errors import MESSAGES, failed_stream, openai_client, request_error
from tests.fakes.backend import Held, scripted_backend
from tests.fakes.memory_sandbox import MemorySandboxes
from tests.fakes.server import make_services, model_client, serve


async def test_sandbox_start_failure_is_a_503(tmp_path: Path) -> None:
    script = [tool_reply(call("execute_bash", command="true"))] * 2
    async with scripted_backend(script) as backend:
        model = model_client(backend)
        sandboxes = MemorySandboxes(SandboxStartError("no engine answers"))
        services = make_services(model, sandboxes, tmp_path)
        async with serve(services) as url, openai_client(url) as client:
            error = await request_error(client)
            body = {"model": "fake-model", "messages": MESSAGES}
            pieces, streamed = await failed_stream(client, body)
        await model.aclose()
    assert isinstance(error, openai.InternalServerError)
    assert (error.status_code, error.code) == (503, "sandbox_unavailable")
    assert error.response.headers["retry-after"] == "5"
    assert "x-should-retry" not in error.response.headers
    assert pieces == ["", "````console\n$ true\n", "[not finished]\n````\n"]
    assert (streamed.code, streamed.message) == ("sandbox_unavailable", "no engine answers")


async def test_repeatedly_lost_sandboxes_are_a_503(
    tmp_path: Path,
) -> None:
    losses = [asyncio.Event() for _ in range(MAX_LOSSES)]
    use = tool_reply(call("execute_bash", command="true"))
    replies = [use, *(reply for gate in losses for reply in (Held(use, gate), use))]
    async with scripted_backend(replies) as backend:
        model = model_client(backend)
        sandboxes = MemorySandboxes()
        async with (
            serve(make_services(model, sandboxes, tmp_path)) as url,
            openai_client(url) as client,
            anyio.create_task_group() as group,
        ):

            async def lose() -> None:
                for number, gate in enumerate(losses):
                    await backend.arrived(2 * number + 2)
                    await sandboxes.leased[-1].close()
                    gate.set()

            group.start_soon(lose)
            error = await request_error(client)
        await model.aclose()
    assert (error.status_code, error.code) == (503, "sandbox_unavailable")


@pytest.mark.parametrize("kind", [NoFreeSandboxError, NoCapacityError])
async def test_full_pool_or_cluster_is_a_503_with_retry_after(
    kind: type[NoFreeSandboxError | NoCapacityError], tmp_path: Path
) -> None:
    full = kind("all sandboxes are lent", retry_after_s=12.2)
    use = tool_reply(call("execute_bash", command="true"))
    async with scripted_backend([use]) as backend:
        model = model_client(backend)
        async with (
            serve(make_services(model, MemorySandboxes(failure=full), tmp_path)) as url,
            openai_client(url) as client,
        ):
            error = await request_error(client)
        await model.aclose()
    assert (error.status_code, error.code) == (503, "sandbox_unavailable")
    assert error.response.headers["retry-after"] == "13"
    assert "x-should-retry" not in error.response.headers


@pytest.mark.parametrize("stream", [False, True])
async def test_internal_error_is_a_500_without_details(
    stream: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steps = tool_reply(call("execute_bash", command="true"))
    async with scripted_backend([steps]) as backend:
        model = model_client(backend)
        broken: Any = object()  # an object without the sandbox interface
        services = make_services(model, broken, tmp_path)
        async with serve(services) as url, openai_client(url) as client:
            if stream:
                _, error = await failed_stream(
                    client, {"model": "fake-model", "messages": MESSAGES}
                )
            else:
                error = await request_error(client)
        await model.aclose()
    assert (error.code, error.type) == ("internal_error", "server_error")
    assert error.body == {
        "message": "The proxy failed.",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }
    assert "'object' object has no attribute 'lease'" in caplog.text
