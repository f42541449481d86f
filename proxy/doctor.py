"""What works here and what does not, one line a check."""

import logging
import sys
from collections.abc import Callable, Mapping
from socket import socket

from policies.isolation import Isolation
from proxy.agent.model import Model
from proxy.errors import BackendError
from sandbox_runtime.backends.base import Backend, Check
from sandbox_runtime.errors import SandboxError, SandboxStartError
from sandbox_runtime.lending import start_sandbox

log = logging.getLogger(__name__)


async def check_model(model: Model) -> Check:
    """Whether the language model's server answers."""
    try:
        served = await model.models()
    except BackendError as error:
        return Check("model backend", False, str(error))
    names = ", ".join(str(entry.get("id")) for entry in served[:5]) or "no models"
    return Check("model backend", True, names)


def announce(listener: socket, backend: str, model: Check) -> None:
    """Say at start where the server is and what it stands on."""
    log.info("sandboxes: %s", backend)
    if model.ok:
        log.info("model backend: %s", model.detail)
    else:
        log.warning("the model backend does not answer yet: %s", model.detail)
    host, port = listener.getsockname()[:2]
    log.info("serving at http://%s:%d/v1", f"[{host}]" if ":" in host else host, port)


async def diagnose(model: Model, builders: Mapping[str, Callable[[], Backend]]) -> int:
    """Print every check; the exit code is 1 if one failed that `serve` stands on.

    `builders` makes each kind of sandbox that may be taken; the first that can be made is.
    """
    answers = [_line(await check_model(model), needed=True)]
    await model.aclose()
    taken = ""
    for name, build in builders.items():
        checks, there = await _examine(name, build)
        needed = not taken and (there or name == list(builders)[-1])
        taken = name if needed and there else taken
        answers += [_line(check, needed=needed) for check in checks]
    answers.append(_line(Check("sandboxes", bool(taken), taken or "none"), needed=True))
    sys.stdout.writelines(text for text, _ in answers)
    return 0 if all(fine for _, fine in answers) else 1


def _line(check: Check, *, needed: bool) -> tuple[str, bool]:
    """A finding in words, and whether one can live with it."""
    mark = "ok  " if check.ok else "FAIL" if needed else "--  "
    return f"{mark}  {check.name}: {check.detail}\n", check.ok or not needed


async def _examine(name: str, build: Callable[[], Backend]) -> tuple[list[Check], bool]:
    """What one kind of sandbox is worth here, and whether there is one at all."""
    try:
        backend = build()
    except SandboxStartError as error:
        return [Check(name, False, str(error))], False
    checks = [*await backend.check(), await _trial(backend)]
    await backend.aclose()
    return checks, True


async def _trial(backend: Backend) -> Check:
    """A real sandbox runs a real command."""
    try:
        sandbox = await start_sandbox(backend, Isolation())
        result = await sandbox.exec("echo $((6 * 7)); id -u; uname -sr", timeout_s=10)
    except SandboxError as error:
        return Check(f"{backend.name} sandbox", False, str(error))
    await sandbox.close()
    works = result.stdout.startswith("42\n")
    return Check(
        f"{backend.name} sandbox", works, " ".join((result.stdout + result.stderr).split())
    )
