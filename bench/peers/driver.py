"""The main loop of the programs that drive a peer's sandbox: read orders, print durations.

Each program runs with the Python interpreter of its peer's virtualenv, from the root of this
repository. Each line of stdin is an order in JSON. The answer is one line with the duration or the
error.
"""

import json
import signal
import sys
import time
from contextlib import redirect_stdout
from typing import Any, Protocol


class PeerSandbox(Protocol):
    """A peer's sandbox. An exception is reported as the answer to the order that raised it."""

    def start(self) -> None:
        """Create the sandbox and wait until it can run a command."""

    def exec(self, command: str) -> str:
        """Run a command in a shell and return its output."""

    def put(self, source: str, path: str) -> None:
        """Copy the host's file `source` to `path`. Create its directory."""

    def get(self, path: str, target: str) -> None:
        """Copy the file `path` to the host's directory `target`."""

    def stop(self) -> None:
        """Remove the sandbox."""


def serve(sandbox: PeerSandbox) -> None:
    """Run orders until stdin ends, then remove the sandbox."""
    running = False
    # On SIGTERM during an order, the sandbox is still removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        for line in sys.stdin:
            order: dict[str, Any] = json.loads(line)
            running = order["do"] != "stop" and (running or order["do"] == "start")
            sys.stdout.write(f"{json.dumps(_run_order(sandbox, **order))}\n")
            sys.stdout.flush()
    finally:
        if running:
            sandbox.stop()


def _run_order(sandbox: PeerSandbox, do: str, **arguments: str) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        with redirect_stdout(sys.stderr):
            output = getattr(sandbox, do)(**arguments)
    except Exception as error:  # noqa: BLE001 - a peer's errors are its own, of any kind
        return {"error": f"{do}: {type(error).__name__}: {error}"}
    return {"ms": (time.perf_counter() - started) * 1000, "output": output}
