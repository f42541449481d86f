"""Makes attempts and says what they found."""

import asyncio
import json
from collections.abc import Callable, Sequence

from policies.isolation import Isolation
from sandbox_runtime.errors import SandboxError
from sandbox_runtime.escape import batch
from sandbox_runtime.escape.ground import (
    NO_SUCH_COMMAND,
    DisturbedError,
    Ground,
    NotTriedError,
    Start,
)
from sandbox_runtime.escape.probe import Attack, Finding, Probe, Verdict
from sandbox_runtime.escape.suite import ATTACKS, PROBES
from sandbox_runtime.sandbox import ExecResult, Sandbox

_BATCH_TIMEOUT_S = 60.0
_MAX_DETAIL_CHARS = 200
_VERDICTS: dict[str, Verdict] = {"held": "held", "open": "open", "not tried": "not tried"}


async def run_probes(start: Start, isolation: Isolation) -> list[Finding]:
    """Try the walls from inside one sandbox; it takes little longer than starting it.

    Raises SandboxError where there is no sandbox to try.
    """
    sandbox = await start(isolation)
    try:
        return await run_batch(sandbox)
    finally:
        await sandbox.close()


async def run_batch(sandbox: Sandbox) -> list[Finding]:
    """The same in a sandbox that is there. Raises SandboxLostError."""
    result = await _run(sandbox, batch.program())
    said = _said(result)
    by_name = {line.get("probe", ""): line for line in said}
    missing = {"verdict": "not tried", "detail": _why_missing(result)}
    return [
        _finding(probe, by_name.get(probe.name, missing), _has_own_kernel(said)) for probe in PROBES
    ]


async def run_attack(ground: Ground, attack: Attack) -> Finding:
    """Make one attack."""
    verdict: Verdict = "held"
    try:
        async with asyncio.timeout(attack.timeout_s):
            found = await attack.make(ground)
            if found and not (attack.own_kernel_holds and await _on_own_kernel(ground)):
                verdict = "open"
    except DisturbedError as error:
        verdict, found = "open", str(error)
    except TimeoutError:
        verdict, found = "open", f"no end within {attack.timeout_s:g} s"
    except (SandboxError, NotTriedError) as error:
        verdict, found = "not tried", f"{type(error).__name__}: {error}"
    return Finding(attack.name, attack.wall, verdict, _shown(found or ""))


async def self_test(start: Start, isolation: Isolation, tell: Callable[[Finding], None]) -> None:
    """Try everything, and tell of each finding when there is one: this takes half a minute.

    Raises SandboxError where there is no sandbox to try.
    """
    for finding in await run_probes(start, isolation):
        tell(finding)
    ground = Ground(start, isolation)
    try:
        for attack in ATTACKS:
            tell(await run_attack(ground, attack))
    finally:
        await ground.aclose()


async def _on_own_kernel(ground: Ground) -> bool:
    return _has_own_kernel(_said(await _run(await ground.neighbour(), batch.kernel_program())))


async def _run(sandbox: Sandbox, program: bytes) -> ExecResult:
    return await sandbox.exec(
        "exec python3 -I -S -", timeout_s=_BATCH_TIMEOUT_S, stdin=program, shell_state="none"
    )


def refusal(findings: Sequence[Finding]) -> str | None:
    """Why nothing may run behind these walls; None where all held.

    What could not be tried is a reason too, unless nothing could: an image without python3 has the
    walls of its backend all the same, and whoever starts there is to be told by `untried`.
    """
    bad = [finding for finding in findings if finding.verdict != "held"]
    if untried(findings) or not bad:
        return None
    words = "; ".join(f"{bad.probe} ({bad.verdict}: {bad.detail})" for bad in bad)
    return f"walls do not hold: {words}"


def untried(findings: Sequence[Finding]) -> str | None:
    """Why no wall could be tried at all; None where any was."""
    if findings and all(finding.verdict == "not tried" for finding in findings):
        return f"the walls could not be tried: {findings[0].detail}"
    return None


def _said(result: ExecResult) -> list[dict[str, str]]:
    """The lines that the batch printed. It runs inside: what it says is compared or cut short."""
    said = []
    for line in result.stdout.splitlines():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            said.append({key: str(words) for key, words in value.items()})
    return said


def _has_own_kernel(said: list[dict[str, str]]) -> bool:
    return any(line.get("kernel") == "gVisor" for line in said)


def _why_missing(result: ExecResult) -> str:
    if result.exit_code == NO_SUCH_COMMAND:
        return "there is no python3 inside"
    last = (result.stderr.splitlines() or ["nothing"])[-1]
    return f"python3 ended with {result.exit_code} and said {last[:_MAX_DETAIL_CHARS]!r}"


def _finding(probe: Probe, said: dict[str, str], own_kernel: bool) -> Finding:
    verdict = _VERDICTS.get(said.get("verdict", ""), "not tried")
    detail = _shown(said.get("detail", ""))
    if verdict == "open" and own_kernel and probe.own_kernel_holds:
        verdict, detail = "held", f"{detail}, in a kernel of the sandbox's own"
    return Finding(probe.name, probe.wall, verdict, detail)


def _shown(text: str) -> str:
    """What may come from inside, fit for a terminal and a log."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)[
        :_MAX_DETAIL_CHARS
    ]
