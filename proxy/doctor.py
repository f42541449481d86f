"""What works here and what does not, one line a check."""

import asyncio
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from socket import socket

from policies.isolation import Isolation
from proxy.agent.context_windows import ContextWindows
from proxy.agent.model import Model
from proxy.errors import BackendError
from proxy.models.tool_support import ToolProbe, ToolSettings
from sandbox_runtime.backends.base import Backend, Check
from sandbox_runtime.errors import SandboxError, SandboxStartError
from sandbox_runtime.escape.context import EscapeFinding
from sandbox_runtime.escape.run import refusal, run_batch, run_probes, untried
from sandbox_runtime.escape.run import self_test as try_everything
from sandbox_runtime.guest_sandbox import start_sandbox
from sandbox_runtime.images import REQUIRED, image_checks, installed_programs, terminal_check

log = logging.getLogger(__name__)

CLIENTS_KEY = "it wants the client's own key"
"""Where the backend is reached with those."""
MAX_PROBED = 20
PROBE_S = 60.0
"""How long a server may take to say whether a model uses tools."""


async def check_model(model: Model, key: str, windows: ContextWindows | None = None) -> Check:
    """Whether the language model's server answers; `key` says in words where its key comes from,
    and `windows` learns what it lists."""
    try:
        served = await model.models()
    except BackendError as error:
        if error.status not in (401, 403):
            return Check("model backend", False, str(error))
        return Check("model backend", key == CLIENTS_KEY, f"{key} ({error})")
    if windows is not None:
        windows.listed(served)
    names = ", ".join(str(entry.get("id")) for entry in served[:5]) or "no models"
    return Check("model backend", True, names)


async def check_tools(probe: ToolProbe, settings: ToolSettings) -> list[Check]:
    """Whether each model that the backend lists, of the first few, is given tools."""
    try:
        names = (await probe.models())[:MAX_PROBED]
        version = await probe.version() if names else None
    except BackendError:
        return []  # `check_model` has said so
    return [await _check_tools(probe, settings, name, version) for name in names]


async def _check_tools(
    probe: ToolProbe, settings: ToolSettings, name: str, version: str | None
) -> Check:
    of = f"tools of {name}"
    if (setting := settings.for_model(name)) != "probe":
        return Check(of, setting == "always", f"tool_support: {setting}")
    try:
        async with asyncio.timeout(PROBE_S):
            verdict = await probe.verdict(name, version)
    except (BackendError, TimeoutError) as error:
        return Check(of, False, f"not known: {error or 'no answer in time'}")
    if verdict is None:
        return Check(of, True, "not known here, so the model is given them")
    return Check(of, not verdict.reason, verdict.words or "the model is told of them")


def announce(listener: socket, backend: str, model: Check) -> None:
    """Say at start where the server is and what it stands on."""
    log.info("sandboxes: %s", backend)
    if model.ok:
        log.info("model backend: %s", model.detail)
    else:
        log.warning("the model backend does not answer yet: %s", model.detail)
    host, port = listener.getsockname()[:2]
    log.info("serving at http://%s:%d/v1", f"[{host}]" if ":" in host else host, port)


async def require_sound(
    backend: Backend, isolation: Isolation, *, self_test: bool
) -> tuple[str, ...]:
    """Refuse a backend that does not work here, or that something escapes from. Returns what is
    installed in its sandboxes.

    Raises SandboxStartError; the backend is then closed.
    """
    try:
        if broken := [check for check in await backend.check() if not check.ok]:
            raise SandboxStartError("; ".join(f"{each.name}: {each.detail}" for each in broken))
        sandbox = await start_sandbox(backend, isolation)
        try:
            if self_test:
                _require_walls(backend.name, await run_batch(sandbox))
            return await installed_programs(sandbox)
        finally:
            await sandbox.close()
    except SandboxError as error:
        await backend.aclose()
        raise SandboxStartError(str(error)) from error


def _require_walls(backend: str, findings: Sequence[EscapeFinding]) -> None:
    if why := refusal(findings):
        raise SandboxStartError(f"{backend}: {why}")
    if why := untried(findings):
        log.warning("%s: %s", backend, why)


async def diagnose(
    model: Model,
    key: str,
    probe: ToolProbe | None,
    tool_settings: ToolSettings,
    builders: Mapping[str, Callable[[], Backend]],
    isolation: Isolation,
    *,
    self_test: bool,
) -> int:
    """Print every check; the exit code is 1 if one failed that `serve` stands on.

    `key` as `check_model` has it.
    `builders` makes each kind of sandbox that may be taken; the first that can be made is.
    Ways to escape are tried from inside; with `self_test` also those that take long.
    """
    answers = [_line(await check_model(model, key), needed=True)]
    if probe is not None:
        answers += [_line(each, needed=False) for each in await check_tools(probe, tool_settings)]
    await model.aclose()
    taken = ""
    for name, build in builders.items():
        checks, there = await _examine(name, build, isolation, self_test=self_test)
        needed = not taken and (there or name == list(builders)[-1])
        taken = name if needed and there else taken
        answers += [_line(check, needed=needed and not _only_missed(check)) for check in checks]
    answers.append(_line(Check("sandboxes", bool(taken), taken or "none"), needed=True))
    sys.stdout.writelines(text for text, _ in answers)
    return 0 if all(fine for _, fine in answers) else 1


def _only_missed(check: Check) -> bool:
    """Whether a model may miss it, but nothing of ours does."""
    return check.name.startswith("image ") and check.name not in REQUIRED


def _line(check: Check, *, needed: bool) -> tuple[str, bool]:
    """A finding in words, and whether one can live with it."""
    mark = "ok  " if check.ok else "FAIL" if needed else "--  "
    return f"{mark}  {check.name}: {check.detail}\n", check.ok or not needed


async def _examine(
    name: str, build: Callable[[], Backend], isolation: Isolation, *, self_test: bool
) -> tuple[list[Check], bool]:
    """What one kind of sandbox is worth here, and whether there is one at all."""
    try:
        backend = build()
    except SandboxStartError as error:
        return [Check(name, False, str(error))], False
    checks = await backend.check()
    if all(check.ok for check in checks):
        checks += await _trial(backend, isolation)
        checks += await _escapes(backend, isolation, self_test=self_test)
    await backend.aclose()
    return checks, True


async def _escapes(backend: Backend, isolation: Isolation, *, self_test: bool) -> list[Check]:
    """What was tried against the walls: a line for what does not hold, or for all with the test."""
    start = partial(start_sandbox, backend)
    try:
        if self_test:
            findings: list[EscapeFinding] = []
            await try_everything(start, isolation, findings.append)
            return [finding.check() for finding in findings]
        findings = await run_probes(start, isolation)
    except SandboxError as error:
        return [Check(f"{backend.name} walls", False, str(error))]
    held = sum(finding.verdict == "held" for finding in findings)
    bad = [finding.check() for finding in findings if finding.verdict != "held"]
    return [Check(f"{backend.name} walls", not bad, f"{held} of {len(findings)} held"), *bad]


async def _trial(backend: Backend, isolation: Isolation) -> list[Check]:
    """A real sandbox runs a real command, and shows what its image has."""
    try:
        sandbox = await start_sandbox(backend, isolation)
        result = await sandbox.exec("echo $((6 * 7)); id -u; uname -sr", timeout_s=10)
        image = await image_checks(sandbox)
        terminals = await terminal_check(sandbox)
    except SandboxError as error:
        return [Check(f"{backend.name} sandbox", False, str(error))]
    await sandbox.close()
    works = result.stdout.startswith("42\n")
    said = " ".join((result.stdout + result.stderr).split())
    return [Check(f"{backend.name} sandbox", works, said), terminals, *image]


async def collect_garbage(builders: Mapping[str, Callable[[], Backend]]) -> int:
    """Remove what dead proxies have left behind and say how much that was."""
    for name, build in builders.items():
        try:
            backend = build()
        except SandboxStartError as error:
            sys.stdout.write(f"--    {name}: {error}\n")
            continue
        removed = await backend.sweep()
        await backend.aclose()
        sys.stdout.write(f"ok    {name}: {removed} removed\n")
    return 0
