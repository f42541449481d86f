"""The openai SDK in Python, sync and async, in every area of what it can ask the house for."""

from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from proxy.runs.manager import RunManager
from tests.clients.stacks.dictated import DictatedModel
from tests.clients.stacks.environments import HERE, python_of, variables
from tests.clients.stacks.session import MODEL
from tests.fakes.backend import scripted_backend
from tests.fakes.server import EachKey, running_proxy, single_key

STORIES = HERE / "python" / "openai_areas"
OPTIONS = (
    "-qc/dev/null",
    f"--rootdir={STORIES}",
    "--noconftest",
    "-pno:cacheprovider",
    "--tb=short",
    "-pgiven",
    "-opython_files=*.py",
)
TIMEOUT_S = 600
KEY = "sk-of-the-house"
PATIENT: dict[str, Any] = {"make_runs": partial(RunManager, grace_s=3600), "status_wait_s": 30.0}
"""However slow the machine is, a client that asks again comes in time, and a backend's refusal
before the status is sent."""


@pytest.mark.parametrize("major", ["openai-2", "openai-3"])
async def test_every_story_of_the_sdk_comes_true(major: str, tmp_path: Path) -> None:
    model = DictatedModel()
    command = [str(python_of(major)), "-m", "pytest", *OPTIONS, str(STORIES)]
    async with (
        scripted_backend(model.answer, model=MODEL, elsewhere=model.elsewhere) as backend,
        running_proxy(
            backend, "bubblewrap", tmp_path / "open", keyring=EachKey(), **PATIENT
        ) as url,
        running_proxy(backend, "memory", tmp_path / "locked", keyring=single_key(KEY)) as locked,
    ):
        here = {
            **variables(tmp_path),
            "PYTHONPATH": str(STORIES),
            "BASE_URL": f"{url}/v1",
            "LOCKED_URL": f"{locked}/v1",
            "LOCKED_KEY": KEY,
            "MODEL_URL": backend.base_url.removesuffix("/v1"),
            "MODEL": MODEL,
        }
        with anyio.fail_after(TIMEOUT_S):
            done = await anyio.run_process(command, check=False, env=here)
    said = done.stdout.decode() + done.stderr.decode()
    assert done.returncode == 0, said
    assert "skipped" not in said
