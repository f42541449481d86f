"""The package llm-sandbox: `python -m bench.peers.llm_sandbox IMAGE docker|pool|bubblewrap`.

Its pool lends the same container again and again, whatever the last user has left in it.
"""

import atexit
import importlib
import sys
from pathlib import Path
from typing import Any

from bench.peers.driver import serve

BARE = {"skip_environment_setup": True}
"""Else it installs Python packages from the network first."""


class LlmSandbox:
    """See `driver.Sandbox`."""

    def __init__(self, image: str, kind: str) -> None:
        package = importlib.import_module("llm_sandbox")
        quick: dict[str, Any] = {"lang": "python", **({} if kind == "pool" else BARE)}
        if kind == "bubblewrap":
            # Its seccomp filter wants a library that may not be here; the namespaces are the same.
            config = importlib.import_module("llm_sandbox.local.config").LocalSandboxConfig
            quick |= {"backend": "bubblewrap", "sandbox_config": config(seccomp=None)}
        elif kind == "pool":
            quick |= {"pool": _pool(image)}
        else:
            quick |= {"backend": "docker", **_container(image)}
        self._make: Any = lambda: package.SandboxSession(**quick)
        self._directory = "/sandbox" if kind == "bubblewrap" else "/tmp"
        self._session: Any = None

    def start(self) -> None:
        self._session = self._make()
        self._session.open()

    def exec(self, command: str) -> str:
        done = self._session.execute_command(command)
        if done.exit_code:
            raise RuntimeError(f"exit {done.exit_code}: {done.stdout} {done.stderr}")
        return str(done.stdout)

    def put(self, source: str, path: str) -> None:
        self._session.copy_to_runtime(source, f"{self._directory}/{Path(path).name}")

    def get(self, path: str, target: str) -> None:
        name = Path(path).name
        self._session.copy_from_runtime(f"{self._directory}/{name}", f"{target}/{name}")

    def stop(self) -> None:
        self._session.close()


def _container(image: str) -> dict[str, Any]:
    """It runs the image's own command; ours has none."""
    return {"image": image, "runtime_configs": {"command": ["sleep", "infinity"]}}


def _pool(image: str) -> Any:
    package = importlib.import_module("llm_sandbox.pool")
    pool = package.create_pool_manager(
        backend="docker",
        config=package.PoolConfig(min_pool_size=1, max_pool_size=1),
        lang="python",
        **BARE,
        **_container(image),
    )
    atexit.register(pool.close)
    return pool


if __name__ == "__main__":
    serve(LlmSandbox(*sys.argv[1:]))
