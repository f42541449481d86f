"""Startup cost: the command, the import and an idle server."""

import asyncio
import compileall
import sys
from collections.abc import Mapping
from functools import partial

from bench.backends import working_backends
from bench.plan import Measurement, Plan, interleave, measure_ms
from bench.servers import ROOT, run_instant_model, run_process, run_proxy
from bench.table import Row, TablePart

ROUNDS = 10
SERVER_ROUNDS = 5
COMMANDS = {
    "python -m proxy --help": ("-m", "proxy", "--help"),
    "import proxy.app": ("-c", "import proxy.app"),
    "import fastapi, aiohttp": ("-c", "import fastapi, aiohttp"),
    "python -c pass": ("-c", "pass"),
}
HELP, APP, LIBRARIES, NOTHING = COMMANDS
MAX_HELP_MS = 500
PACKAGES = ("proxy", "policies", "sandbox_runtime")
HEAVY_PACKAGES = ("litellm", "docker", "openai", "httpx")
LIST_HEAVY_PROGRAM = (
    f"import sys, proxy.app; print(*[m for m in {HEAVY_PACKAGES} if m in sys.modules])"
)
READY, READY_CPU, RSS = "serve: to /health", "serve: CPU to /health", "serve: RSS, idle"


async def measure(plan: Plan) -> list[TablePart]:
    """Measure the commands in turn, then the servers.

    The bytecode of PACKAGES is compiled first, as an installation does, because an environment with
    PYTHONDONTWRITEBYTECODE would compile the source at each start.
    """
    for package in PACKAGES:
        compileall.compile_dir(ROOT / package, quiet=1)
    measurements: dict[str, Measurement] = {
        name: partial(_measure_command, name) for name in COMMANDS
    }
    measured = await interleave(plan.rounds or ROUNDS, measurements)
    async with working_backends(plan.image) as found:
        names = found.kinds
    servers: dict[str, Measurement] = {
        name: partial(_measure_server, name, plan.image) for name in names
    }
    measured |= await interleave(min(plan.rounds or SERVER_ROUNDS, SERVER_ROUNDS), servers)
    heavy = await _imported_heavy_packages()
    rows = [
        Row(HELP, measured[HELP], target=MAX_HELP_MS, peers=(LIBRARIES,)),
        Row(
            APP, measured[APP], peers=(LIBRARIES,), note=f"it imports of {HEAVY_PACKAGES}: {heavy}"
        ),
        Row(LIBRARIES, measured[LIBRARIES]),
        Row(NOTHING, measured[NOTHING]),
    ]
    for name in names:
        ready, cpu, rss = _row_names(name)
        rows += [
            Row(ready, measured[ready], "s"),
            Row(cpu, measured[cpu], "s", 1.0),
            Row(rss, measured[rss], "MiB", 90),
        ]
    return [TablePart("imports: what starting costs", [*rows, *found.missing_rows])]


def _row_names(backend: str) -> tuple[str, str, str]:
    return f"{READY} ({backend})", f"{READY_CPU} ({backend})", f"{RSS} ({backend})"


async def _measure_command(name: str) -> Mapping[str, float]:
    async def run() -> None:
        async with run_process([sys.executable, *COMMANDS[name]]) as child:
            if await child.wait():
                raise RuntimeError(f"{name} failed")

    return {name: await measure_ms(run())}


async def _imported_heavy_packages() -> str:
    output = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LIST_HEAVY_PROGRAM, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await output.communicate()
    return printed.decode().strip() or "none"


async def _measure_server(backend: str, image: str) -> Mapping[str, float]:
    ready, cpu, rss = _row_names(backend)
    async with (
        run_instant_model() as model,
        run_proxy(model, sandbox=backend, image=image) as server,
    ):
        return {ready: server.ready_s, cpu: server.cpu_s(), rss: server.rss_mib()}
