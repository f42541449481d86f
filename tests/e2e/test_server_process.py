"""The server as a process: start, signals, kills and sweeps."""

import contextlib
import os
import resource
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import openai
import pytest

from proxy.http_server import HEADROOM
from proxy.models.scripted import call, text_reply, tool_reply
from sandbox_runtime.backends.docker import INSTALL_LABEL, OWNER_LABEL
from tests.e2e.leftovers import Engine, cgroups_of
from tests.e2e.proxy_process import Server, serving, state_dir
from tests.fakes.backend import Held, Item, by_history, scripted_backend
from tests.fakes.server import REAL_KINDS, Kind
from tests.fakes.waiting import until
from tests.processes import command_line, descendants, running
from tests.sandbox_runtime.conformance.backends import DOCKER_IMAGE

MESSAGES: list[Any] = [{"role": "user", "content": "Work."}]


@pytest.fixture(params=REAL_KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    chosen: Kind = request.param
    if chosen == "docker":
        request.getfixturevalue("engine")
    return chosen


@asynccontextmanager
async def busy_server(
    home: Path, kind: Kind, marker: str, *, stream: bool
) -> AsyncIterator[Server]:
    """Yield a server inside a run whose command does not end by itself."""
    command = f"trap '' TERM INT; sleep {marker}0 & sleep {marker}"
    script = by_history([tool_reply(call("execute_bash", command=command))])
    async with (
        scripted_backend(script) as backend,
        serving(home, kind, backend.base_url) as server,
        httpx.AsyncClient(timeout=None) as client,
        anyio.create_task_group() as group,
    ):

        async def ask() -> None:
            body = {"model": "fake-model", "messages": MESSAGES, "stream": stream}
            try:
                await client.post(f"{server.url}/v1/chat/completions", json=body)
            except httpx.TransportError:
                return  # the server has stopped

        group.start_soon(ask)
        with anyio.fail_after(30):
            await until(lambda: running(marker))
        yield server
        group.cancel_scope.cancel()


async def until_nothing_is_left(home: Path, marker: str, pids: list[int]) -> None:
    """Wait until the processes and containers of the server at `home` are gone.

    A container that was created but not started when its owner was killed is left for the next
    sweep.
    """
    await until(lambda: not running(marker))
    await until(lambda: not any(map(command_line, pids)))
    if (state_dir(home) / "install-id").exists():
        engine = Engine()
        await until(lambda: not engine.running(state_dir(home)))
        engine.close()


async def test_server_prints_its_url_and_answers_requests(kind: Kind, tmp_path: Path) -> None:
    script = [
        tool_reply(call("execute_bash", command="echo $((6 * 7)) > output/answer.csv")),
        tool_reply(call("submit", answer="See [it](/testbed/output/answer.csv).")),
    ]
    with anyio.fail_after(60):
        async with (
            scripted_backend(script) as backend,
            serving(tmp_path, kind, backend.base_url) as server,
            openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
        ):
            completion = await client.chat.completions.create(model="fake-model", messages=MESSAGES)
            (file,) = (completion.model_extra or {})["sandbox"]["files"]
            async with httpx.AsyncClient() as browser:
                assert (await browser.get(file["url"])).text == "42\n"
    assert completion.choices[0].message.content == f"See [it]({file['url']})."


async def test_request_that_offers_http2_keeps_its_body(tmp_path: Path) -> None:
    """Java's HttpClient offers h2c with its first request to each server."""
    body = {"model": "fake-model", "messages": MESSAGES}
    offer = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAEA"}
    with anyio.fail_after(30):
        async with (
            scripted_backend([text_reply("Done.")]) as backend,
            serving(tmp_path, "bubblewrap", backend.base_url) as server,
            httpx.AsyncClient() as client,
        ):
            url = f"{server.url}/v1/chat/completions"
            answer = await client.post(url, json=body, headers=offer)
    assert answer.json()["choices"][0]["message"]["content"] == "Done."


async def test_metrics_are_shown_to_the_configured_operator_only(tmp_path: Path) -> None:
    settings = {
        "keys": [{"name": "a", "env": "KEY_A"}, {"name": "b", "env": "KEY_B"}],
        "server": {"operator_key_env": "OPERATOR_KEY"},
    }
    secrets = {"KEY_A": "sk-a", "KEY_B": "sk-b", "OPERATOR_KEY": "sk-operator"}
    async with (
        scripted_backend([]) as backend,
        serving(tmp_path, "bubblewrap", backend.base_url, settings, **secrets) as server,
        httpx.AsyncClient(base_url=server.url) as client,
    ):
        statuses = [
            (await client.get("/metrics", headers={"Authorization": f"Bearer {key}"})).status_code
            for key in secrets.values()
        ]
    assert statuses == [403, 403, 200]


async def test_server_starts_without_a_reachable_backend(
    tmp_path: Path,
) -> None:
    with anyio.fail_after(30):
        async with (
            serving(tmp_path, "bubblewrap", "http://127.0.0.1:1/v1") as server,
            httpx.AsyncClient() as client,
        ):
            assert (await client.get(f"{server.url}/health")).json() == {"status": "ok"}


async def test_incomplete_requests_on_many_connections_do_not_block_others(tmp_path: Path) -> None:
    most, flood = 20, min(2_000, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
    more = {"server": {"max_connections": most}}
    with anyio.fail_after(60):
        async with (
            scripted_backend(lambda _: text_reply("Done.")) as backend,
            serving(tmp_path, "bubblewrap", backend.base_url, more) as server,
            httpx.AsyncClient(base_url=server.url) as client,
            contextlib.AsyncExitStack() as opened,
        ):
            url = httpx.URL(server.url)
            assert url.port
            streams = [await anyio.connect_tcp(url.host, url.port) for _ in range(flood)]
            for stream in streams:
                await opened.enter_async_context(stream)
                with contextlib.suppress(anyio.BrokenResourceError):
                    await stream.send(b"POST /v1/chat/completions HTTP/1.1\r\n")
            assert (await client.get("/health")).json() == {"status": "ok"}
            body = {"model": "fake-model", "messages": MESSAGES}
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
            for stream in streams[: flood - most - HEADROOM]:
                with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                    await stream.receive()


async def test_killed_server_leaves_no_sandbox(kind: Kind, tmp_path: Path) -> None:
    marker = f"5{os.getpid()}"
    async with busy_server(tmp_path, kind, marker, stream=True) as server:
        pids = descendants(server.process.pid)
        server.process.kill()
        with anyio.fail_after(2):
            await server.ended()
            await until_nothing_is_left(tmp_path, marker, pids)


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
async def test_stop_signal_ends_runs_and_the_server(
    kind: Kind, signal_number: int, tmp_path: Path
) -> None:
    marker = f"6{os.getpid()}{signal_number}"
    async with busy_server(tmp_path, kind, marker, stream=True) as server:
        pids = descendants(server.process.pid)
        server.process.send_signal(signal_number)
        with anyio.fail_after(15):
            code = await server.ended()
            await until_nothing_is_left(tmp_path, marker, pids)
        assert cgroups_of(server.process.pid) == []
    assert code == {signal.SIGTERM: -signal.SIGTERM, signal.SIGINT: 130}[signal_number]


async def test_stop_signal_ends_a_run_whose_client_waits_for_an_unstreamed_answer(
    tmp_path: Path,
) -> None:
    marker = f"7{os.getpid()}"
    async with busy_server(tmp_path, "bubblewrap", marker, stream=False) as server:
        pids = descendants(server.process.pid)
        server.process.terminate()
        with anyio.fail_after(15):
            await server.ended()
            await until_nothing_is_left(tmp_path, marker, pids)


# Several owners on one engine


@pytest.fixture
def stray(engine: Engine) -> Iterator[Any]:
    """A factory of containers that outlive their owner."""
    made: list[str] = []

    def make(install_id: str, owner_id: str) -> str:
        labels = {INSTALL_LABEL: install_id, OWNER_LABEL: owner_id}
        container = engine.client.create_container(
            DOCKER_IMAGE, ["sleep", "600"], labels=labels, network_disabled=True
        )
        made.append(container["Id"])
        engine.client.start(container)
        return str(container["Id"])

    yield make
    present = {found["Id"] for found in engine.client.containers(all=True)}
    for container in present.intersection(made):
        engine.client.remove_container(container, force=True)


@pytest.mark.docker
async def test_server_start_removes_only_containers_of_dead_servers_of_its_installation(
    engine: Engine, stray: Any, tmp_path: Path
) -> None:
    marker = f"4{os.getpid()}"
    with anyio.fail_after(60):
        async with busy_server(tmp_path, "docker", marker, stream=True):
            install_id = (state_dir(tmp_path) / "install-id").read_text(encoding="ascii")
            living = set(engine.containers(state_dir(tmp_path)))
            dead = {stray(install_id, "0123456789abcdef"), stray(install_id, "fedcba9876543210")}
            of_another_host = stray("another-installation", "0123456789abcdef")
            async with serving(tmp_path, "docker", "http://127.0.0.1:1/v1"):
                await until(lambda: not dead.intersection(engine.containers(state_dir(tmp_path))))
            assert living <= set(engine.containers(state_dir(tmp_path)))
            assert running(marker)
            assert engine.client.inspect_container(of_another_host)["State"]["Running"]


async def test_killing_one_proxy_does_not_affect_the_runs_of_another(
    kind: Kind, tmp_path: Path
) -> None:
    marker = f"3{os.getpid()}"
    killed = anyio.Event()
    script: list[Item] = [
        tool_reply(call("execute_bash", command="STATE=kept; echo begun")),
        Held(tool_reply(call("execute_bash", command="echo $STATE")), killed),
        tool_reply(call("submit", answer="done")),
    ]
    with anyio.fail_after(60):
        async with (
            scripted_backend(script) as backend,
            serving(tmp_path, kind, backend.base_url) as survivor,
            busy_server(tmp_path, kind, marker, stream=True) as victim,
            httpx.AsyncClient(timeout=None) as client,
            anyio.create_task_group() as group,
        ):

            async def ask() -> None:
                body = {"model": "fake-model", "messages": MESSAGES}
                await client.post(f"{survivor.url}/v1/chat/completions", json=body)

            group.start_soon(ask)
            await backend.arrived(2)
            pids = descendants(victim.process.pid)
            victim.process.kill()
            await until(lambda: not running(marker))
            await until(lambda: not any(map(command_line, pids)))
            killed.set()
        observations = [
            m["content"] for m in backend.requests[-1].body["messages"] if m["role"] == "tool"
        ]
    assert observations == ["Exit code: 0\n[stdout]\nbegun", "Exit code: 0\n[stdout]\nkept"]
