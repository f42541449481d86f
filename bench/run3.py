"""The three-turn script through the whole house, from a client's request to its answer.

Bash, an answer file by the editor, submit: on a model that takes no time and a sandbox that is
not there yet. The reference does the same work on the same model and image; its imports, which it
pays in every process, are left out.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import httpx

from bench.backend import ANSWER
from bench.places import places
from bench.plan import Plan, Way, interleave
from bench.servers import Server, model_backend, process, proxy
from bench.table import Part, Row
from bench.venvs import PeerMissingError, peer_python

ROUNDS = 10
OURS_PER_ROUND = 5
"""The reference needs 50 times as long, and varies little."""
TARGETS_S = {"docker": 1.2, "bubblewrap": 0.4}
PEER, PEER_RETURNS = "reference, to its answer", "reference, until it returns"
PACKAGES = ("llm-in-sandbox==0.2.0", "mcp>=2.2,<3")
"""litellm, which the reference needs, fails without mcp as soon as tools are given."""
DRIVER = Path(__file__).parent / "peers" / "reference.py"
QUESTION = {"model": "bench", "messages": [{"role": "user", "content": "What is 6 * 7?"}]}
SETTLE_S = 0.5
"""A sandbox is removed after the answer: the next start is not to be slowed by that."""
REFERENCE_TIMEOUT_S = 120


async def measure(plan: Plan) -> list[Part]:
    """Every backend beside the reference."""
    async with AsyncExitStack() as opened:
        async with places(plan.image) as found:
            names = list(found.backends)
        missing = list(found.missing)
        model = await opened.enter_async_context(model_backend())
        ways: dict[str, Way] = {}
        for name in names:
            server = await opened.enter_async_context(proxy(model, sandbox=name, image=plan.image))
            way = await opened.enter_async_context(_ours(name, server))
            ways |= {f"{name} {number}": way for number in range(OURS_PER_ROUND)}
        try:
            if "docker" in names and plan.reference:
                python = await asyncio.to_thread(peer_python, "reference", *PACKAGES)
                driver = _reference(python, model, plan.image)
                ways[PEER] = await opened.enter_async_context(driver)
        except (PeerMissingError, RuntimeError) as error:
            missing.append(Row(PEER, note=str(error).splitlines()[-1]))
        measured = await interleave(plan.rounds or ROUNDS, ways)
    rows = [Row(name, measured[name], "s", TARGETS_S[name], (PEER, PEER_RETURNS)) for name in names]
    peers = [Row(name, measured[name], "s") for name in (PEER, PEER_RETURNS) if name in measured]
    return [Part("run3: three turns, cold sandbox", [*rows, *peers, *missing])]


@asynccontextmanager
async def _ours(name: str, server: Server) -> AsyncIterator[Way]:
    async with httpx.AsyncClient(base_url=server.base_url, timeout=60) as client:
        yield partial(_ask, name, client)


async def _ask(name: str, client: httpx.AsyncClient) -> Mapping[str, float]:
    started = time.perf_counter()
    response = await client.post("/chat/completions", json=QUESTION)
    took_s = time.perf_counter() - started
    if response.status_code != 200:
        raise RuntimeError(f"{name}: {response.status_code} {response.text[:500]}")
    answer = response.json()["choices"][0]["message"]["content"]
    if answer != ANSWER:
        raise RuntimeError(f"{name} answered {answer!r}")
    await asyncio.sleep(SETTLE_S)
    return {name: took_s}


@asynccontextmanager
async def _reference(python: Path, model: Server, image: str) -> AsyncIterator[Way]:
    async with process(
        [str(python), str(DRIVER), model.base_url, image],
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    ) as driver:
        assert driver.stdin
        assert driver.stdout
        streams = (driver.stdin, driver.stdout)
        await _reference_run(*streams)  # whether it works here at all
        yield partial(_reference_run, *streams)


async def _reference_run(
    stdin: asyncio.StreamWriter, stdout: asyncio.StreamReader
) -> Mapping[str, float]:
    stdin.write(b"\n")
    run = json.loads(await _line(stdout))
    if run["answer"] != ANSWER:
        raise RuntimeError(f"the reference answered {run!r}")
    return {PEER: run["to_answer_s"], PEER_RETURNS: run["to_answer_s"] + run["removal_s"]}


async def _line(stdout: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(REFERENCE_TIMEOUT_S):
        line = await stdout.readline()
    if not line:
        raise RuntimeError("the reference's process ended")
    return line
