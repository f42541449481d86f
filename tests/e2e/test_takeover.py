"""Real server processes that share a PostgreSQL database and a cluster's sandboxes. One is killed,
and another one goes on with its run."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest
from openai import APIConnectionError, AsyncOpenAI, InternalServerError
from openai.types.chat import ChatCompletion

from proxy.models.scripted import call, text_reply, tool_reply
from proxy.store import postgresql
from tests.e2e.proxy_process import Server, serving
from tests.fakes.backend import Held, Item, ScriptedBackend, scripted_backend
from tests.fakes.kubernetes_cluster import NAMESPACE, FakeCluster, fake_cluster, write_kubeconfig
from tests.fakes.waiting import until
from tests.postgresql import PostgresqlServer, new_database, server_for_tests

VARIABLE = "LLM_SANDBOX_STORE__DATABASE_URL"
TIMEOUT_S = 120
"""Beyond the lease of a process, after which the others know that it was killed."""
USAGE = {"prompt_tokens": 10, "completion_tokens": 1, "total_tokens": 11}
MARK = "echo first > /testbed/mark"
COUNTED = (
    "echo ran >> /mnt/count; echo > /mnt/begun; until [ -e /mnt/gate ]; do sleep 0.1; done;"
    " cat /testbed/mark"
)


@pytest.fixture(scope="module")
def database() -> Iterator[PostgresqlServer]:
    with server_for_tests() as found:
        yield found


@dataclass
class Replicas:
    """Two servers, the cluster of their sandboxes, and the directory that all sandboxes see."""

    servers: Sequence[Server]
    cluster: FakeCluster
    backend: ScriptedBackend
    shared: Path
    earlier_pods: frozenset[str]
    """The Pods with which the servers have checked the cluster."""
    answers: list["asyncio.Task[ChatCompletion]"] = field(default_factory=list)

    def ask(self, server: int, max_retries: int = 10, **request: Any) -> None:
        """Send the request to a server, and add a task with its answer to `answers`."""
        client = AsyncOpenAI(
            base_url=f"{self.servers[server].url}/v1", api_key="any", max_retries=max_retries
        )

        async def answer() -> ChatCompletion:
            async with client:
                return await client.chat.completions.create(
                    model="fake-model",
                    messages=[{"role": "user", "content": "How many?"}],
                    extra_headers={"Idempotency-Key": "order-1"},
                    **request,
                )

        self.answers.append(asyncio.create_task(answer()))

    async def kill_the_first(self) -> None:
        """Kill the first server."""
        self.servers[0].process.kill()
        await self.servers[0].ended()
        await asyncio.wait(self.answers)
        assert all(isinstance(each.exception(), APIConnectionError) for each in self.answers)

    async def begun(self) -> None:
        """Wait until COUNTED has begun."""
        await until((self.shared / "begun").exists)

    def open_gate(self) -> None:
        """Let COUNTED end."""
        (self.shared / "gate").touch()

    @property
    def count(self) -> int:
        """The number of executions of COUNTED."""
        return len((self.shared / "count").read_text().splitlines())

    def observations(self, request: int) -> list[str]:
        """Return the tool results in a request to the model."""
        messages = self.backend.requests[request].body["messages"]
        return [message["content"] for message in messages if message["role"] == "tool"]

    @property
    def sandboxes(self) -> list[str]:
        """The names of all sandboxes that were started for requests."""
        return [name for name in self.cluster.pods if name not in self.earlier_pods]


def warnings(completion: ChatCompletion) -> list[str]:
    return [each["code"] for each in completion.model_dump()["sandbox"].get("warnings", [])]


def mark_dead(database: PostgresqlServer, schema: str) -> None:
    """Mark the process of the running run as dead, as another server would."""
    engine = postgresql.create_pool(postgresql.database_url(database.url), 1)
    with engine.begin() as connection:
        connection.exec_driver_sql(
            f'UPDATE "{schema}".processes SET is_dead = true'
            f' WHERE id IN (SELECT process FROM "{schema}".runs)'
        )
    engine.dispose()


@asynccontextmanager
async def replicas(
    database: PostgresqlServer, directory: Path, script: Sequence[Item]
) -> AsyncIterator[Replicas]:
    new_database(database, directory.name)
    variables = {VARIABLE: f"{database.url}?options=-csearch_path%3D{directory.name}"}
    homes, shared = [directory / "one", directory / "two"], directory / "shared"
    for each in (*homes, shared):
        each.mkdir()
    async with fake_cluster(shared) as cluster, scripted_backend(script) as backend:
        kubernetes = {
            "namespace": NAMESPACE,
            "kubeconfig": str(write_kubeconfig(cluster, directory)),
            "image": "sandbox:1",
            "agent_image": None,
            "allow_unenforced_network_policy": True,
        }
        settings = {
            "sandbox": {
                "kubernetes": kubernetes,
                "self_test": False,
                "pool": {"min_ready": 0},
            }
        }
        urls = ("kubernetes", backend.base_url, settings)
        async with (
            serving(homes[0], *urls, **variables) as one,
            serving(homes[1], *urls, **variables) as two,
        ):
            with anyio.fail_after(TIMEOUT_S):
                earlier = frozenset(cluster.pods)
                yield Replicas([one, two], cluster, backend, shared, earlier)


async def test_another_server_finishes_the_command_of_a_killed_server_without_repeating_it(
    database: PostgresqlServer, tmp_path: Path
) -> None:
    replies = [
        tool_reply(call("execute_bash", command=MARK)),
        tool_reply(
            call("execute_bash", command=COUNTED),
            call("str_replace_editor", command="create", path="/testbed/new", file_text="x"),
            call("execute_bash", command="touch /mnt/after"),
        ),
        text_reply("42"),
    ]
    script = [{**reply, "usage": USAGE} for reply in replies]
    async with replicas(database, tmp_path, script) as system:
        system.ask(0, max_retries=0)
        await system.begun()
        await system.kill_the_first()
        system.ask(1)
        system.open_gate()
        completion = await system.answers[-1]
        assert completion.choices[0].message.content == "42"
        assert warnings(completion) == ["run_taken_over"]
        assert system.count == 1
        assert len(system.sandboxes) == 1
        assert len(system.backend.requests) == 3
        assert "first" in system.observations(2)[1]
        assert all("not known" in each for each in system.observations(2)[2:])
        assert not (system.shared / "after").exists()  # the call needs the edit before it
        assert completion.model_dump()["sandbox"]["steps"] == 4
        assert completion.usage
        assert completion.usage.total_tokens == 3 * USAGE["total_tokens"]


async def test_run_continues_in_its_sandbox_if_its_server_is_killed_during_a_model_call(
    database: PostgresqlServer, tmp_path: Path
) -> None:
    script = [
        tool_reply(call("execute_bash", command=MARK)),
        tool_reply(
            call("execute_bash", command=COUNTED),
            call("str_replace_editor", command="create", path="/testbed/new", file_text="x"),
        ),
        Held(text_reply("Never said."), asyncio.Event()),
        text_reply("42"),
    ]
    async with replicas(database, tmp_path, script) as system:
        system.open_gate()
        system.ask(0, max_retries=0)
        await system.backend.arrived(3)
        await system.kill_the_first()
        system.ask(1)
        completion = await system.answers[-1]
        assert completion.choices[0].message.content == "42"
        assert warnings(completion) == ["run_taken_over"]
        assert system.count == 1
        assert len(system.sandboxes) == 1
        before, after = system.observations(2), system.observations(3)
        assert after[:2] == before[:2]
        assert "not known" in after[2]  # an edit is not made twice


@pytest.mark.parametrize("retried_at", [0, 1])
async def test_run_of_a_live_server_that_was_declared_dead_continues_in_its_sandbox(
    database: PostgresqlServer, tmp_path: Path, retried_at: int
) -> None:
    script = [
        tool_reply(call("execute_bash", command=MARK)),
        tool_reply(call("execute_bash", command=COUNTED)),
        text_reply("42"),
    ]
    async with replicas(database, tmp_path, script) as system:
        system.ask(0, max_retries=0)
        await system.begun()
        mark_dead(database, tmp_path.name)
        await asyncio.wait(system.answers)
        error = system.answers[0].exception()
        assert isinstance(error, InternalServerError)
        assert error.code == "run_lost"
        system.ask(retried_at)
        system.open_gate()
        completion = await system.answers[-1]
        assert completion.choices[0].message.content == "42"
        assert warnings(completion) == ["run_taken_over"]
        assert system.count == 1
        assert len(system.sandboxes) == 1
        assert "first" in system.observations(2)[1]


async def test_run_restarts_if_its_sandbox_is_lost_together_with_its_server(
    database: PostgresqlServer, tmp_path: Path
) -> None:
    script = [
        tool_reply(call("execute_bash", command=COUNTED)),
        tool_reply(call("execute_bash", command=COUNTED)),
        text_reply("42"),
    ]
    async with replicas(database, tmp_path, script) as system:
        system.ask(0, max_retries=0)
        await system.begun()
        await system.kill_the_first()
        (pod,) = (system.cluster.pods[name] for name in system.sandboxes)
        pod.process.kill()
        system.ask(1)
        system.open_gate()
        completion = await system.answers[-1]
        assert completion.choices[0].message.content == "42"
        assert warnings(completion) == ["run_restarted"]
        assert (system.count, len(system.sandboxes)) == (2, 2)
