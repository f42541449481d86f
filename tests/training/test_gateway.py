"""rLLM's gateway, between the proxy and a backend, records the calls of each rollout."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from bench.servers import free_port, run_server
from tests.clients.chat_http import answer_text, http_client, post_chat
from tests.clients.stacks.environments import python_of
from tests.clients.test_trajectory_export import ALLOWED, ANSWER, STEP
from tests.fakes.backend import ScriptedBackend, by_history, scripted_backend
from tests.fakes.server import running_proxy
from tests.fakes.tokens import prompt_text, text_of_tokens

TIMEOUT_S = 60


@asynccontextmanager
async def rllm_gateway(backend: ScriptedBackend, directory: Path) -> AsyncIterator[str]:
    """Run the gateway and yield its URL."""
    python = await anyio.to_thread.run_sync(python_of, "rllm-gateway")
    port = free_port()
    command = [
        *(str(python), "-m", "rllm_model_gateway", "--host", "127.0.0.1", "--port", str(port)),
        *("--worker", backend.base_url, "--store", "memory"),
    ]
    async with run_server(command, port, path="/health", env={"HOME": str(directory)}):
        yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("capture", ["tokens", "none"])
async def test_rllm_gateway_records_the_model_calls_of_each_rollout(
    capture: str, tmp_path: Path
) -> None:
    async with (
        scripted_backend(by_history([STEP, ANSWER]), has_tokens=True) as backend,
        rllm_gateway(backend, tmp_path) as gateway,
        running_proxy(
            backend, "memory", tmp_path, profiles=ALLOWED, upstreams=(f"{gateway}/sessions",)
        ) as url,
        http_client(url) as http,
    ):
        with anyio.fail_after(TIMEOUT_S):
            for name in ("a", "b"):
                upstream = f"{gateway}/sessions/{name}/v1"
                sandbox = {"upstream": upstream, "capture": capture}
                answered = await post_chat(http, sandbox=sandbox)
                assert answer_text(answered) == "It is 42."
            traces = (await http.get(f"{gateway}/sessions/b/traces")).raise_for_status().json()
    calls = backend.requests[2:]
    assert [trace["messages"] for trace in traces] == [seen.body["messages"] for seen in calls]
    assert [trace["finish_reason"] for trace in traces] == ["tool_calls", "stop"]
    if capture == "tokens":  # the scripted backend streams no token ids
        for trace, seen in zip(traces, calls, strict=True):
            assert text_of_tokens(trace["prompt_token_ids"]) == prompt_text(seen.body)
        assert "It is 42." in text_of_tokens(traces[1]["completion_token_ids"])
