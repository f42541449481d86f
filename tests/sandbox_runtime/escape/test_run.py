"""Verdicts of attempts: a boundary counts as held only if it was tried and held."""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import anyio
import pytest

from policies.isolation import Isolation
from sandbox_runtime.backends.base import Check
from sandbox_runtime.errors import SandboxLostError, SandboxStartError
from sandbox_runtime.escape.context import (
    Attack,
    EscapeContext,
    EscapeFinding,
    NeighbourDisturbedError,
    Verdict,
)
from sandbox_runtime.escape.run import PROBES, refusal_reason, run_attack, run_batch, why_none_tried
from sandbox_runtime.guest_sandbox import PING_INTERVAL_S, start_sandbox
from sandbox_runtime.streams import OnConnection
from tests.fakes.manual_clock import ManualClock
from tests.fakes.memory_sandbox import MemorySandbox
from tests.fakes.sandbox_backend import FakeSandboxBackend
from tests.fakes.waiting import until
from tests.sandbox_runtime.conformance.backends import backend_of
from tests.sandbox_runtime.escape.open_containers import OpenContainers, opened
from tests.sandbox_runtime.transfer import output, write

ATTEMPTS = """
import os, signal
from sandbox_runtime.escape.inside import batch
from sandbox_runtime.escape.inside.attempt import NotApplicableError
def held(): raise PermissionError(1, "no")
def nothing_found(): return None
def opened(): os.environ["CHANGED"] = "1"; return "it is open"
def after_it(): return os.environ.get("CHANGED")
def untried(): raise NotApplicableError("not here")
def faulty(): return 1 / 0
def killed(): os.kill(os.getpid(), signal.SIGKILL)
def filtered(): os.kill(os.getpid(), signal.SIGSYS)
def hanging(): signal.pause()
def last(): return None
batch.main(["__main__"])
"""
LIES: tuple[object, ...] = (
    {"probe": "keyctl", "verdict": "fine", "detail": "nothing"},
    {"probe": "bpf", "verdict": "held", "detail": "\x1b[31m\n" + "x" * 9999},
    {"probe": ["unhashable"], "verdict": {}, "detail": None},
    ["no", "object"],
    {"probe": "nobody asked", "verdict": "open", "detail": ""},
)


def finding(probe: str, verdict: Verdict) -> EscapeFinding:
    return EscapeFinding(probe, "settings", verdict, "as told")


class SandboxWithoutNetwork(MemorySandbox):
    """A sandbox that accepts no connection handler."""

    async def ping(self, timeout_s: float) -> None:
        if self.closed:
            raise SandboxLostError("closed")

    def set_connection_handler(self, on_connection: OnConnection | None) -> None:
        assert on_connection is None


async def memory_sandbox(isolation: Isolation) -> SandboxWithoutNetwork:
    return SandboxWithoutNetwork()


async def made(attack: Attack) -> EscapeFinding:
    context = EscapeContext(memory_sandbox, Isolation())
    with anyio.fail_after(5):
        found = await run_attack(context, attack)
        await context.aclose()
    return found


@pytest.mark.docker
async def test_attack_on_a_sandboxs_own_kernel_counts_as_held_unless_it_disturbs_a_neighbour(
    tmp_path: Path,
) -> None:
    """An attack on the sandbox's own kernel is harmless, an effect on a neighbour is not."""

    async def takes(context: EscapeContext) -> str | None:
        return "it took all"

    async def is_felt(context: EscapeContext) -> str | None:
        raise NeighbourDisturbedError("the neighbour sandbox has none")

    backend = backend_of("docker-runsc", tmp_path)
    context = EscapeContext(partial(start_sandbox, backend), Isolation())
    attacks = (Attack("made", "bombs", "Tries.", make, True) for make in (takes, is_felt))
    findings = [await run_attack(context, attack) for attack in attacks]
    await context.aclose()
    await backend.aclose()
    assert [finding.verdict for finding in findings] == ["held", "open"]


def test_failed_killed_or_hanging_escape_probe_does_not_affect_the_probes_after_it() -> None:
    command = (sys.executable, "-c", ATTEMPTS)
    said = subprocess.run(command, capture_output=True, check=True, timeout=30).stdout
    lines = [json.loads(line) for line in said.splitlines()][1:]
    assert [(line["probe"], line["verdict"], line["detail"]) for line in lines] == [
        ("held", "held", "[Errno 1] no"),
        ("nothing_found", "held", ""),
        ("opened", "open", "it is open"),
        ("after_it", "held", ""),
        ("untried", "not tried", "not here"),
        ("faulty", "not tried", "ZeroDivisionError: division by zero"),
        ("killed", "not tried", f"its process ended with status {signal.SIGKILL.value}"),
        ("filtered", "held", "killed for the system call"),
        ("hanging", "not tried", "it did not end within 3 s"),
        ("last", "held", ""),
    ]


async def test_escape_probes_count_as_not_tried_in_a_sandbox_without_python() -> None:
    findings = await run_batch(MemorySandbox())
    assert {each.verdict for each in findings} == {"not tried"}
    assert (
        why_none_tried(findings) == "the isolation could not be tested: there is no python3 inside"
    )


@pytest.mark.docker
async def test_escape_results_reported_by_a_sandbox_are_validated_and_truncated() -> None:
    lines = "\n".join([*map(json.dumps, LIES), "no JSON", "[" * 99999])
    liar = f"#!/bin/sh\ncat <<END\n{lines}\nEND\n"
    async with opened(OpenContainers("--network=none")) as sandbox:
        await write(sandbox, "/usr/local/sbin/python3", liar.encode())
        await output(sandbox, "chmod +x /usr/local/sbin/python3")
        findings = {each.probe: each for each in await run_batch(sandbox)}
    assert findings.keys() == {probe.name for probe in PROBES}
    assert findings["keyctl"].verdict == "not tried"
    assert findings["bpf"].verdict == "held"
    assert len(findings["bpf"].detail) <= 200
    assert findings["bpf"].detail.isprintable()
    assert findings["ptrace"].verdict == "not tried"


@pytest.mark.parametrize(
    ("verdicts", "said"),
    [
        (["held", "held"], None),
        (["held", "open"], "the isolation does not hold: b (open: as told)"),
        (["not tried", "held"], "the isolation does not hold: a (not tried: as told)"),
        (["not tried", "not tried"], None),
    ],
)
def test_server_refuses_to_start_if_a_finding_is_open_or_only_some_are_untried(
    verdicts: Sequence[Verdict], said: str | None
) -> None:
    findings = [finding(name, verdict) for name, verdict in zip("ab", verdicts, strict=True)]
    assert refusal_reason(findings) == said


def test_doctor_check_of_an_open_finding_fails_with_the_word_open_in_capitals() -> None:
    assert finding("sysrq", "open").to_check() == Check("settings: sysrq", False, "OPEN: as told")
    assert finding("sysrq", "held").to_check() == Check("settings: sysrq", True, "as told")


async def test_attack_that_does_not_end_in_time_counts_as_open() -> None:
    async def endless(context: EscapeContext) -> None:
        await anyio.sleep_forever()

    found = await made(Attack("endless", "bombs", "", endless, timeout_s=0.01))
    assert (found.verdict, found.detail) == ("open", "it did not end within 0.01 s")


async def test_an_attack_that_could_not_be_made_counts_as_not_tried() -> None:
    async def nowhere(context: EscapeContext) -> None:
        raise SandboxStartError("there is no engine")

    found = await made(Attack("nowhere", "bombs", "", nowhere))
    assert (found.verdict, found.detail) == (
        "not tried",
        "SandboxStartError: there is no engine",
    )


async def test_lost_neighbour_is_reported_and_replaced_for_the_next_attack() -> None:
    context = EscapeContext(memory_sandbox, Isolation())
    neighbour = await context.neighbour()
    assert await context.disturbance() is None
    await neighbour.close()
    assert "the neighbour sandbox is lost" in str(await context.disturbance())
    assert await context.neighbour() is not neighbour
    assert await context.disturbance() is None
    await context.aclose()


async def test_neighbour_is_pinged_during_an_attack() -> None:
    backend, clock = FakeSandboxBackend(), ManualClock()
    context = EscapeContext(partial(start_sandbox, backend), Isolation(), clock=clock)
    await context.neighbour()
    for _ in range(3):
        await until(lambda: PING_INTERVAL_S in clock.alarms)
        clock.advance(PING_INTERVAL_S)
    (guest,) = backend.guests
    await until(lambda: guest.pings == 3)
    await context.aclose()
    assert not backend.alive
