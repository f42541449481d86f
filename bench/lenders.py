"""Controls lender processes, and inspects their resources from outside."""

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
from bench.processes import Family, HostProcess, alive, open_files, rss_mib
from bench.servers import process
from sandbox_runtime.backends.cgroups import find_cgroups, process_key
from sandbox_runtime.backends.docker import INSTALL_LABEL

ORDER_TIMEOUT_S = 900
LONGEST_END_S = 120
POLL_S = 0.002
SHARE_OF_POLLING = 5
"""Ratio of a pause to the poll before it. Pauses leave processor time to the observed processes."""


class LenderError(Exception):
    """A lender did not complete an order."""


@dataclass(frozen=True, slots=True)
class Stock:
    """A pool of a lender."""

    kind: Kind
    idle: int = 0
    max_sandboxes: int = 8


@dataclass(frozen=True, slots=True)
class Ending:
    """The result of ending a lender."""

    seconds: float
    processes: int
    """Number of remaining processes."""
    containers: int

    @property
    def left(self) -> int:
        """Number of remaining processes and containers."""
        return self.processes + self.containers


@dataclass(frozen=True, slots=True)
class Belongings:
    """The resources on the host that belong to a lender."""

    containers: int
    processes: int
    cgroups: int
    files: int
    """Number of files in its temporary directory and its state directory."""
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
        self._owner = process_key(child.pid)

    async def order(self, do: str, **details: Any) -> float:
        """Run an order and return its duration in seconds. Raise LenderError."""
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

    def sandboxes(self) -> list[set[HostProcess]]:
        """Return the processes of each sandbox, in Docker with the container's shim."""
        mains = [self._main(container) for container in self.containers()]
        family = Family()
        tops = [family.parent(pid) for pid in mains] + family.children(self.pid)
        return [family.descent(top) for top in tops]

    def agents(self) -> list[HostProcess]:
        """Return the guest agent of each sandbox. The sandboxes must be idle."""
        family = Family()
        return [
            next(process for process in sandbox if not family.children(process.pid))
            for sandbox in self.sandboxes()
        ]

    def containers(self) -> list[str]:
        """Return the ids of the lender's containers."""
        if self._engine is None:
            return []
        label = f"{INSTALL_LABEL}={(self._directory / 'install-id').read_text()}"
        return [each["Id"] for each in self._engine.containers(all=True, filters={"label": label})]

    def _main(self, container: str) -> int:
        assert self._engine
        return int(self._engine.inspect_container(container)["State"]["Pid"])

    def belongings(self) -> Belongings:
        """Return the current resources of the lender."""
        return Belongings(
            containers=len(self.containers()),
            processes=len(set[HostProcess]().union(*self.sandboxes())),
            cgroups=self.cgroups(),
            files=sum(len(files) for _, _, files in os.walk(self._directory)),
            open_files=open_files(self.pid),
            rss_mib=rss_mib(self.pid),
        )

    def cgroups(self) -> int:
        """Return the number of cgroups that the lender, not Docker, made for sandboxes."""
        found = find_cgroups()
        folders = [each.folder for each in found.hierarchies] if found else []
        return sum(len(list(folder.glob(f"{self._owner}-*"))) for folder in folders)

    async def end(self, signal: int) -> Ending:
        """Send `signal` to the lender. Poll for at most two minutes until the lender, the
        processes of its sandboxes and its containers are gone. Return the time and the numbers of
        those that remain.
        """
        left = set[HostProcess]().union(*self.sandboxes(), {Family()[self.pid]})
        self._child.send_signal(signal)
        started = time.perf_counter()
        while True:
            began = time.perf_counter()
            left = await asyncio.to_thread(alive, left)
            containers = await asyncio.to_thread(self.containers)
            now = time.perf_counter()
            if not (left or containers) or now - started > LONGEST_END_S:
                return Ending(now - started, len(left), len(containers))
            await asyncio.sleep(POLL_S + SHARE_OF_POLLING * (now - began))


@asynccontextmanager
async def lender(image: str, stocks: Sequence[Stock]) -> AsyncIterator[Lender]:
    """Run a lender with empty pools for the length of the block."""
    pools = [
        {"kind": each.kind, "idle": each.idle, "max_sandboxes": each.max_sandboxes}
        for each in stocks
    ]
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as directory,
        tempfile.TemporaryFile() as stderr,
        _engine(stocks) as engine,
    ):
        setup = {"image": image, "state_dir": directory, "pools": pools}
        async with process(
            [sys.executable, "-m", "bench.lender", json.dumps(setup)],
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            env={"TMPDIR": directory},
        ) as child:
            yield Lender(child, Path(directory), stderr, engine)


@contextmanager
def _engine(stocks: Sequence[Stock]) -> Iterator[docker.APIClient | None]:
    if not any(each.kind == "docker" for each in stocks):
        yield None
        return
    with closing(docker.APIClient(version="auto", **kwargs_from_env())) as engine:
        yield engine
