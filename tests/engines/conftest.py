"""Fixtures for tests with a real model server: the server, with and without tools in its template,
and a proxy.
"""

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from tests.engines.engine import Tools
from tests.engines.installation import NotInstalledError
from tests.engines.llama_cpp import LLAMA_CPP
from tests.engines.servers import ENGINE, ModelServer, model_server, proxy, tools_always
from tests.engines.vllm import VLLM

OF_ONE_ENGINE = {"test_llama_cpp.py": LLAMA_CPP, "test_vllm.py": VLLM}
collect_ignore = [name for name, engine in OF_ONE_ENGINE.items() if engine is not ENGINE]


@dataclass(frozen=True, slots=True)
class Served:
    """A model server, and the URL of the proxy in front of it."""

    server: ModelServer
    url: str


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """One event loop for the session, so that servers can be shared by tests."""
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def _model_server_is_installed() -> None:
    try:
        ENGINE.find()
    except NotInstalledError as error:
        if os.environ.get("REQUIRE_ENGINE"):
            pytest.fail(str(error))
        pytest.skip(str(error))


# vLLM needs half a minute to start, the llama.cpp server less than a second.
@pytest.fixture(
    scope="session" if ENGINE is VLLM else "module",
    params=[ENGINE.without_tools, ENGINE.with_tools],
    ids=lambda tools: tools.name,
)
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    """A server with a window of 2,048 tokens, behind a proxy that always offers its tools."""
    tools: Tools = request.param
    async with (
        model_server(tools=tools) as server,
        proxy(server.url, **tools_always()) as ours,
    ):
        yield Served(server, f"http://127.0.0.1:{ours.port}")
