"""Leftovers of servers that were stopped or killed: in the database, in the bucket, on this machine
and in a cluster."""

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import obstore
from obstore.store import S3Store
from sqlalchemy import func, select

from proxy.config import KubernetesConfig
from proxy.store import postgresql
from proxy.store.blobs import GRACE_S, PART_SUFFIX
from proxy.store.store import Store
from proxy.store.tables import PROCESSES, RUNS
from sandbox_runtime.backends.cgroups import find_cgroups
from sandbox_runtime.backends.docker import INSTALL_LABEL
from sandbox_runtime.backends.docker_sdk import connect
from tests.s3.server import BUCKET, S3Server
from tests.sandbox_runtime.backends.cluster import ClusterAdmin

WAIT_S = 120.0
"""Maximum time in seconds until the leases of killed servers have expired and their leftovers are
swept."""
POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class Leftovers:
    """The places in which servers may have left something."""

    homes: Sequence[Path]
    """The servers' data directories, each with its config.yaml."""
    pids: Sequence[int]
    """The ids of all processes of the servers, those before a restart included."""
    database_url: str
    s3: S3Server
    kubeconfig: Path | None
    """The cluster with the sandboxes; None: they were on this machine."""

    async def count(self) -> Mapping[str, int]:
        """Return the number of leftovers of each kind, once all are 0 or WAIT_S seconds have
        passed. Until then, run `sandbox-proxy gc` and the store's sweep repeatedly. The store's
        clock is two hours fast, because a sweep keeps blobs without a record for one hour."""
        store = Store(
            self.homes[0],
            database_url=postgresql.database_url(self.database_url),
            blobs_url=f"s3://{BUCKET}",
            now=lambda: time.time() + 2 * GRACE_S,
        )
        ends_at = time.monotonic() + WAIT_S
        while True:
            await asyncio.gather(*map(_collect_garbage, self.homes))
            await store.sweep()
            found = {**await self._sandbox_counts(), **self._row_counts(), **self._file_counts()}
            if not any(found.values()) or time.monotonic() > ends_at:
                store.close()
                return found
            await asyncio.sleep(POLL_S)

    async def _sandbox_counts(self) -> dict[str, int]:
        if self.kubeconfig is None:
            return {"containers": self._container_count(), "cgroups": self._cgroup_count()}
        namespace = KubernetesConfig().namespace
        async with ClusterAdmin(self.kubeconfig) as admin:
            leases = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
            return {
                "Pods": len(await admin.pods(namespace)),
                "Leases": len((await admin.call("GET", leases))["items"]),
            }

    def _container_count(self) -> int:
        files = [home / "install-id" for home in self.homes]
        labels = [f"{INSTALL_LABEL}={file.read_text()}" for file in files if file.exists()]
        if not labels:
            return 0
        client, _ = connect()
        try:
            return sum(
                len(client.containers(all=True, filters={"label": label})) for label in labels
            )
        finally:
            client.close()

    def _cgroup_count(self) -> int:
        cgroups = find_cgroups()
        hierarchies = cgroups.hierarchies if cgroups else ()
        found = {
            path.name
            for each in hierarchies
            for pid in self.pids
            for path in each.folder.glob(f"{pid}-*")
        }
        return len(found)

    def _row_counts(self) -> dict[str, int]:
        engine = postgresql.create_pool(postgresql.database_url(self.database_url), 1)
        # `Leftovers.count` has a lease of its own.
        living = select(func.count()).select_from(PROCESSES).where(~PROCESSES.c.is_dead)
        running = select(func.count()).select_from(RUNS).where(RUNS.c.status == "running")
        with engine.connect() as connection:
            rows = {
                "leases of processes": connection.scalars(living).one() - 1,
                "unfinished runs": connection.scalars(running).one(),
            }
        engine.dispose()
        return rows

    def _file_counts(self) -> dict[str, int]:
        bucket = S3Store.from_url(
            f"s3://{BUCKET}",
            config={name.lower(): value for name, value in self.s3.environment.items()},  # type: ignore[arg-type]  # the library's names
            client_options={"allow_http": True},
        )
        parts = [path for home in self.homes for path in home.rglob(f"*{PART_SUFFIX}")]
        blobs = sum(len(batch) for batch in obstore.list(bucket))
        return {"blobs": blobs, "unfinished files": len(parts)}


async def _collect_garbage(home: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy", "gc", "--config", str(home / "config.yaml")),
        stdout=asyncio.subprocess.DEVNULL,
    )
    await process.wait()
