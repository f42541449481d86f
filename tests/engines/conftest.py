"""What the tests with a real model server share: the server, with and without a template that
tells the model of its tools, and the proxy in front of each."""

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engines.installing import NotInstalledError, found
from tests.engines.servers import WITH_TOOLS, ModelServer, model_server, proxy, tools_always


@dataclass(frozen=True, slots=True)
class Served:
    """A model server, and the address of the proxy in front of it."""

    server: ModelServer
    url: str


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """One loop for all, so that servers serve more than one test."""
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def _model_server_is_installed() -> None:
    try:
        found()
    except NotInstalledError as error:
        if os.environ.get("REQUIRE_ENGINE"):
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=[None, WITH_TOOLS], ids=["own-template", "tools-template"])
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    """With 2,048 tokens for a request, offered our tools whether its template shows them or not."""
    template: Path | None = request.param
    async with (
        model_server(template=template) as server,
        proxy(server.url, **tools_always()) as ours,
    ):
        yield Served(server, f"http://127.0.0.1:{ours.port}")
