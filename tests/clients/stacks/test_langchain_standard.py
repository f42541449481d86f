"""langchain-tests' own suite of a chat model, before the house."""

from pathlib import Path

import anyio

from tests.clients.stacks.environments import HERE, python_of, variables
from tests.clients.stacks.obliging import oblige
from tests.fakes.backend import scripted_backend
from tests.fakes.server import running_proxy

# Its clients keep their connections, so there is one loop for all.
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


async def test_langchains_standard_suite_for_chat_models_passes(tmp_path: Path) -> None:
    suite = HERE / "python" / "langchain_standard.py"
    command = [str(python_of("langchain")), "-m", "pytest", *OPTIONS, str(suite)]
    async with (
        scripted_backend(oblige) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
    ):
        here = {**variables(tmp_path), "BASE_URL": f"{url}/v1"}
        with anyio.fail_after(TIMEOUT_S):
            done = await anyio.run_process(command, check=False, env=here)
    said = done.stdout.decode()
    assert done.returncode == 0, said
    # Left out: pictures, sound and documents, which it takes from the internet; VCR; Anthropic's.
    assert "43 passed, 7 skipped" in said
