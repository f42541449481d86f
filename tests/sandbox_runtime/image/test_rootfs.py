"""The manual's commands build a root file system on which Python computes."""

import os
import re
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml

from proxy.config import parse
from sandbox_runtime.backends.bubblewrap import BubblewrapBackend
from sandbox_runtime.sandbox import Sandbox
from tests.sandbox_runtime.conformance.backends import started
from tests.sandbox_runtime.image.containers import full_image
from tests.sandbox_runtime.transfer import output

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed")

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/start/install.md").read_text(encoding="utf-8")
PATIENCE_S = 1800
COMPUTE = """
import numpy, scipy.optimize, sympy
x = sympy.Symbol("x")
print(numpy.linalg.det(numpy.eye(3)), round(scipy.optimize.brentq(lambda x: x * x - 2, 0, 2), 6))
print(sympy.integrate(x**2, x))
"""


def commands(part: str) -> str:
    """Return the manual's commands that contain `part`."""
    blocks = re.findall(r"```sh\n([^`]*)```", PAGE)
    (found,) = [block for block in blocks if part in block and "rootfs.tar" in block]
    return str(found)


@asynccontextmanager
async def made(script: str, directory: Path) -> AsyncIterator[Sandbox]:
    """Run the script in a directory and start a sandbox as the manual configures it."""
    (block,) = re.findall(r"```yaml\n([^`]*rootfs:[^`]*)```", PAGE)
    here = script.replace(".venv/bin/sandbox-proxy", f"{sys.executable} -m proxy")
    rootfs = parse(yaml.safe_load(block), "install.md").sandbox.bubblewrap.rootfs
    assert rootfs
    try:
        with anyio.fail_after(PATIENCE_S):
            env = {**os.environ, "PYTHONPATH": str(ROOT)}
            await anyio.run_process(["sh", "-ec", here], cwd=directory, env=env)
        backend = BubblewrapBackend(rootfs=directory / rootfs, state_dir=directory)
        async with started(backend) as sandbox:
            yield sandbox
    finally:  # gigabytes, of which pytest would keep three
        shutil.rmtree(directory)


async def computed(sandbox: Sandbox) -> str:
    await output(sandbox, f"cat > compute.py <<'END'{COMPUTE}END")
    assert await output(sandbox, "pip --version; git --version") != ""
    return await output(sandbox, "python -W error compute.py")


@pytest.mark.docker
async def test_rootfs_is_exported_from_the_full_image(client: Any, tmp_path: Path) -> None:
    full_image(client)
    async with made(commands("docker export"), tmp_path) as sandbox:
        assert await computed(sandbox) == "1.0 1.414214\nx**3/3\n"


@pytest.mark.skipif("BUILD_ROOTFS" not in os.environ, reason="BUILD_ROOTFS=1: takes minutes")
async def test_rootfs_is_built_without_docker(tmp_path: Path) -> None:
    async with made(commands("build-rootfs"), tmp_path) as sandbox:
        assert await computed(sandbox) == "1.0 1.414214\nx**3/3\n"


async def test_missing_mmdebstrap_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "sh").symlink_to("/bin/sh")
    done = await anyio.run_process(
        [sys.executable, "-m", "proxy", "build-rootfs", str(tmp_path / "rootfs.tar")],
        cwd=ROOT,
        env={"PATH": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 1
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("mmdebstrap is missing")
    assert [path.name for path in tmp_path.iterdir()] == ["sh"]
