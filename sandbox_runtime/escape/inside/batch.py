"""Makes all attempts, and prints a line of JSON for each.

One process makes the attempts in turn until an attempt succeeds. Success may have changed the
process, so a new process makes the next attempts. (A process for each attempt would take seconds on
a slow kernel.)
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
from collections import deque
from types import FunctionType

from sandbox_runtime.escape.inside.attempt import NotApplicableError, call

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import ModuleType
    from typing import NoReturn

_TIMEOUT_S = 3.0
_READ_ALL_OF_THE_LOG = 3
_LOG_BYTES = 1 << 12
_MAX_DETAIL_CHARS = 500


def attempts(module: ModuleType) -> Iterator[FunctionType]:
    """Yield the attempts of a module, which are its public functions."""
    for name, value in vars(module).items():
        is_own = isinstance(value, FunctionType) and value.__module__ == module.__name__
        if is_own and not name.startswith("_"):
            yield value


def main(modules: list[str]) -> None:
    """Make the attempts of these loaded modules."""
    _print({"kernel": _kernel()})
    waiting = deque(attempt for module in modules for attempt in attempts(sys.modules[module]))
    while waiting:
        _run_next_attempts(waiting)


def _run_next_attempts(waiting: deque[FunctionType]) -> None:
    """Make at least one attempt in a new process, and remove the made attempts from `waiting`."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        _make_attempts(waiting, write)
    os.close(write)
    received, is_late = b"", False
    while waiting and not is_late:
        ready, _, _ = select.select([read], [], [], _TIMEOUT_S)
        is_late = not ready
        more = os.read(read, 4096) if ready else b""
        if not more:
            break
        *lines, received = (received + more).split(b"\n")
        for line in lines:
            _print(json.loads(line))
            waiting.popleft()
    os.close(read)
    if is_late:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if status and waiting:
        _print({"probe": waiting.popleft().__name__, **_killed_result(status, is_late)})


def _make_attempts(waiting: Iterable[FunctionType], write: int) -> NoReturn:
    try:
        for attempt in waiting:
            result = _make_attempt(attempt)
            os.write(write, json.dumps({"probe": attempt.__name__, **result}).encode() + b"\n")
            if result["verdict"] == "open":
                break
        os._exit(0)
    finally:
        os._exit(1)


def _make_attempt(attempt: FunctionType) -> dict[str, str]:
    try:
        found = attempt()
    except OSError as error:
        return {"verdict": "held", "detail": str(error)}
    except NotApplicableError as error:
        return {"verdict": "not tried", "detail": str(error)}
    except Exception as error:  # noqa: BLE001 - a fault of the attempt itself, which is reported
        return {"verdict": "not tried", "detail": f"{type(error).__name__}: {error}"}
    return {"verdict": "open" if found else "held", "detail": (found or "")[:_MAX_DETAIL_CHARS]}


def _killed_result(status: int, is_late: bool) -> dict[str, str]:
    """Return the result of an attempt whose process was killed or failed."""
    if is_late:
        return {"verdict": "not tried", "detail": f"it did not end within {_TIMEOUT_S:g} s"}
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSYS:
        return {"verdict": "held", "detail": "killed for the system call"}
    return {"verdict": "not tried", "detail": f"its process ended with status {status}"}


def _kernel() -> str:
    """Return "gVisor" if the kernel's log names it, else ""."""
    log = ctypes.create_string_buffer(_LOG_BYTES)
    try:
        call("syslog", _READ_ALL_OF_THE_LOG, log, _LOG_BYTES)
    except (OSError, NotApplicableError):
        return ""
    return "gVisor" if b"Starting gVisor" in log.raw else ""


def _print(line: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()
