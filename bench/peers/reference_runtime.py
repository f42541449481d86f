"""The reference package's sandbox without its agent: `python -m bench.peers.reference_runtime
IMAGE`.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

from bench.peers.driver import serve


class ReferenceSandbox:
    """A sandbox of the reference package; see `driver.PeerSandbox`."""

    def __init__(self, image: str) -> None:
        module = importlib.import_module("llm_in_sandbox.docker_runtime")
        self._make: Any = lambda: module.DockerRuntime(image, logger=False)
        self._runtime: Any = None

    def start(self) -> None:
        self._runtime = self._make()

    def exec(self, command: str) -> str:
        output, ending = self._runtime.run(command)
        if ending != "0":
            raise RuntimeError(f"{ending}: {output}")
        return str(output)

    def put(self, source: str, path: str) -> None:
        self._runtime.copy_to_container(source, path)

    def get(self, path: str, target: str) -> None:
        # For a single file, the reference downloads everything and stores nothing.
        self._runtime.copy_from_container(str(Path(path).parent), target)

    def stop(self) -> None:
        self._runtime.close()


if __name__ == "__main__":
    serve(ReferenceSandbox(sys.argv[1]))
