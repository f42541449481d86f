"""The reference in an environment of its own, made from its lock and kept.

Where it cannot be had the test is skipped, or fails if told to.
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
    """Its interpreter."""
    try:
        return make_virtualenv(KEPT / "python-reference", HERE / "reference.txt")
    except MissingError as error:
        absent(str(error), "REQUIRE_STACKS")


def played(python: Path, job: Mapping[str, Any], home: Path) -> dict[str, Any]:
    """What it says of itself, having done a job."""
    engine = {name: os.environ[name] for name in ("DOCKER_HOST",) if name in os.environ}
    done = subprocess.run(
        [python, HERE / "play.py"],
        input=json.dumps(job).encode(),
        capture_output=True,
        timeout=RUN_TIMEOUT_S,
        cwd=home,
        env={**variables(home), **engine, "OPENAI_API_KEY": "none"},
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said
