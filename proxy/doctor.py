"""What works here and what does not, one line a check."""

import logging
import sys
from collections.abc import Callable
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


async def diagnose(model: Model, build_backend: Callable[[], Backend]) -> int:
    """Print every check; the exit code is 1 if one failed."""
    checks = [await check_model(model)]
    await model.aclose()
    try:
        backend = build_backend()
    except SandboxStartError as error:
        checks.append(Check("sandbox", False, str(error)))
    else:
        checks += await backend.check()
        checks.append(await _trial(backend))
        await backend.aclose()
    for check in checks:
        sys.stdout.write(f"{'ok  ' if check.ok else 'FAIL'}  {check.name}: {check.detail}\n")
    return 0 if all(check.ok for check in checks) else 1


async def _trial(backend: Backend) -> Check:
    """A real sandbox runs a real command."""
    try:
        sandbox = await start_sandbox(backend, Isolation())
        result = await sandbox.exec("echo $((6 * 7)); id -u; uname -sr", timeout_s=10)
    except SandboxError as error:
        return Check("trial sandbox", False, str(error))
    await sandbox.close()
    works = result.stdout.startswith("42\n")
    return Check("trial sandbox", works, " ".join((result.stdout + result.stderr).split()))
