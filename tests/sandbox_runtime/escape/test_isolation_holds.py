"""All boundaries of a sandbox hold against all attempts, on each backend."""

from collections.abc import AsyncIterator, Mapping
from functools import partial

import pytest

from policies.isolation import Isolation, Level
from sandbox_runtime.backends.base import Backend
from sandbox_runtime.backends.docker_check import accepted_escapes, engine_info
from sandbox_runtime.escape import counters
from sandbox_runtime.escape.context import Attack, EscapeContext, EscapeFinding, running_python
from sandbox_runtime.escape.run import (
    ATTACKS,
    PROBES,
    accept,
    refusal_reason,
    run_attack,
    run_probes,
)
from sandbox_runtime.guest_sandbox import start_sandbox
from tests.sandbox_runtime.conformance.backends import backend_of


def marks_of(kind: str) -> tuple[pytest.MarkDecorator, ...]:
    return (pytest.mark.docker,) if kind.startswith("docker") else ()


KINDS = ("bubblewrap", "docker", "docker-runsc")
ON_EACH = [pytest.param(kind, marks=marks_of(kind)) for kind in KINDS]
AGAINST_EACH = [
    pytest.param(kind, attack, marks=marks_of(kind), id=f"{kind}-{attack.name}")
    for kind in KINDS
    for attack in ATTACKS
]


@pytest.fixture(scope="module")
async def backend(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Backend]:
    made = backend_of(request.param, tmp_path_factory.mktemp("state"))
    yield made
    await made.aclose()


@pytest.fixture(scope="module")
async def context(backend: Backend) -> AsyncIterator[EscapeContext]:
    made = EscapeContext(partial(start_sandbox, backend), Isolation())
    yield made
    await made.aclose()


def test_at_least_sixty_escape_attempts_have_distinct_names() -> None:
    names = [*(probe.name for probe in PROBES), *(attack.name for attack in ATTACKS)]
    assert len(set(names)) == len(names) >= 60


@pytest.mark.parametrize("level", ["standard", "strict"])
@pytest.mark.parametrize("backend", ON_EACH, indirect=True)
async def test_boundary_of_every_escape_probe_inside_a_sandbox_holds(
    backend: Backend, level: Level
) -> None:
    findings = await run_probes(partial(start_sandbox, backend), Isolation(level=level))
    assert [finding.probe for finding in findings] == [probe.name for probe in PROBES]
    assert [finding for finding in findings if finding.verdict != "held"] == []
    assert refusal_reason(findings) is None


@pytest.mark.usefixtures("root_signal_counter")
@pytest.mark.parametrize(("backend", "attack"), AGAINST_EACH, indirect=["backend"])
async def test_boundary_holds_against_each_escape_attack_that_the_backend_does_not_accept(
    backend: Backend, attack: Attack, context: EscapeContext
) -> None:
    finding = accept(await run_attack(context, attack), backend.accepted_escapes)
    verdict = "accepted" if attack.name in backend.accepted_escapes else "held"
    assert finding == EscapeFinding(attack.name, attack.boundary, verdict, finding.detail)


@pytest.mark.usefixtures("root_signal_counter")
@pytest.mark.parametrize(
    "backend", [pytest.param("docker", marks=pytest.mark.docker)], indirect=True
)
async def test_timer_bomb_attack_is_not_tried_while_the_neighbour_sandbox_gets_no_timers(
    backend: Backend, context: EscapeContext
) -> None:
    [bomb] = [attack for attack in ATTACKS if attack.name == "timer_bomb"]
    async with context.victim() as other, running_python(other, counters.TIMERS):
        finding = await run_attack(context, bomb)
    assert (finding.verdict, "got no timers" in finding.detail) == ("not tried", True)


def test_only_runc_without_user_namespaces_has_accepted_escape_attempts() -> None:
    """Root in such sandboxes shares the counters of the host's root; see docs/security.md."""
    runc = {"DefaultRuntime": "runc"}
    assert set(accepted(runc)) == {"timer_bomb", "signal_bomb"}
    assert accepted({**runc, "SecurityOptions": ["name=userns"]}) == {}
    assert accepted({**runc, "SecurityOptions": ["name=rootless"]}) == {}
    assert accepted(runc, "runsc") == accepted({"DefaultRuntime": "runsc"}) == {}


def accepted(engine: Mapping[str, object], runtime: str | None = None) -> Mapping[str, str]:
    return accepted_escapes(engine_info(dict(engine), "unix:///run/docker.sock"), runtime)
