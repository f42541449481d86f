"""Upload and download of small and large files, and of one gigabyte."""

import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from docker.models.containers import Container

from bench.backends import BenchBackend, Kind, working_backends
from bench.gigabyte import measure_gigabyte
from bench.plain_docker import PlainDocker, plain_container
from bench.plan import Measurement, Plan, interleave, measure_ms
from bench.runtimes import (
    LLM_BUBBLEWRAP,
    LLM_DOCKER,
    LLM_POOL,
    REFERENCE,
    SWE_REX,
    PeerRuntime,
    left_out_peer_rows,
    peer_measurements,
    runtimes,
    start_all,
)
from bench.sandboxes import fresh_sandbox
from bench.table import TablePart, comparison_part, sample_key
from sandbox_runtime.sandbox import Sandbox

MAX_SMALL_MS, MIN_LARGE_MB_PER_S = 5, 80
LARGE_MB = 100
PIECE_BYTES = 1 << 20
PLAIN = "docker cp (SDK)"
PEERS: Mapping[Kind, tuple[str, ...]] = {
    "docker": (PLAIN, REFERENCE, SWE_REX, LLM_DOCKER),
    "bubblewrap": (PLAIN, REFERENCE, SWE_REX, LLM_BUBBLEWRAP),
}


@dataclass(frozen=True, slots=True)
class TransferLoad:
    """A host file, and the number of times that it is uploaded and downloaded."""

    size_text: str
    source: Path
    rounds: int

    @property
    def path(self) -> str:
        """The path in the sandbox. Its directory has no other files."""
        return f"/testbed/{self.source.name}.d/{self.source.name}"

    @property
    def quantities(self) -> tuple[str, str]:
        """The names of the measured quantities: upload and download."""
        return f"files: {self.size_text} in", f"files: {self.size_text} out"

    def durations_by_row_name(self, name: str, in_ms: float, out_ms: float) -> Mapping[str, float]:
        """Return the durations of an upload and a download by row name."""
        there, back = self.quantities
        return {sample_key(name, there): in_ms, sample_key(name, back): out_ms}


Transfer = Callable[[TransferLoad], Awaitable[Mapping[str, float]]]


async def measure(plan: Plan) -> list[TablePart]:
    """Measure every backend, `docker cp` and the peers."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        small = TransferLoad("1 KB", Path(name, "small"), rounds=15)
        large = TransferLoad(f"{LARGE_MB} MB", Path(name, "large"), rounds=3)
        small.source.write_bytes(b"x" * 1000)
        large.source.write_bytes(b"x" * LARGE_MB * 10**6)
        measured: dict[str, list[float]] = {}
        async with AsyncExitStack() as opened:
            found = await opened.enter_async_context(working_backends(plan.image))
            peers = await opened.enter_async_context(runtimes(plan, excluded_names=(LLM_POOL,)))
            ours = await opened.enter_async_context(_backend_transfers(found.working))
            plain = await opened.enter_async_context(_docker_transfers(plan, found.working))
            await start_all(peers)
            for load in (small, large):
                measurements: dict[str, Measurement] = {
                    who: partial(carry, load) for who, carry in (ours | plain).items()
                }
                measurements |= peer_measurements(peers, partial(_measure_peer, load))
                measured |= await interleave(
                    min(plan.rounds or load.rounds, load.rounds), measurements
                )
    names = [backend.name for backend in found.working]
    rates = {key: [LARGE_MB / (ms / 1000) for ms in took] for key, took in measured.items()}
    missing = [*found.missing_rows, *left_out_peer_rows(peers)]
    rivals = {backend.name: PEERS[backend.kind] for backend in found.working}
    smallest, fastest = dict.fromkeys(names, MAX_SMALL_MS), dict.fromkeys(names, MIN_LARGE_MB_PER_S)
    return [
        *(comparison_part(each, measured, smallest, rivals) for each in small.quantities),
        *(comparison_part(each, rates, fastest, rivals, unit="MB/s") for each in large.quantities),
        await measure_gigabyte(plan, found.working),
        *([TablePart("files: left out", missing)] if missing else []),
    ]


@asynccontextmanager
async def _backend_transfers(
    backends: Sequence[BenchBackend],
) -> AsyncIterator[dict[str, Transfer]]:
    async with AsyncExitStack() as opened:
        yield {
            backend.name: partial(
                _transfer, backend, await opened.enter_async_context(fresh_sandbox(backend))
            )
            for backend in backends
        }


async def _transfer(
    backend: BenchBackend, sandbox: Sandbox, load: TransferLoad
) -> Mapping[str, float]:
    async def read() -> AsyncIterator[bytes]:
        with load.source.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                yield piece

    in_ms = await measure_ms(sandbox.put(load.path, read()))
    with (load.source.parent / "out").open("wb") as target:

        async def write(piece: bytes) -> None:
            target.write(piece)

        out_ms = await measure_ms(sandbox.get(load.path, write, max_bytes=LARGE_MB * 10**6))
    return load.durations_by_row_name(backend.name, in_ms, out_ms)


@asynccontextmanager
async def _docker_transfers(
    plan: Plan, backends: Sequence[BenchBackend]
) -> AsyncIterator[dict[str, Transfer]]:
    if not any(backend.kind == "docker" for backend in backends):
        yield {}
        return
    async with plain_container(plan.image) as (plain, container):
        yield {PLAIN: partial(_transfer_by_docker, plain, container)}


async def _transfer_by_docker(
    plain_docker: PlainDocker, container: Container, load: TransferLoad
) -> Mapping[str, float]:
    path = f"/tmp/{load.source.name}"  # a directory that every image has
    in_ms = await measure_ms(plain_docker.put(container, load.source, path))
    out_ms = await measure_ms(plain_docker.get(container, path, load.source.parent / "out"))
    return load.durations_by_row_name(PLAIN, in_ms, out_ms)


async def _measure_peer(load: TransferLoad, runtime: PeerRuntime) -> Mapping[str, float]:
    in_ms = await runtime.order("put", source=str(load.source), path=load.path)
    target = load.source.parent / "out of a peer"
    target.mkdir(exist_ok=True)
    out_ms = await runtime.order("get", path=load.path, target=str(target))
    return load.durations_by_row_name(runtime.name, in_ms, out_ms)
