"""The package llm-sandbox: `python -m bench.peers.llm_sandbox IMAGE docker|pool|bubblewrap`.

Its pool reuses containers, with everything that the previous user left in them.
"""

import atexit
import importlib
import sys
from pathlib import Path
from typing import Any

from bench.peers.driver import serve

NO_SETUP = {"skip_environment_setup": True}
"""The option that keeps llm-sandbox from first installing Python packages from the network."""


class LlmSandbox:
    """A sandbox of llm-sandbox; see `driver.PeerSandbox`."""

    def __init__(self, image: str, kind: str) -> None:
        package = importlib.import_module("llm_sandbox")
        quick: dict[str, Any] = {"lang": "python", **({} if kind == "pool" else NO_SETUP)}
        if kind == "bubblewrap":
            # Its seccomp filter needs a library that may be missing. The namespaces are the same.
            config = importlib.import_module("llm_sandbox.local.config").LocalSandboxConfig
            quick |= {"backend": "bubblewrap", "sandbox_config": config(seccomp=None)}
        elif kind == "pool":
            quick |= {"pool": _pool(image)}
        else:
            quick |= {"backend": "docker", **_container_options(image)}
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


def _container_options(image: str) -> dict[str, Any]:
    """Return container options with a command, because this project's image has no command."""
    return {"image": image, "runtime_configs": {"command": ["sleep", "infinity"]}}


def _pool(image: str) -> Any:
    package = importlib.import_module("llm_sandbox.pool")
    pool = package.create_pool_manager(
        backend="docker",
        config=package.PoolConfig(min_pool_size=1, max_pool_size=1),
        lang="python",
        **NO_SETUP,
        **_container_options(image),
    )
    atexit.register(pool.close)
    return pool


if __name__ == "__main__":
    serve(LlmSandbox(*sys.argv[1:]))
