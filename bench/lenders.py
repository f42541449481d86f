"""Starts and controls `bench.lender` processes, which lease sandboxes as a proxy does, and measures
their processes, containers, cgroups and memory from outside."""

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import docker
from docker.utils import kwargs_from_env

from bench.backends import Kind
from bench.processes import HostProcess, ProcessTree, alive_processes, open_file_count, rss_mib
from bench.servers import run_process
from sandbox_runtime.backends.cgroups import find_cgroups, process_key
from sandbox_runtime.backends.docker import INSTALL_LABEL

ORDER_TIMEOUT_S = 900
MAX_END_S = 120
POLL_S = 0.002
PAUSE_TO_POLL_RATIO = 5
"""Ratio of a pause to the poll before it. Pauses leave processor time to the observed processes."""


class LenderError(Exception):
    """A lender did not complete an order."""


@dataclass(frozen=True, slots=True)
class LenderPool:
    """The settings of one pool of a lender."""

    kind: Kind
    idle: int = 0
    max_sandboxes: int = 8


@dataclass(frozen=True, slots=True)
class EndResult:
    """The result of ending a lender."""

    seconds: float
    remaining_processes: int
    """Number of processes of the lender and its sandboxes that are still alive."""
    remaining_containers: int

    @property
    def remaining_count(self) -> int:
        """Number of remaining processes and containers."""
        return self.remaining_processes + self.remaining_containers


@dataclass(frozen=True, slots=True)
class LenderResources:
    """The resources on the host that belong to a lender."""

    containers: int
    processes: int
    cgroups: int
    files: int
    """Number of files in the lender's directory, which has its state and its temporary files."""
    open_files: int
    rss_mib: float


class Lender:
    """A running lender process."""

    def __init__(
        self,
        child: asyncio.subprocess.Process,
        directory: Path,
        stderr: IO[bytes],
        engine: docker.APIClient | None,
    ) -> None:
        self.pid = child.pid
        self._child = child
        self._directory = directory
        self._stderr = stderr
        self._engine = engine
        self._process_key = process_key(child.pid)

    async def order(self, do: str, **details: Any) -> float:
        """Run an order and return its duration in seconds. Raises LenderError if the lender has
        ended."""
        assert self._child.stdin
        assert self._child.stdout
        self._child.stdin.write(json.dumps({"do": do, **details}).encode() + b"\n")
        async with asyncio.timeout(ORDER_TIMEOUT_S):
            answer = await self._child.stdout.readline()
        if not answer:
            self._stderr.seek(0)
            text = self._stderr.read().decode(errors="replace").strip()
            raise LenderError(f"{do}: {(text.splitlines() or ['it ended'])[-1]}")
        return float(json.loads(answer)["seconds"])

    def sandbox_processes(self) -> list[set[HostProcess]]:
        """Return the processes of each sandbox. Those of a Docker sandbox include the container's
        shim."""
        mains = [self._main_pid(container) for container in self.container_ids()]
        tree = ProcessTree()
        tops = [tree.parent(pid) for pid in mains] + tree.children(self.pid)
        return [tree.with_descendants(top) for top in tops]

    def guest_agents(self) -> list[HostProcess]:
        """Return the guest agent of each sandbox. The sandboxes must be idle."""
        tree = ProcessTree()
        return [
            next(process for process in sandbox if not tree.children(process.pid))
            for sandbox in self.sandbox_processes()
        ]

    def container_ids(self) -> list[str]:
        """Return the ids of the lender's containers."""
        if self._engine is None:
            return []
        label = f"{INSTALL_LABEL}={(self._directory / 'install-id').read_text()}"
        return [each["Id"] for each in self._engine.containers(all=True, filters={"label": label})]

    def _main_pid(self, container: str) -> int:
        assert self._engine
        return int(self._engine.inspect_container(container)["State"]["Pid"])

    def resources(self) -> LenderResources:
        """Return the current resources of the lender."""
        return LenderResources(
            containers=len(self.container_ids()),
            processes=len(set[HostProcess]().union(*self.sandbox_processes())),
            cgroups=self.cgroup_count(),
            files=sum(len(files) for _, _, files in os.walk(self._directory)),
            open_files=open_file_count(self.pid),
            rss_mib=rss_mib(self.pid),
        )

    def cgroup_count(self) -> int:
        """Return the number of cgroups that the lender, not Docker, made for sandboxes."""
        found = find_cgroups()
        folders = [each.folder for each in found.hierarchies] if found else []
        return sum(len(list(folder.glob(f"{self._process_key}-*"))) for folder in folders)

    async def end(self, signal: int) -> EndResult:
        """Send `signal` to the lender. Poll for at most two minutes until the lender, the
        processes of its sandboxes and its containers are gone. Return the time and the numbers of
        those that remain.
        """
        left = set[HostProcess]().union(*self.sandbox_processes(), {ProcessTree()[self.pid]})
        self._child.send_signal(signal)
        started = time.perf_counter()
        while True:
            began = time.perf_counter()
            left = await asyncio.to_thread(alive_processes, left)
            containers = await asyncio.to_thread(self.container_ids)
            now = time.perf_counter()
            if not (left or containers) or now - started > MAX_END_S:
                return EndResult(now - started, len(left), len(containers))
            await asyncio.sleep(POLL_S + PAUSE_TO_POLL_RATIO * (now - began))


@asynccontextmanager
async def lender(image: str, lender_pools: Sequence[LenderPool]) -> AsyncIterator[Lender]:
    """Run a lender with empty pools for the length of the block."""
    pools = [
        {"kind": each.kind, "idle": each.idle, "max_sandboxes": each.max_sandboxes}
        for each in lender_pools
    ]
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as directory,
        tempfile.TemporaryFile() as stderr,
        _engine(lender_pools) as engine,
    ):
        setup = {"image": image, "state_dir": directory, "pools": pools}
        async with run_process(
            [sys.executable, "-m", "bench.lender", json.dumps(setup)],
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            env={"TMPDIR": directory},
        ) as child:
            yield Lender(child, Path(directory), stderr, engine)


@contextmanager
def _engine(lender_pools: Sequence[LenderPool]) -> Iterator[docker.APIClient | None]:
    if not any(each.kind == "docker" for each in lender_pools):
        yield None
        return
    with closing(docker.APIClient(version="auto", **kwargs_from_env())) as engine:
        yield engine
