"""The main loop of all programs that drive a peer's sandbox: reads orders, prints durations.

Each runs with the Python of its peer's own virtualenv, from the root of this repository. One line
of JSON on standard input is one order, and is answered by one line: how long it took, or why it
could not be done.
"""

import json
import signal
import sys
import time
from contextlib import redirect_stdout
from typing import Any, Protocol


class PeerSandbox(Protocol):
    """A peer's sandbox; any exception is the answer to the order that caused it."""

    def start(self) -> None:
        """From nothing to being ready for a command."""

    def exec(self, command: str) -> str:
        """Run it in a shell; returns what it printed."""

    def put(self, source: str, path: str) -> None:
        """Copy the host's file `source` to `path`, making its directory."""

    def get(self, path: str, target: str) -> None:
        """Copy the file `path` to the host's directory `target`."""

    def stop(self) -> None:
        """Remove it."""


def serve(sandbox: PeerSandbox) -> None:
    """Follow orders until there are none; then nothing of the sandbox is left."""
    running = False
    # Told to end in the middle of an order, it shall still remove its sandbox.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        for line in sys.stdin:
            order: dict[str, Any] = json.loads(line)
            running = order["do"] != "stop" and (running or order["do"] == "start")
            sys.stdout.write(f"{json.dumps(_follow(sandbox, **order))}\n")
            sys.stdout.flush()
    finally:
        if running:
            sandbox.stop()


def _follow(sandbox: PeerSandbox, do: str, **arguments: str) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        with redirect_stdout(sys.stderr):
            output = getattr(sandbox, do)(**arguments)
    except Exception as error:  # noqa: BLE001 - a peer's errors are its own, of any kind
        return {"error": f"{do}: {type(error).__name__}: {error}"}
    return {"ms": (time.perf_counter() - started) * 1000, "output": output}
