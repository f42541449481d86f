"""Run each client program once per session, two at a time."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import pytest

from tests.clients.stacks.environments import command_of
from tests.clients.stacks.session import Seen, run_client
from tests.clients.stacks.stacks import STACKS, Stack

MAX_CONCURRENT = 2


@pytest.fixture(scope="session")
def seen_by(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Stack], Seen]]:
    """Return a function from a stack to what its client program reported."""
    names = [item.name for item in request.session.items]
    with ThreadPoolExecutor(MAX_CONCURRENT) as executor:
        running = {
            str(stack): executor.submit(_run_client, stack, tmp_path_factory.mktemp(str(stack)))
            for stack in STACKS
            if any(f"{stack}-" in name for name in names)
        }
        try:
            yield lambda stack: running[str(stack)].result()
        finally:
            executor.shutdown(cancel_futures=True)


def _run_client(stack: Stack, folder: Path) -> Seen:
    return anyio.run(run_client, command_of(stack), folder)
