"""What a story is given: the SDK's client, once the sync one and once the async one."""

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
"""Of stories about what not every major version has, the first that does."""
OPTIONS: Any = {"base_url": os.environ["BASE_URL"], "timeout": 60, "max_retries": 0}

Connect = Callable[..., Any]
"""Makes a client with a key of its own; options are the SDK's, and `on_request` hears of each."""


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return SINCE.get(collection_path.name, 0) > MAJOR or None


@pytest.fixture(scope="session")
def portal() -> Iterator[BlockingPortal]:
    with start_blocking_portal() as found:
        yield found


@pytest.fixture(scope="session", params=["sync", "async"])
def first(request: pytest.FixtureRequest, portal: BlockingPortal) -> Iterator[Any]:
    """The client whose connections the others share."""
    if request.param == "sync":
        made: Any = openai.OpenAI(api_key="sk-first", **OPTIONS)
    else:
        made = Blocking(portal, openai.AsyncOpenAI(api_key="sk-first", **OPTIONS))
    yield made
    made.close()


@pytest.fixture
def connect(first: Any) -> Iterator[Connect]:
    own = []

    def make(on_request: Callable[[Any], None] | None = None, **options: Any) -> Any:
        given = {"api_key": f"sk-{uuid.uuid4().hex}", **options}
        if on_request is None:
            return first.with_options(**given)
        made = first.with_options(http_client=_heard(first, on_request), **given)
        own.append(made)
        return made

    yield make
    for made in own:
        made.close()


@pytest.fixture
def client(connect: Connect) -> Any:
    return connect()


def _heard(client: Any, on_request: Callable[[Any], None]) -> Any:
    """Connections of its own, which tell of each request before it is sent."""

    async def hear(sent: Any) -> None:
        on_request(sent)

    if isinstance(client, Blocking):
        return openai.DefaultAsyncHttpxClient(event_hooks={"request": [hear]})
    return openai.DefaultHttpxClient(event_hooks={"request": [on_request]})
