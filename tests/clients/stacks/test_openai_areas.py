"""The Python openai SDK, sync and async, in every area of its API that the proxy serves."""

from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from proxy.runs.manager import RunManager
from tests.clients.stacks.environments import HERE, python_of, variables
from tests.clients.stacks.prompt_scripted_model import PromptScriptedModel
from tests.clients.stacks.session import MODEL
from tests.fakes.backend import scripted_backend
from tests.fakes.server import EachKey, running_proxy, single_key

TESTS_DIR = HERE / "python" / "openai_areas"
OPTIONS = (
    "-qc/dev/null",
    f"--rootdir={TESTS_DIR}",
    "--noconftest",
    "-pno:cacheprovider",
    "--tb=short",
    "-psdk_fixtures",
    "-opython_files=*.py",
)
TIMEOUT_S = 600
KEY = "sk-locked"
LONG_WAITS: dict[str, Any] = {"make_runs": partial(RunManager, grace_s=3600), "status_wait_s": 30.0}
"""Grace period and status wait that outlast any test, however slow the machine is."""


@pytest.mark.parametrize("major", ["openai-2", "openai-3"])
async def test_tests_of_each_api_area_pass_with_each_major_version_of_the_openai_sdk(
    major: str, tmp_path: Path
) -> None:
    model = PromptScriptedModel()
    command = [str(python_of(major)), "-m", "pytest", *OPTIONS, str(TESTS_DIR)]
    async with (
        scripted_backend(model.answer, model=MODEL, elsewhere=model.elsewhere) as backend,
        running_proxy(
            backend, "bubblewrap", tmp_path / "open", keyring=EachKey(), **LONG_WAITS
        ) as url,
        running_proxy(backend, "memory", tmp_path / "locked", keyring=single_key(KEY)) as locked,
    ):
        environment = {
            **variables(tmp_path),
            "PYTHONPATH": str(TESTS_DIR),
            "BASE_URL": f"{url}/v1",
            "LOCKED_URL": f"{locked}/v1",
            "LOCKED_KEY": KEY,
            "MODEL_URL": backend.base_url.removesuffix("/v1"),
            "MODEL": MODEL,
        }
        with anyio.fail_after(TIMEOUT_S):
            done = await anyio.run_process(command, check=False, env=environment)
    output = done.stdout.decode() + done.stderr.decode()
    assert done.returncode == 0, output
    assert "skipped" not in output
