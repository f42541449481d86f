"""Every attempt succeeds where its wall is missing: that it fails elsewhere then says something."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from tempfile import gettempdir

import pytest

from policies.isolation import Isolation
from sandbox_runtime.egress.gateway import Gateway
from sandbox_runtime.escape.ground import Ground, MakeWayOut
from sandbox_runtime.escape.probe import Attack
from sandbox_runtime.escape.run import run_attack, run_batch
from sandbox_runtime.escape.suite import ATTACKS, PROBES
from sandbox_runtime.guest.agent import GuestConfig
from tests.sandbox_runtime.conformance.backends import docker_backend
from tests.sandbox_runtime.escape.absent import ABSENT
from tests.sandbox_runtime.escape.naive import (
    NaiveCommands,
    NaiveFiles,
    NaiveFrames,
    NaiveOutput,
    NaiveRoom,
    NaiveWayOut,
)
from tests.sandbox_runtime.escape.places import NO_WALLS, Places, add_stand_ins, opened

pytestmark = pytest.mark.docker

NO_NETWORK = "--network=none"
TEMPORARY = gettempdir()
STRANGER = 12345
"""A user that nobody else on the host is."""


@dataclass(frozen=True, slots=True)
class Control:
    """What is missing."""

    places: Places
    make_way_out: MakeWayOut = Gateway

    def ground(self) -> Ground:
        return Ground(self.places.start, Isolation(), make_way_out=self.make_way_out, watch_s=0.1)


NOTHING_THERE = Control(Places(*NO_WALLS))
OF_A_WALL: Mapping[str, Control] = {
    "host": Control(Places("--network=host", config=GuestConfig(egress_port=0))),
    "files": Control(Places(NO_NETWORK, kind=NaiveFiles)),
    "protocol": Control(Places(*NO_WALLS, kind=NaiveCommands)),
    "egress": Control(Places(NO_NETWORK), NaiveWayOut),
    "bombs": NOTHING_THERE,
}
OF_AN_ATTACK: Mapping[str, Control] = {
    "proxy_namespaces": NOTHING_THERE,
    "host_files": Control(Places(NO_NETWORK, f"--volume={TEMPORARY}:/host{TEMPORARY}:ro")),
    "forged_frames": NOTHING_THERE,
    "frames_as_output": Control(Places(NO_NETWORK, kind=NaiveFrames)),
    "own_terminal": NOTHING_THERE,
    "endless_output": Control(Places(NO_NETWORK, kind=NaiveOutput)),
    "slowloris": Control(Places(NO_NETWORK), NaiveRoom),
    "inotify_bomb": Control(
        Places(
            NO_NETWORK,
            f"--user={STRANGER}",
            config=GuestConfig(working_dir="/tmp", directories=("/tmp",)),
        )
    ),
}


@pytest.fixture(scope="module", autouse=True)
def engine(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Without one there are no places."""
    docker_backend(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="module")
async def grounds() -> AsyncIterator[dict[int, Ground]]:
    """Those that have been used, by control: each is used for several attacks."""
    made: dict[int, Ground] = {}
    yield made
    for ground in made.values():
        await ground.aclose()
    for control in (*OF_A_WALL.values(), *OF_AN_ATTACK.values()):
        await control.places.aclose()


async def test_without_walls_every_attempt_from_inside_succeeds() -> None:
    async with opened(Places(*NO_WALLS)) as place:
        await add_stand_ins(place)
        findings = {finding.probe: finding for finding in await run_batch(place)}
    absent = {name for name, (_, is_absent) in ABSENT.items() if is_absent()}
    assert set(ABSENT) < {probe.name for probe in PROBES}
    for probe in PROBES:
        expected = "held" if probe.name in absent else "open"
        assert findings[probe.name].verdict == expected, findings[probe.name]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
async def test_without_its_wall_it_succeeds(attack: Attack, grounds: dict[int, Ground]) -> None:
    control = OF_AN_ATTACK.get(attack.name) or OF_A_WALL[attack.wall]
    ground = grounds.setdefault(id(control), control.ground())
    finding = await run_attack(ground, attack)
    assert finding.verdict == "open", finding
