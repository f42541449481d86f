"""Runs the attempts to escape from a sandbox, and evaluates their findings.

PROBES run inside one sandbox, all in one program; a server runs them at its start. ATTACKS need the
host's side as well and run one by one, in `doctor --self-test`.
"""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from types import ModuleType

from policies.isolation import Isolation
from sandbox_runtime.errors import SandboxError
from sandbox_runtime.escape import bombs, counters, egress, files, host, protocol
from sandbox_runtime.escape.context import (
    NO_SUCH_COMMAND,
    PYTHON,
    Attack,
    Boundary,
    EscapeContext,
    EscapeFinding,
    NeighbourDisturbedError,
    NotTriedError,
    Probe,
    Start,
    Verdict,
)
from sandbox_runtime.escape.inside import (
    devices,
    namespaces,
    network,
    privileges,
    processes,
    settings,
    sockets,
    system_calls,
)
from sandbox_runtime.escape.inside.batch import attempts
from sandbox_runtime.sandbox import ExecResult, Sandbox

_BATCH_TIMEOUT_S = 60.0
_MAX_DETAIL_CHARS = 200
_KNOWN_VERDICTS: dict[str, Verdict] = {"held": "held", "open": "open", "not tried": "not tried"}
_INSIDE = "sandbox_runtime.escape.inside"
_LOADER = """
import sys, types, json
for name, source in json.loads({modules!r}):
    package = name
    while "." in package:
        package = package.rpartition(".")[0]
        sys.modules.setdefault(package, types.ModuleType(package))
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
module.main(json.loads({names!r}))
"""
"""A Python program that loads modules from their source and calls `main` of the last one."""
_MODULES: tuple[tuple[ModuleType, Boundary, bool], ...] = (
    (system_calls, "system calls", True),
    (namespaces, "namespaces", True),
    (sockets, "sockets", True),
    (settings, "settings", True),
    (devices, "devices", True),
    (privileges, "privileges", False),
    (network, "network", False),
    (processes, "processes", False),
)
"""The modules of the probes, each with its boundary, and True if a kernel of the sandbox's own
makes its attempts harmless."""
_OWN_KERNEL_HOLDS = frozenset(
    {"agent_descriptors", "agent_environment", "killed_last", "priority", "realtime"}
)
"""Attempts that a kernel of the sandbox's own makes harmless, although it does not do so for all
attempts of their modules. gVisor lets root inside see the agent's descriptors and environment, with
which root can only forge results of its own sandbox. All of gVisor has a low priority on the host,
whatever priority a program inside has."""


def _probes() -> Iterator[Probe]:
    for module, boundary, own_kernel_holds in _MODULES:
        for attempt in attempts(module):
            assert attempt.__doc__
            name = attempt.__name__
            yield Probe(
                name, boundary, attempt.__doc__, own_kernel_holds or name in _OWN_KERNEL_HOLDS
            )


PROBES: tuple[Probe, ...] = tuple(_probes())
ATTACKS: tuple[Attack, ...] = (
    *host.ATTACKS,
    *files.ATTACKS,
    *protocol.ATTACKS,
    *egress.ATTACKS,
    *bombs.ATTACKS,
    *counters.ATTACKS,
)


async def run_probes(start: Start, isolation: Isolation) -> list[EscapeFinding]:
    """Start a sandbox and run the probes in it, which takes little longer than the start.

    Raises SandboxError if the sandbox does not start or is lost.
    """
    sandbox = await start(isolation)
    try:
        return await run_batch(sandbox)
    finally:
        await sandbox.close()


async def run_batch(sandbox: Sandbox) -> list[EscapeFinding]:
    """Run the probes in a running sandbox. Raises SandboxLostError."""
    result = await _run_attempts(sandbox, [module.__name__ for module, _, _ in _MODULES])
    lines = _parse_lines(result)
    by_name = {line.get("probe", ""): line for line in lines}
    missing = {"verdict": "not tried", "detail": _why_no_result(result)}
    own_kernel = _has_own_kernel(lines)
    return [_finding(probe, by_name.get(probe.name, missing), own_kernel) for probe in PROBES]


async def run_attack(context: EscapeContext, attack: Attack) -> EscapeFinding:
    """Make one attack and return its finding."""
    verdict: Verdict = "held"
    try:
        async with asyncio.timeout(attack.timeout_s):
            found = await attack.make(context)
            if found and not (attack.own_kernel_holds and await _has_own_kernel_inside(context)):
                verdict = "open"
    except NeighbourDisturbedError as error:
        verdict, found = "open", str(error)
    except TimeoutError:
        verdict, found = "open", f"it did not end within {attack.timeout_s:g} s"
    except (SandboxError, NotTriedError) as error:
        verdict, found = "not tried", f"{type(error).__name__}: {error}"
    return EscapeFinding(attack.name, attack.boundary, verdict, _printable(found or ""))


async def self_test(
    start: Start, isolation: Isolation, on_finding: Callable[[EscapeFinding], None]
) -> None:
    """Run all probes and attacks, which takes half a minute; call `on_finding` with each finding.

    Raises SandboxError if the sandbox of the probes does not start or is lost.
    """
    for finding in await run_probes(start, isolation):
        on_finding(finding)
    context = EscapeContext(start, isolation)
    try:
        for attack in ATTACKS:
            on_finding(await run_attack(context, attack))
    finally:
        await context.aclose()


def accept(finding: EscapeFinding, accepted: Mapping[str, str]) -> EscapeFinding:
    """Return the finding as `accepted` if it is open and the backend names it in `accepted`; see
    `Backend.accepted_escapes`."""
    why = accepted.get(finding.probe)
    if finding.verdict != "open" or why is None:
        return finding
    return replace(finding, verdict="accepted", detail=f"{finding.detail}; {why}")


def refusal_reason(findings: Sequence[EscapeFinding]) -> str | None:
    """Return why a server must not use this backend, or None.

    A probe that could not be tried is a reason too, unless no probe could be tried: then the image
    may lack python3, which does not weaken the isolation. `why_none_tried` reports that case.
    """
    bad = [finding for finding in findings if finding.verdict not in ("held", "accepted")]
    if why_none_tried(findings) or not bad:
        return None
    reasons = "; ".join(f"{bad.probe} ({bad.verdict}: {bad.detail})" for bad in bad)
    return f"the isolation does not hold: {reasons}"


def why_none_tried(findings: Sequence[EscapeFinding]) -> str | None:
    """Return why no probe could be tried, or None if at least one was tried."""
    if findings and all(finding.verdict == "not tried" for finding in findings):
        return f"the isolation could not be tested: {findings[0].detail}"
    return None


async def _has_own_kernel_inside(context: EscapeContext) -> bool:
    return _has_own_kernel(_parse_lines(await _run_attempts(await context.neighbour(), [])))


async def _run_attempts(sandbox: Sandbox, names: list[str]) -> ExecResult:
    """Run the attempts of the named modules in the sandbox. The first line of the output names the
    kernel."""
    return await sandbox.exec(
        PYTHON,
        timeout_s=_BATCH_TIMEOUT_S,
        stdin=_batch_program(names),
        shell_state="none",
    )


def _batch_program(names: Sequence[str]) -> bytes:
    """Return one Python program that contains the named modules and runs their attempts."""
    package = resources.files("sandbox_runtime.escape.inside")
    modules = []
    for name in (f"{_INSIDE}.attempt", *names, f"{_INSIDE}.batch"):
        path = package / f"{name.rpartition('.')[2]}.py"
        modules.append((name, path.read_text(encoding="utf-8")))
    return _LOADER.format(modules=json.dumps(modules), names=json.dumps(names)).encode()


def _parse_lines(result: ExecResult) -> list[dict[str, str]]:
    """Parse the lines that the batch printed.

    They are untrusted: their values are compared with known ones, or truncated and shown.
    """
    lines = []
    for line in result.stdout.splitlines():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            lines.append({key: str(text) for key, text in value.items()})
    return lines


def _has_own_kernel(lines: list[dict[str, str]]) -> bool:
    return any(line.get("kernel") == "gVisor" for line in lines)


def _why_no_result(result: ExecResult) -> str:
    if result.exit_code == NO_SUCH_COMMAND:
        return "there is no python3 inside"
    last = (result.stderr.splitlines() or ["nothing"])[-1]
    return f"python3 exited with {result.exit_code}: {last[:_MAX_DETAIL_CHARS]!r}"


def _finding(probe: Probe, line: dict[str, str], own_kernel: bool) -> EscapeFinding:
    verdict = _KNOWN_VERDICTS.get(line.get("verdict", ""), "not tried")
    detail = _printable(line.get("detail", ""))
    if verdict == "open" and own_kernel and probe.own_kernel_holds:
        verdict, detail = "held", f"{detail}, in the sandbox's own kernel"
    return EscapeFinding(probe.name, probe.boundary, verdict, detail)


def _printable(text: str) -> str:
    """Return text from a sandbox in a form that is safe for a terminal and a log."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)[
        :_MAX_DETAIL_CHARS
    ]
