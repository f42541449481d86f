"""Many clients send requests to two servers behind a load balancer. Every minute one of the servers
is killed: `python -m bench.replicas --minutes 10 --clients 64`.

The servers share PostgreSQL and S3. The clients use OpenAI's SDK. Each chat request has its own
idempotency key and expects its own answer; every tenth request stores a file instead. The exit code
is 1 if an answer was lost or wrong, or if anything is left at the end: sandboxes, leases,
unfinished runs, files.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, OpenAIError

from bench.instant_model import call_completion, completion, json_response, serve
from bench.leftovers import Leftovers
from bench.servers import free_port, run_server
from bench.table import percentile
from proxy.config import DockerConfig
from tests.balancer import running_balancer
from tests.postgresql import find_programs, running_server
from tests.s3.server import BUCKET, running_s3_server

REPLICAS = 2
LOG = "log"
MAX_LOG_CHARS = 4000
MODEL_DELAY_S = (0.5, 2.5)
"""The shortest and the longest duration of a model call, in seconds."""
FACTOR = 7
"""Each request has a number. The model multiplies it by this factor, in a sandbox."""
FILE_EVERY = 10
FILE_BYTES = 100_000
MAX_RETRIES = 40
"""Maximum number of the SDK's retries of a request: enough for several minutes."""
REQUEST_TIMEOUT_S = 120.0


@dataclass
class Outcomes:
    """The results of all clients together."""

    answers: int = 0
    files: int = 0
    retried: int = 0
    """Requests that got their answer after at least one retry."""
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    """Number of failed attempts by kind, those that the SDK retried included."""
    seconds: list[float] = field(default_factory=list)
    seconds_of_retried: list[float] = field(default_factory=list)
    kills: int = 0

    def count_answer(self, took_s: float, attempts: int) -> None:
        """Count a request that got its answer."""
        self.seconds.append(took_s)
        if attempts > 1:
            self.retried += 1
            self.seconds_of_retried.append(took_s)


class CountingTransport(httpx.AsyncHTTPTransport):
    """Counts the attempts of a client's current request, and the failed attempts of all requests by
    kind."""

    def __init__(self, failures: Counter[str]) -> None:
        super().__init__()
        self.attempts = 0
        self._failures = failures

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.attempts += 1
        try:
            response = await super().handle_async_request(request)
        except httpx.TransportError as error:
            self._failures[type(error).__name__] += 1
            raise
        if response.is_error:
            code = json.loads(await response.aread())["error"]["code"]
            self._failures[f"{response.status_code} {code}"] += 1
        return response


async def _answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """Answer as a model that multiplies a number with a command in a sandbox."""
    await asyncio.sleep(random.uniform(*MODEL_DELAY_S))
    results = [message for message in body["messages"] if message["role"] == "tool"]
    found = re.search(r"product (\d+)", str(results[-1]["content"])) if results else None
    if found:
        reply = completion({"role": "assistant", "content": found[1]}, "stop")
    else:  # the first turn, or the sandbox was lost
        (asked,) = (m["content"] for m in body["messages"] if m["role"] == "user")
        if match := re.fullmatch(r"Multiply (\d+)", str(asked)):
            command = f"sleep 0.5; echo product $(({match[1]} * {FACTOR}))"
            reply = call_completion("execute_bash", {"command": command})
        else:  # the proxy's request for the model's default instruction
            reply = completion({"role": "assistant", "content": "Hi"}, "stop")
    writer.write(json_response(reply))


async def _ask(
    client: AsyncOpenAI, number: int, transport: CountingTransport, outcomes: Outcomes
) -> None:
    transport.attempts, began = 0, time.monotonic()
    try:
        got = await client.chat.completions.create(
            model="bench",
            messages=[{"role": "user", "content": f"Multiply {number}"}],
            extra_headers={"Idempotency-Key": f"request-{number}"},
        )
    except OpenAIError as error:
        outcomes.lost.append(f"request {number}: {error!r}")
        return
    outcomes.answers += 1
    outcomes.count_answer(time.monotonic() - began, transport.attempts)
    if got.choices[0].message.content != str(number * FACTOR):
        outcomes.wrong.append(f"request {number}: {got.choices[0].message.content!r}")


async def _store_file(
    client: AsyncOpenAI, number: int, transport: CountingTransport, outcomes: Outcomes
) -> None:
    content = random.randbytes(FILE_BYTES)
    transport.attempts, began = 0, time.monotonic()
    try:
        file = await client.files.create(file=(f"{number}.bin", content), purpose="user_data")
        stored = (await client.files.content(file.id)).content
    except OpenAIError as error:
        outcomes.lost.append(f"file {number}: {error!r}")
        return
    outcomes.files += 1
    outcomes.count_answer(time.monotonic() - began, transport.attempts - 1)
    if stored != content:
        outcomes.wrong.append(f"file {number}: {len(stored)} bytes")


async def _run_client(
    base_url: str, numbers: "itertools.count[int]", ends_at: float, outcomes: Outcomes
) -> None:
    """Send one client's requests, one after the other, until `ends_at` of `time.monotonic`."""
    transport = CountingTransport(outcomes.failures)
    async with AsyncOpenAI(
        base_url=base_url,
        api_key="any",
        max_retries=MAX_RETRIES,
        timeout=REQUEST_TIMEOUT_S,
        http_client=DefaultAsyncHttpxClient(transport=transport),
    ) as client:
        while time.monotonic() < ends_at:
            number = next(numbers)
            work = _store_file if number % FILE_EVERY == 0 else _ask
            await work(client, number, transport, outcomes)


@dataclass
class Replica:
    """A server that is started again after each kill."""

    home: Path
    port: int
    environment: Mapping[str, str]
    pids: list[int] = field(default_factory=list)
    """The ids of the server's processes; the last one runs now."""
    is_stopping: bool = False
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the server answers."""
    _ends: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Run the server until `stop`, and start it again after each `kill`."""
        config = str(self.home / "config.yaml")
        command = [sys.executable, "-m", "proxy", "serve", "--config", config]
        while not self.is_stopping:
            self._ends.clear()
            async with run_server(
                [*command, "--port", str(self.port)],
                self.port,
                path="/health/ready",
                env=self.environment,
                log_file=self.home / LOG,
            ) as server:
                self.pids.append(server.pid)
                self.ready.set()
                await self._ends.wait()
                self.ready.clear()

    def kill(self) -> None:
        """Send SIGKILL to the server, which must be ready."""
        os.kill(self.pids[-1], signal.SIGKILL)
        self._ends.set()

    def stop(self) -> None:
        """Stop the server with SIGTERM, for good."""
        self.is_stopping = True
        self._ends.set()


async def _kill_in_turn(
    replicas: Sequence[Replica], every_s: float, ends_at: float, outcomes: Outcomes
) -> None:
    """Kill the replicas in turn, one every `every_s` seconds and only while all are ready, until
    `ends_at` of `time.monotonic`."""
    for replica in itertools.cycle(replicas):
        if time.monotonic() + every_s > ends_at:
            return
        await asyncio.sleep(every_s)
        for each in replicas:
            await each.ready.wait()
        replica.kill()
        outcomes.kills += 1


@asynccontextmanager
async def _model() -> AsyncIterator[str]:
    server = await asyncio.start_server(partial(serve, _answer), "127.0.0.1", 0, backlog=1024)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        server.close()


def _config(given: argparse.Namespace, directory: Path, model_url: str) -> dict[str, Any]:
    kubernetes = {
        "kubeconfig": given.kubeconfig and str(given.kubeconfig),
        "image": given.image,
        # Only the network check would differ.
        "allow_unenforced_network_policy": True,
    }
    return {
        "server": {"data_dir": str(directory), "drain_s": 30},
        "backend": {"base_url": model_url, "tool_support": "always"},
        "sandbox": {
            "backend": given.sandbox,
            "docker": {"image": given.image},
            "kubernetes": kubernetes,
        },
        "isolation": {"memory_mib": 128, "cpus": given.cpus},
    }


async def _measure(given: argparse.Namespace, directory: Path) -> int:
    programs = find_programs()
    if programs is None:
        raise SystemExit("PostgreSQL is missing: Debian's package is postgresql")
    outcomes = Outcomes()
    async with AsyncExitStack() as opened:
        database = opened.enter_context(running_server(programs))
        s3 = opened.enter_context(running_s3_server())
        model_url = await opened.enter_async_context(_model())
        os.environ.update(s3.environment)  # the servers', and those of `Leftovers`
        environment = {
            "LLM_SANDBOX_STORE__DATABASE_URL": database.url,
            "LLM_SANDBOX_STORE__BLOBS_URL": f"s3://{BUCKET}",
        }
        replicas = []
        for number in range(REPLICAS):
            home = directory / str(number)
            home.mkdir()
            config = json.dumps(_config(given, home, model_url))
            (home / "config.yaml").write_text(config, encoding="utf-8")
            replicas.append(Replica(home, free_port(), environment))
        balancer = await opened.enter_async_context(
            running_balancer([each.port for each in replicas])
        )
        base_url = f"http://127.0.0.1:{balancer.port}/v1"
        running = [asyncio.create_task(replica.run()) for replica in replicas]
        for replica in replicas:
            await replica.ready.wait()
        ends_at = time.monotonic() + given.minutes * 60
        numbers = itertools.count(1)
        async with asyncio.TaskGroup() as clients:
            for _ in range(given.clients):
                clients.create_task(_run_client(base_url, numbers, ends_at, outcomes))
            clients.create_task(_kill_in_turn(replicas, given.kill_every, ends_at, outcomes))
        async with AsyncOpenAI(base_url=base_url, api_key="any", max_retries=MAX_RETRIES) as client:
            for file in [each async for each in client.files.list()]:
                await client.files.delete(file.id)
        for replica in replicas:
            replica.stop()
        await asyncio.gather(*running)
        homes, pids = (
            [each.home for each in replicas],
            [pid for each in replicas for pid in each.pids],
        )
        cluster = given.kubeconfig if given.sandbox == "kubernetes" else None
        left = await Leftovers(homes, pids, database.url, s3, cluster).count()
    _report(given, outcomes, left)
    for home in homes:
        _, traceback, text = (home / LOG).read_text(errors="replace").partition("Traceback")
        sys.stdout.write((traceback + text)[:MAX_LOG_CHARS])
    return 1 if outcomes.wrong or outcomes.lost or any(left.values()) else 0


def _report(given: argparse.Namespace, outcomes: Outcomes, left: Mapping[str, int]) -> None:
    def times(seconds: list[float]) -> str:
        if not seconds:
            return "none"
        worst = f"p99 {percentile(seconds, 99):.1f} s, at most {max(seconds):.1f} s"
        return f"median {statistics.median(seconds):.1f} s, {worst}"

    failures = ", ".join(f"{kind}: {count}" for kind, count in outcomes.failures.most_common())
    lines = [
        f"{REPLICAS} servers, {given.clients} clients, {given.sandbox}, {given.minutes:g} minutes,"
        f" {outcomes.kills} kills",
        f"answers: {outcomes.answers}, files: {outcomes.files}; after a retry: {outcomes.retried}",
        f"wrong: {len(outcomes.wrong)}, lost: {len(outcomes.lost)}",
        *(outcomes.wrong + outcomes.lost)[:20],
        f"failed attempts: {failures or 'none'}",
        f"time to the answer: {times(outcomes.seconds)}",
        f"with a retry: {times(outcomes.seconds_of_retried)}",
        f"left: {', '.join(f'{count} {kind}' for kind, count in left.items())}",
    ]
    sys.stdout.write("\n".join(lines) + "\n")


def main() -> int:
    """Run the measurement, print its report and return the exit code."""
    parser = argparse.ArgumentParser("python -m bench.replicas", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="default: %(default)s")
    parser.add_argument("--kill-every", type=float, default=60, help="seconds (%(default)s)")
    parser.add_argument("--clients", type=int, default=64, help="default: %(default)s")
    kinds = ("bubblewrap", "docker", "kubernetes")
    parser.add_argument("--sandbox", choices=kinds, default="bubblewrap")
    parser.add_argument("--image", default=DockerConfig().image, help="default: %(default)s")
    parser.add_argument("--cpus", type=float, default=0.2, help="of a sandbox (%(default)s)")
    parser.add_argument("--kubeconfig", type=Path, help="for kubernetes; its nodes have the images")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-replicas-") as directory:
        return asyncio.run(_measure(given, Path(directory)))


if __name__ == "__main__":
    sys.exit(main())
