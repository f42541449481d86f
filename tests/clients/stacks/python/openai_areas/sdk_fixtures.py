"""Fixtures: the SDK client, once sync and once async."""

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from blocking import Blocking

MAJOR = int(openai.__version__.partition(".")[0])
SINCE = {"tool_runner.py": 3}
"""First major version of the SDK that supports the tests of a module."""
OPTIONS: Any = {"base_url": os.environ["BASE_URL"], "timeout": 60, "max_retries": 0}

Connect = Callable[..., Any]
"""Create a client with its own key; options are the SDK's, `on_request` is called per request."""


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return SINCE.get(collection_path.name, 0) > MAJOR or None


@pytest.fixture(scope="session")
def portal() -> Iterator[BlockingPortal]:
    with start_blocking_portal() as found:
        yield found


@pytest.fixture(scope="session", params=["sync", "async"])
def shared_client(request: pytest.FixtureRequest, portal: BlockingPortal) -> Iterator[Any]:
    """The client whose connections the other clients share."""
    if request.param == "sync":
        made: Any = openai.OpenAI(api_key="sk-first", **OPTIONS)
    else:
        made = Blocking(portal, openai.AsyncOpenAI(api_key="sk-first", **OPTIONS))
    yield made
    made.close()


@pytest.fixture
def connect(shared_client: Any) -> Iterator[Connect]:
    own = []

    def make(on_request: Callable[[Any], None] | None = None, **options: Any) -> Any:
        given = {"api_key": f"sk-{uuid.uuid4().hex}", **options}
        if on_request is None:
            return shared_client.with_options(**given)
        made = shared_client.with_options(
            http_client=_http_client_with_hook(shared_client, on_request), **given
        )
        own.append(made)
        return made

    yield make
    for made in own:
        made.close()


@pytest.fixture
def client(connect: Connect) -> Any:
    return connect()


def _http_client_with_hook(client: Any, on_request: Callable[[Any], None]) -> Any:
    """Return an HTTP client that calls `on_request` before each request is sent."""

    async def hear(sent: Any) -> None:
        on_request(sent)

    if isinstance(client, Blocking):
        return openai.DefaultAsyncHttpxClient(event_hooks={"request": [hear]})
    return openai.DefaultHttpxClient(event_hooks={"request": [on_request]})
