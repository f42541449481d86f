"""Positive controls: each attempt succeeds where its boundary is missing."""

from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir

import pytest

from policies.isolation import Isolation
from sandbox_runtime.egress.gateway import Gateway
from sandbox_runtime.escape.context import Attack, EscapeContext, MakeGateway
from sandbox_runtime.escape.run import ATTACKS, PROBES, run_attack, run_batch
from sandbox_runtime.guest.agent import GuestConfig
from tests.sandbox_runtime.conformance.backends import docker_backend
from tests.sandbox_runtime.escape.flawed_hosts import (
    NaiveCommands,
    NaiveConnectionLimit,
    NaiveFiles,
    NaiveFrames,
    NaiveGateway,
    NaiveOutput,
)
from tests.sandbox_runtime.escape.open_containers import (
    UNCONFINED,
    OpenContainers,
    add_fake_services,
    opened,
)
from tests.sandbox_runtime.escape.unavailable_attempts import ABSENT

pytestmark = pytest.mark.docker

NO_NETWORK = "--network=none"
TEMPORARY = gettempdir()
STRANGER = 12345
"""A uid that no other process of the host uses."""

HUGE_PAGE_COUNT = Path("/proc/sys/vm/nr_hugepages")


@dataclass(frozen=True, slots=True)
class Control:
    """A sandbox without one of the boundaries."""

    places: OpenContainers
    make_gateway: MakeGateway = Gateway

    def context(self) -> EscapeContext:
        return EscapeContext(
            self.places.start, Isolation(), make_gateway=self.make_gateway, watch_s=0.1
        )


NOTHING_THERE = Control(OpenContainers(*UNCONFINED))
OF_A_BOUNDARY: Mapping[str, Control] = {
    "host": Control(OpenContainers("--network=host", config=GuestConfig(egress_port=0))),
    "files": Control(OpenContainers(NO_NETWORK, kind=NaiveFiles)),
    "protocol": Control(OpenContainers(*UNCONFINED, kind=NaiveCommands)),
    "egress": Control(OpenContainers(NO_NETWORK), NaiveGateway),
    "bombs": NOTHING_THERE,
}
OF_AN_ATTACK: Mapping[str, Control] = {
    "proxy_namespaces": NOTHING_THERE,
    "host_files": Control(OpenContainers(NO_NETWORK, f"--volume={TEMPORARY}:/host{TEMPORARY}:ro")),
    "forged_frames": NOTHING_THERE,
    "frames_as_output": Control(OpenContainers(NO_NETWORK, kind=NaiveFrames)),
    "own_terminal": NOTHING_THERE,
    "endless_output": Control(OpenContainers(NO_NETWORK, kind=NaiveOutput)),
    "slowloris": Control(OpenContainers(NO_NETWORK), NaiveConnectionLimit),
    "inotify_bomb": Control(
        OpenContainers(
            NO_NETWORK,
            f"--user={STRANGER}",
            config=GuestConfig(working_dir="/tmp", directories=("/tmp",)),
        )
    ),
}


@pytest.fixture(scope="module", autouse=True)
def engine(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip the tests without a Docker engine."""
    docker_backend(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="module")
async def contexts() -> AsyncIterator[dict[int, EscapeContext]]:
    """The EscapeContext of each control; each context is used for several attacks."""
    made: dict[int, EscapeContext] = {}
    yield made
    for context in made.values():
        await context.aclose()
    for control in (*OF_A_BOUNDARY.values(), *OF_AN_ATTACK.values()):
        await control.places.aclose()


@pytest.fixture
def huge_pages(attack: Attack) -> Iterator[None]:
    """Reserve huge pages on the host for the attack that takes them. Skip it if none can be
    reserved."""
    if attack.name != "huge_page_bomb":
        yield
        return
    try:
        before = HUGE_PAGE_COUNT.read_text(encoding="ascii")
        HUGE_PAGE_COUNT.write_text(f"{int(before) + 8}\n", encoding="ascii")
    except OSError as error:
        pytest.skip(f"no huge pages can be reserved here: {error}")
    yield
    HUGE_PAGE_COUNT.write_text(before, encoding="ascii")


async def test_every_escape_probe_succeeds_in_a_container_without_isolation() -> None:
    async with opened(OpenContainers(*UNCONFINED)) as sandbox:
        await add_fake_services(sandbox)
        findings = {finding.probe: finding for finding in await run_batch(sandbox)}
    absent = {name for name, (_, is_absent) in ABSENT.items() if is_absent()}
    assert set(ABSENT) < {probe.name for probe in PROBES}
    for probe in PROBES:
        expected = "held" if probe.name in absent else "open"
        assert findings[probe.name].verdict == expected, findings[probe.name]


@pytest.mark.usefixtures("root_signal_counter", "huge_pages")
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
async def test_escape_attack_succeeds_if_its_boundary_is_removed(
    attack: Attack, contexts: dict[int, EscapeContext]
) -> None:
    control = OF_AN_ATTACK.get(attack.name) or OF_A_BOUNDARY[attack.boundary]
    context = contexts.setdefault(id(control), control.context())
    finding = await run_attack(context, attack)
    assert finding.verdict == "open", finding
