"""The standard chat model suite of langchain-tests, run against the proxy."""

from pathlib import Path

import anyio

from tests.clients.stacks.compliant_model import reply_to
from tests.clients.stacks.environments import HERE, python_of, variables
from tests.fakes.backend import scripted_backend
from tests.fakes.server import running_proxy

# The clients keep their connections, so all tests share one event loop.
OPTIONS = (
    "-qc/dev/null",
    f"--rootdir={HERE / 'python'}",
    "--noconftest",
    "-pno:cacheprovider",
    "-oasyncio_mode=auto",
    "-oasyncio_default_test_loop_scope=session",
    "-oasyncio_default_fixture_loop_scope=session",
)
TIMEOUT_S = 600


async def test_langchain_standard_suite_passes(tmp_path: Path) -> None:
    suite = HERE / "python" / "langchain_standard.py"
    command = [str(python_of("langchain")), "-m", "pytest", *OPTIONS, str(suite)]
    async with (
        scripted_backend(reply_to) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
    ):
        environment = {**variables(tmp_path), "BASE_URL": f"{url}/v1"}
        with anyio.fail_after(TIMEOUT_S):
            done = await anyio.run_process(command, check=False, env=environment)
    output = done.stdout.decode()
    assert done.returncode == 0, output
    # Skipped: images, audio and documents, which need the internet; VCR; Anthropic features.
    assert "43 passed, 7 skipped" in output
