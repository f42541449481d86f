"""The reference implementation in an environment installed from its lock file.

If the environment cannot be installed, the test is skipped, or fails if REQUIRE_STACKS is set.
"""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.clients.locked_packages import MissingError, make_virtualenv
from tests.clients.stacks.environments import KEPT, absent, variables

HERE = Path(__file__).parent
RUN_TIMEOUT_S = 300


def python() -> Path:
    """Return the interpreter of the reference's environment."""
    try:
        return make_virtualenv(KEPT / "python-reference", HERE / "reference.txt")
    except MissingError as error:
        absent(str(error), "REQUIRE_STACKS")


def run_reference(python: Path, job: Mapping[str, Any], home: Path) -> dict[str, Any]:
    """Run the reference on a job and return its constant prompt and tools."""
    engine = {name: os.environ[name] for name in ("DOCKER_HOST",) if name in os.environ}
    done = subprocess.run(
        [python, HERE / "run_reference.py"],
        input=json.dumps(job).encode(),
        capture_output=True,
        timeout=RUN_TIMEOUT_S,
        cwd=home,
        env={**variables(home), **engine, "OPENAI_API_KEY": "none"},
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    output: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return output
