"""An evaluation that was disturbed and continued has the results of an undisturbed one."""

import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

from evaluation.results import RESULTS_FILE, TRAJECTORIES_FILE, Trajectories, read_results
from evaluation.samples import Suite
from evaluation.scripted import ScriptedModel, serve_model
from evaluation.self_check import run_arguments, time_independent_part
from tests.e2e import proxy_process
from tests.e2e.leftovers import Engine, open_engine
from tests.evaluation.evaluation_process import (
    COMMAND,
    ENVIRONMENT,
    report_of,
    sandbox_eval,
    synthetic_suite,
)
from tests.fakes.server import REAL_KINDS, Kind
from tests.fakes.waiting import until
from tests.processes import bubblewrap_sandboxes, kill_sandboxes
from tests.sandbox_runtime.conformance.backends import DOCKER_IMAGE

pytest.importorskip("rich", reason="the extra `evaluation` is not installed")

COUNT = 3
TOTAL = 2 * 4 * COUNT
SUITES = ("--suites", "synthetic")
ALIVE = 8
"""The number of sandboxes of which some are killed. All are in the midst of a run."""
Reply = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


@dataclass(frozen=True)
class Undisturbed:
    """A suite, and the results of an evaluation with it that was not disturbed."""

    suite: Suite
    results: str


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return anyio.run(evaluate_undisturbed, tmp_path_factory.mktemp("undisturbed"))


async def evaluate_undisturbed(home: Path) -> Undisturbed:
    suite = await synthetic_suite(home / "data", COUNT)
    async with (
        serve_model(ScriptedModel(suite.samples).reply) as model_url,
        proxy(home / "proxy", model_url) as server,
    ):
        ended = await sandbox_eval(*arguments(suite, home / "output", server.url))
    assert ended.returncode == 0, ended.stderr
    return Undisturbed(suite, time_independent_part(await report_of(home / "output")))


def proxy(
    home: Path, model_url: str, kind: Kind = "bubblewrap", **pool: int
) -> AbstractAsyncContextManager[proxy_process.Server]:
    """Run a proxy that does not repeat failed requests of its model. `pool` are settings of its
    sandbox pool."""
    home.mkdir(exist_ok=True)
    sandbox = {"docker": {"image": DOCKER_IMAGE}, "pool": pool}
    more = {"backend": {"max_retries": 0}, "sandbox": sandbox}
    return proxy_process.serving(home, kind, model_url, more)


def arguments(suite: Suite, output: Path, url: str) -> list[str]:
    return [*run_arguments(output, suite.directory.parent, f"{url}/v1"), *SUITES]


class Disturbance:
    """The scripted model, which does something once when a certain request arrives."""

    def __init__(self, suite: Suite, when: Callable[[Mapping[str, Any], int], bool]) -> None:
        """`when` gets a request's body and its number, from 1."""
        self._model = ScriptedModel(suite.samples)
        self._when = when
        self._requests = 0
        self.act: Callable[[], None] | None = None

    async def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        self._requests += 1
        if self.act and self._when(body, self._requests):
            self.act()
            self.act = None
        return await self._model.reply(body)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
async def test_evaluation_continues_after_its_runner_was_killed(
    undisturbed: Undisturbed, tmp_path: Path, number: int
) -> None:
    suite, output = undisturbed.suite, tmp_path / "disturbed"
    model = Disturbance(suite, lambda _, request: request == TOTAL)
    async with (
        serve_model(model.reply) as model_url,
        proxy(tmp_path / "proxy", model_url) as server,
    ):
        command = [*COMMAND, *arguments(suite, output, server.url)]
        with anyio.fail_after(60):
            async with await anyio.open_process(command, env=ENVIRONMENT) as runner:
                model.act = lambda: runner.send_signal(number)
                code = await runner.wait()
        finished = len(read_results(output))
        with (output / RESULTS_FILE).open("ab") as file:
            file.write(b'{"model": "scripted-mod')  # as a kill in the midst of a write leaves it
        with (output / TRAJECTORIES_FILE).open("ab") as file:
            file.write(b'{"model": "scripted-mod')
        continued = await sandbox_eval(*arguments(suite, output, server.url))
    assert code == (130 if number == signal.SIGINT else -signal.SIGKILL)
    assert 0 < finished < TOTAL
    assert continued.returncode == 0, continued.stderr
    assert f"{TOTAL} of {TOTAL} requests; in this run: 0 infra errors" in continued.stderr
    assert len((output / RESULTS_FILE).read_text("utf-8").splitlines()) == TOTAL
    results, trajectories = read_results(output), Trajectories(output)
    assert [trajectories.get(each) is not None for each in results] == [
        each.status == "answered" for each in results
    ]
    assert time_independent_part(await report_of(output)) == undisturbed.results


async def test_evaluation_results_are_completed_by_a_second_run_after_the_proxy_was_killed(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    suite, output = undisturbed.suite, tmp_path / "disturbed"
    model = Disturbance(suite, lambda _, request: request == TOTAL)
    async with serve_model(model.reply) as model_url:
        async with proxy(tmp_path / "proxy", model_url) as server:
            model.act = server.process.kill
            ended = await sandbox_eval(*arguments(suite, output, server.url))
        broken = await report_of(output)
        async with proxy(tmp_path / "proxy", model_url) as server:
            continued = await sandbox_eval(*arguments(suite, output, server.url))
    assert ended.returncode == 3
    assert "requests have no answer because of infrastructure errors" in ended.stderr
    assert "| sandbox | connection_error |" in broken
    assert continued.returncode == 0, continued.stderr
    assert time_independent_part(await report_of(output)) == undisturbed.results


async def test_results_are_completed_by_a_second_run_after_a_sandbox_was_killed(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    suite, output = undisturbed.suite, tmp_path / "disturbed"
    model = Disturbance(suite, lambda body, _: any(has_run(each) for each in body["messages"]))
    async with (
        serve_model(model.reply) as model_url,
        proxy(tmp_path / "proxy", model_url) as server,
    ):
        model.act = lambda: kill_sandboxes(server.process.pid)
        command = [*arguments(suite, output, server.url), "--concurrency", "1"]
        ended = await sandbox_eval(*command)
        broken = await report_of(output)
        continued = await sandbox_eval(*arguments(suite, output, server.url))
    assert ended.returncode == 3
    assert "| computation | sandbox | sandbox_lost | 1 | 0 |" in broken
    assert continued.returncode == 0, continued.stderr
    assert time_independent_part(await report_of(output)) == undisturbed.results


def has_run(message: Mapping[str, Any]) -> bool:
    """Return True if a message is the observation of a command, whose sandbox therefore exists."""
    return bool(message["role"] == "tool")


class GatheredRuns:
    """The scripted model, which holds the replies to runs that have a sandbox until ALIVE of them
    wait. It then calls `act` once, and replies to all."""

    def __init__(self, suite: Suite) -> None:
        self._model = ScriptedModel(suite.samples)
        self._waiting = 0
        self._released = anyio.Event()
        self.act: Callable[[], Awaitable[None]] | None = None

    async def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.act and any(map(has_run, body["messages"])):
            self._waiting += 1
            if self._waiting == ALIVE:
                try:
                    await self.act()
                finally:
                    self.act = None
                    self._released.set()
            await self._released.wait()
        return await self._model.reply(body)


@pytest.fixture
def engine(kind: Kind, tmp_path: Path) -> Iterator[Engine | None]:
    """The Docker engine, if the sandboxes are Docker's."""
    if kind != "docker":
        yield None
        return
    with open_engine(proxy_process.state_dir(tmp_path / "proxy")) as found:
        yield found


@pytest.mark.parametrize("killed", [1, 3])
@pytest.mark.parametrize("kind", REAL_KINDS)
async def test_results_are_completed_after_the_death_of_some_of_many_sandboxes(
    kind: Kind, killed: int, engine: Engine | None, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    suite, output, home = undisturbed.suite, tmp_path / "disturbed", tmp_path / "proxy"
    model = GatheredRuns(suite)
    async with (
        serve_model(model.reply) as model_url,
        proxy(home, model_url, kind, min_ready=0) as server,
    ):

        async def kill() -> None:
            with anyio.fail_after(60):  # until the sandboxes of runs without a command are closed
                if engine:
                    state = proxy_process.state_dir(home)
                    await until(lambda: len(engine.running(state)) == ALIVE)
                    await engine.kill(engine.running(state)[:killed])
                else:
                    await until(lambda: len(bubblewrap_sandboxes(server.process.pid)) == ALIVE)
                    kill_sandboxes(server.process.pid, killed)

        model.act = kill
        command = arguments(suite, output, server.url)
        ended = await sandbox_eval(*command, "--concurrency", str(ALIVE))
        failures = [each.failures for each in read_results(output) if each.status == "infra_error"]
        continued = await sandbox_eval(*command, "--concurrency", str(ALIVE))
    assert ended.returncode == 3
    assert [[each.code for each in found] for found in failures] == [["sandbox_lost"]] * killed
    assert continued.returncode == 0, continued.stderr
    assert len((output / RESULTS_FILE).read_text("utf-8").splitlines()) == TOTAL + killed
    assert time_independent_part(await report_of(output)) == undisturbed.results
