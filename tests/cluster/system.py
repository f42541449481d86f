"""The whole system on the test cluster: two proxy processes that share PostgreSQL and S3, behind a
balancer, with sandboxes in Pods; a client of OpenAI's SDK; and what they may leave behind."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx
import obstore
from obstore.store import S3Store
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import URL, extract, func, select

from proxy.models.scripted import call, text_reply, tool_reply
from proxy.store import postgresql
from proxy.store.blobs import GRACE_S, PART_SUFFIX
from proxy.store.store import Store
from proxy.store.tables import PROCESSES, RUNS
from tests.balancer import running_balancer
from tests.cluster.cluster import Cluster
from tests.cluster.command_counter import CommandCounter, command_counter
from tests.cluster.running import AGENT_IMAGE, TEST_IMAGE
from tests.e2e.proxy_process import Server, run, serving, state_dir, write_config
from tests.fakes.backend import Item, ScriptedBackend, scripted_backend
from tests.postgresql import PostgresqlServer, new_database
from tests.s3.server import BUCKET, S3Server
from tests.sandbox_runtime.backends.cluster import ClusterAdmin

ANSWER = "42"
LONG_AGO = "2021-01-01T00:00:00.000000Z"
MAX_RETRIES = 20
TIMEOUT_S = 180
"""Time limit of a test's wait, far beyond every lease."""
START_TIMEOUT_S = 150.0
"""A server starts two Pods for the network check, then one, and each may take 60 s."""
GONE_TIMEOUT_S = 90
Script = Callable[["System", dict[str, Any]], Item]
"""Chooses the model's reply to a request's body."""


@dataclass(frozen=True, slots=True)
class Servers:
    """The cluster and the servers that the replicas of all tests use."""

    cluster: Cluster
    database: PostgresqlServer
    s3: S3Server


@dataclass
class System:
    """Two replicas and their surroundings, for one test."""

    cluster: Cluster
    admin: ClusterAdmin
    namespace: str
    counter: CommandCounter
    backend: ScriptedBackend
    replicas: list[Server]
    client: AsyncOpenAI
    """OpenAI's SDK at the balancer. The first connection goes to the first replica."""
    refusals: list[httpx.Response] = field(default_factory=list)
    """The responses that the client repeated its request after, or got in the end."""

    killed: list[Server] = field(default_factory=list)

    warnings: dict[str, list[str]] = field(default_factory=dict)
    """The codes of the warnings of each answer, by idempotency key."""

    def ask(self, key: str) -> "asyncio.Task[str | None]":
        """Send a chat request with an idempotency key, and return a task with the answer."""

        async def answer() -> str | None:
            completion = await self.client.chat.completions.create(
                model="fake-model",
                messages=[{"role": "user", "content": key}],
                extra_headers={"Idempotency-Key": key},
            )
            warnings = completion.model_dump()["sandbox"].get("warnings", [])
            self.warnings[key] = [warning["code"] for warning in warnings]
            return completion.choices[0].message.content

        return asyncio.create_task(answer())

    def kill(self, replica: Server) -> None:
        """Kill a replica with SIGKILL."""
        self.killed.append(replica)
        replica.process.send_signal(signal.SIGKILL)

    async def node_of_the_sandbox(self) -> str:
        """Return the node of the only sandbox."""
        return str((await self._pod_of_the_sandbox())["spec"]["nodeName"])

    async def _pod_of_the_sandbox(self) -> dict[str, Any]:
        pods = await self.admin.pods(self.namespace)
        (pod,) = (pod for pod in pods if "deletionTimestamp" not in pod["metadata"])
        return pod

    async def delete_the_sandbox(self) -> None:
        """Delete the Pod of the only sandbox."""
        pod = await self._pod_of_the_sandbox()
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod['metadata']['name']}"
        await self.admin.call("DELETE", path)

    def accepted_sandboxes(self, key: str) -> list[str]:
        """Return the sandboxes of the outputs in the last model call of a run: those whose results
        were accepted."""
        calls = [request.body["messages"] for request in self.backend.requests]
        last = [messages for messages in calls if _question(messages) == key][-1]
        lines = [line for message in last for line in str(message["content"]).splitlines()]
        return [line.split()[-1] for line in lines if line.startswith("ran in ")]

    def require_ordinary_refusals(self) -> None:
        """Fail unless each refusal tells clients to repeat the request."""
        for response in self.refusals:
            assert response.status_code in (429, 502, 503, 504), response.text
            if response.status_code in (429, 503):
                assert int(response.headers["retry-after"]) > 0, response.text


async def count_ended_runs(replica: Server) -> int:
    """Return the number of runs that have ended in a replica since its start."""
    async with httpx.AsyncClient() as client:
        metrics = (await client.get(f"{replica.url}/metrics")).text
    return sum(
        int(sample.value)
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name == "llm_sandbox_runs_total"
    )


def _question(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the first message of a user."""
    return next(str(message["content"]) for message in messages if message["role"] == "user")


def command_until_it_succeeds(then: str) -> Script:
    """Return a script that runs one command, and answers when its output is there. If the command
    was begun before, in a sandbox that was lost, it runs without `then`."""

    def choose(system: System, body: dict[str, Any]) -> Item:
        if any("ran in " in str(m["content"]) for m in body["messages"] if m["role"] == "tool"):
            return text_reply(ANSWER)
        name = _question(body["messages"])
        command = system.counter.command(name, "true" if system.counter.sandboxes(name) else then)
        return tool_reply(call("execute_bash", command=command))

    return choose


@asynccontextmanager
async def running_system(
    servers: Servers, home: Path, script: Script, **sandbox: Any
) -> AsyncIterator[System]:
    """Run the system for one test, with changed settings of `sandbox.kubernetes`. Afterwards fail
    if it left anything in the cluster, the database or the bucket."""
    namespace = f"sandboxes-{home.name.replace('_', '-')[:40].strip('-')}"
    database = new_database(servers.database, home.name)
    variables = {
        **servers.s3.environment,
        "LLM_SANDBOX_STORE__DATABASE_URL": (
            f"{servers.database.url}?options=-csearch_path%3D{home.name}"
        ),
        "LLM_SANDBOX_STORE__BLOBS_URL": f"s3://{BUCKET}/{home.name}",
    }
    settings = _settings(servers.cluster, namespace, sandbox)
    systems: list[System] = []
    refused: list[httpx.Response] = []
    async with AsyncExitStack() as opened:
        admin = await opened.enter_async_context(ClusterAdmin(servers.cluster.kubeconfig))
        await admin.apply("sandboxes.yaml", namespace)
        counter = await opened.enter_async_context(command_counter(servers.cluster.host_address))
        backend = await opened.enter_async_context(
            scripted_backend(lambda body: script(systems[0], body))
        )
        homes = [home / "one", home / "two"]
        replicas: list[Server] = []
        async with anyio.create_task_group() as starts:
            for each in homes:
                each.mkdir()
                starts.start_soon(_start, opened, replicas, each, backend, settings, variables)
        ports = [int(replica.url.rpartition(":")[2]) for replica in replicas]
        balancer = await opened.enter_async_context(running_balancer(ports))
        system = System(
            servers.cluster,
            admin,
            namespace,
            counter,
            backend,
            replicas,
            _client(opened, balancer.port, refused),
            refused,
        )
        systems.append(system)
        yield system
        system.require_ordinary_refusals()
        await _stop(system, homes[0], settings)
        await _require_nothing_left(system, home, database, servers.s3)


def _settings(cluster: Cluster, namespace: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    kubernetes = {
        "namespace": namespace,
        "kubeconfig": str(cluster.kubeconfig),
        "image": TEST_IMAGE,
        "agent_image": AGENT_IMAGE,
        "allow_unenforced_network_policy": True,
        **changes,
    }
    return {
        "server": {"drain_s": 60},
        "sandbox": {
            "backend": "kubernetes",
            "kubernetes": kubernetes,
            "self_test": False,
            # The only Pods are those of requests.
            "pool": {"min_ready": 0},
        },
        "isolation": {"memory_mib": 256, "cpus": 0.2},
    }


async def _start(
    opened: AsyncExitStack,
    replicas: list[Server],
    home: Path,
    backend: ScriptedBackend,
    settings: Mapping[str, Any],
    variables: Mapping[str, str],
) -> None:
    server = serving(
        home,
        "kubernetes",
        backend.base_url,
        settings,
        start_timeout_s=START_TIMEOUT_S,
        **variables,
    )
    replicas.append(await opened.enter_async_context(server))


def _client(opened: AsyncExitStack, port: int, refused: list[httpx.Response]) -> AsyncOpenAI:
    async def note(response: httpx.Response) -> None:
        if response.is_error:
            await response.aread()
            refused.append(response)

    client = AsyncOpenAI(
        base_url=f"http://127.0.0.1:{port}/v1",
        api_key="any",
        max_retries=MAX_RETRIES,
        http_client=DefaultAsyncHttpxClient(event_hooks={"response": [note]}),
    )
    opened.push_async_callback(client.close)
    return client


async def _stop(system: System, home: Path, settings: Mapping[str, Any]) -> None:
    """Stop the replicas, and remove what those left that were killed: after their Leases have
    expired, which the test brings about."""
    for replica in system.replicas:
        if replica.process.returncode is None and replica not in system.killed:
            replica.process.send_signal(signal.SIGTERM)
        with anyio.fail_after(TIMEOUT_S):
            expected = signal.SIGKILL if replica in system.killed else signal.SIGTERM
            assert await replica.ended() == -expected
    for lease in await _leases(system):
        assert system.killed, "a replica has left its Lease"
        path = f"{_leases_path(system)}/{lease['metadata']['name']}"
        await system.admin.patch(path, {"spec": {"renewTime": LONG_AGO}})
    config = write_config(home, dict(settings))
    ended = await run(home, "gc", "--config", config, timeout_s=TIMEOUT_S)
    assert ended.returncode == 0, ended.stderr


async def _require_nothing_left(system: System, home: Path, database: URL, s3: S3Server) -> None:
    """Fail unless the cluster, the database and the bucket are empty, soon and after a sweep."""
    store = Store(home / "sweep", database_url=database)
    left: dict[str, object] = {}
    with anyio.move_on_after(GONE_TIMEOUT_S):
        while True:
            await store.sweep()
            pods = await system.admin.pods(system.namespace)
            left = {
                "Pods": [pod["metadata"]["name"] for pod in pods],
                "Leases": await _leases(system),
                **_unfinished_rows(database, store.process.id),
                "blobs": _blobs(s3, home.name),
                "unfinished files": await _unfinished_files(home, database),
            }
            if not any(left.values()):
                break
            await anyio.sleep(0.5)
    store.close()
    assert not any(left.values()), left


async def _leases(system: System) -> list[dict[str, Any]]:
    return list((await system.admin.call("GET", _leases_path(system)))["items"])


def _leases_path(system: System) -> str:
    return f"/apis/coordination.k8s.io/v1/namespaces/{system.namespace}/leases"


async def _unfinished_files(home: Path, database: URL) -> list[Path]:
    """Return the unfinished files of the replicas that a sweep in two hours would leave. A sweep
    keeps files that are newer than an hour."""
    found = []
    for replica_home in (home / "one", home / "two"):
        directory = state_dir(replica_home)
        store = Store(directory, database_url=database, now=lambda: time.time() + 2 * GRACE_S)
        await store.sweep()
        store.close()
        found += directory.rglob(f"*{PART_SUFFIX}")
    return found


def _unfinished_rows(database: URL, sweeper: str) -> dict[str, list[str]]:
    """Return the running runs, and the processes that have a lease, without the process `sweeper`.
    Rows of dead processes stay for a day."""
    runs = select(RUNS.c.id).where(RUNS.c.status == "running")
    row, now = PROCESSES.c, extract("epoch", func.clock_timestamp())
    processes = select(row.id).where(~row.is_dead, row.expires_at > now, row.id != sweeper)
    engine = postgresql.create_pool(database, 1)
    with engine.connect() as connection:
        found = {
            "runs": list(connection.scalars(runs)),
            "processes": list(connection.scalars(processes)),
        }
    engine.dispose()
    return found


def _blobs(s3: S3Server, prefix: str) -> list[str]:
    bucket = S3Store.from_url(
        f"s3://{BUCKET}/{prefix}",
        config={name.lower(): value for name, value in s3.environment.items()},
        client_options={"allow_http": True},
    )
    return [found["path"] for batch in obstore.list(bucket) for found in batch]
