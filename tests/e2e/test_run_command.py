"""`sandbox-proxy run`: one prompt with files, on a temporary server or on a running one."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree

import anyio
import httpx
import pytest

from policies.sessions import TrajectoryFormat
from proxy.models.scripted import call, text_reply, tool_reply
from tests.e2e.proxy_process import ROOT, environment, run, serving, write_config
from tests.fakes.backend import Held, Item, Refusal, by_history, scripted_backend

DEMO = {"backend": {"provider": "scripted", "script": str(ROOT / "proxy" / "demo.yaml")}}
COPY = "wc -l < documents/data.csv; cp documents/data.csv output/copy.csv"
SCRIPT = [
    {"content": "I count the lines.", "tool_calls": [call("execute_bash", command=COPY)]},
    text_reply("There are 2 lines: [copy](/testbed/output/copy.csv)"),
]


def write_inputs(home: Path) -> str:
    directory = home / "in"
    directory.mkdir()
    (directory / "data.csv").write_text("a,b\n1,2\n")
    return str(directory)


async def error_of(home: Path, *arguments: str, **variables: str) -> str:
    """Run a command that fails; return its only line on stderr."""
    done = await run(home, "run", *arguments, **variables)
    assert (done.returncode, done.stdout) == (1, b"")
    (line,) = done.stderr.decode().splitlines()
    return line


def listening_ports(pid: int) -> list[int]:
    """Return the TCP ports of 127.0.0.1 on which a process listens."""
    links = [str(link.readlink()) for link in (Path("/proc") / str(pid) / "fd").iterdir()]
    inodes = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = "0A"
    return [
        int(row[1].partition(":")[2], 16)
        for row in rows
        if row[3] == listening and row[9] in inodes
    ]


def read_trajectory(home: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((home / "out" / "trajectory.json").read_text())
    return found


async def test_run_command_prints_the_answer_and_writes_files_and_trajectory(
    tmp_path: Path,
) -> None:
    async with scripted_backend(by_history(SCRIPT)) as backend:
        done = await run(
            tmp_path,
            *("run", "How many lines?", "--model", "fake-model", "--sandbox", "bubblewrap"),
            *("--input-dir", write_inputs(tmp_path), "--output-dir", "out"),
            *("--backend-url", backend.base_url),
            LLM_SANDBOX_BACKEND__TOOL_SUPPORT="always",
        )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode() == "There are 2 lines: [copy](out/files/copy.csv)\n"
    steps = done.stderr.decode()
    assert "I count the lines." in steps
    assert f"$ {COPY}" in steps
    assert (tmp_path / "out" / "files" / "copy.csv").read_text() == "a,b\n1,2\n"
    trajectory = read_trajectory(tmp_path)
    assert trajectory["status"] == "completed"
    assert trajectory["object"] == "run.trajectory"
    # The server's own data is gone.
    assert not (tmp_path / "state").exists()


async def test_run_command_offers_the_trajectory_formats_of_the_api(tmp_path: Path) -> None:
    done = await run(tmp_path, "run", "--help")
    assert f"--trajectory-format {{{','.join(get_args(TrajectoryFormat))}}}" in done.stdout.decode()


async def test_demo_model_chart_script_draws_a_chart_of_the_input_file(tmp_path: Path) -> None:
    inputs = Path(write_inputs(tmp_path))
    (inputs / "data.csv").write_text("month,note,revenue\nMay,good,1200\nJune & July,,1350.5\n")
    config = write_config(tmp_path, DEMO)
    options = ("--config", config, "--sandbox", "bubblewrap", "--model", "chart-script")
    done = await run(
        tmp_path, "run", "Draw it.", *options, "--input-dir", "in", "--output-dir", "out"
    )
    assert done.returncode == 0, done.stderr.decode()
    answer = "The revenue of 2 rows is 2550.5 in all, and largest for June & July (1350.5)."
    assert done.stdout.decode().startswith(answer)
    chart = ElementTree.parse(tmp_path / "out" / "files" / "chart.svg")
    texts = [element.text for element in chart.iter("{http://www.w3.org/2000/svg}text")]
    assert texts == ["revenue by month", "1200", "May", "1350.5", "June & July"]
    assert len(chart.findall("{http://www.w3.org/2000/svg}rect")) == 3


async def test_run_command_sends_the_given_api_key_to_a_running_proxy(tmp_path: Path) -> None:
    keys = {"keys": [{"name": "lab", "env": "LAB_KEY", "profiles": ["paper"]}]}
    async with (
        scripted_backend([tool_reply(call("submit", answer="42"))]) as backend,
        serving(tmp_path, "bubblewrap", backend.base_url, keys, LAB_KEY="sk-1") as server,
    ):
        asked = ("--base-url", f"{server.url}/v1", "--model", "fake-model", "--profile", "paper")
        refused = await error_of(tmp_path, "How many?", *asked)
        done = await run(
            tmp_path,
            *("run", "How many?", *asked, "--output-dir", "out"),
            *("--trajectory-format", "reference", "--api-key-env", "MY_KEY"),
            MY_KEY="sk-1",
        )
    assert "Incorrect API key" in refused
    assert (done.returncode, done.stdout) == (0, b"42\n"), done.stderr.decode()
    trajectory = read_trajectory(tmp_path)
    assert set(trajectory) == {"problem_statement", "steps", "metadata"}


async def test_run_that_fails_keeps_its_trajectory(tmp_path: Path) -> None:
    failing: list[Item] = [
        tool_reply(call("execute_bash", command="echo 42")),
        Refusal(400, "no more"),
    ]
    config = write_config(tmp_path, {"backend": {"tool_support": "always"}})
    async with scripted_backend(failing) as backend:
        asked = ("How many?", "--model", "fake-model", "--output-dir", "out", "--config", config)
        options = ("--backend-url", backend.base_url, "--sandbox", "bubblewrap")
        done = await run(tmp_path, "run", *asked, *options)
    assert done.returncode == 1
    assert "no more" in done.stderr.decode().splitlines()[-1]
    assert read_trajectory(tmp_path)["status"] == "failed"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--input-dir", "missing"], "--input-dir: missing"),
        (["--input-dir", "."], "is a directory"),
        (["--output-dir", "config.yaml"], "--output-dir: config.yaml"),
        (["--base-url", "http://127.0.0.1:1/v1"], "http://127.0.0.1:1/v1: Connection error"),
        (["--api-key-env", "NO_SUCH_KEY"], "--base-url"),
        (["--base-url", "http://127.0.0.1:1/v1", "--sandbox", "docker"], "--sandbox"),
    ],
)
async def test_invalid_argument_of_the_run_command_is_reported_in_one_line(
    arguments: list[str], words: str, tmp_path: Path
) -> None:
    write_inputs(tmp_path)
    own = [] if "--base-url" in arguments else ["--config", write_config(tmp_path, DEMO)]
    assert words in await error_of(tmp_path, "How many?", *arguments, *own)


async def test_input_directory_with_an_entry_that_is_no_file_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "in"
    directory.mkdir()
    os.mkfifo(directory / "pipe")
    options = ("--input-dir", "in", "--config", write_config(tmp_path, DEMO))
    assert "in/pipe is not a file" in await error_of(tmp_path, "How many?", *options)


async def test_run_that_fails_before_its_first_output_keeps_its_trajectory(tmp_path: Path) -> None:
    config = write_config(tmp_path, {"backend": {"tool_support": "always"}})
    async with scripted_backend([Refusal(400, "no more")]) as backend:
        asked = ("How many?", "--model", "fake-model", "--output-dir", "out", "--config", config)
        options = ("--backend-url", backend.base_url, "--sandbox", "bubblewrap")
        done = await run(tmp_path, "run", *asked, *options)
    assert done.returncode == 1
    lines = done.stderr.decode().splitlines()
    assert "trajectory.json" in lines[-2]
    assert "no more" in lines[-1]
    assert read_trajectory(tmp_path)["status"] == "failed"


async def test_run_command_prints_one_line_if_its_request_is_refused_or_cannot_connect(
    tmp_path: Path,
) -> None:
    keys = {"keys": [{"name": "lab", "env": "LAB_KEY"}]}
    output = ("--output-dir", "out")
    async with (
        scripted_backend([]) as backend,
        serving(tmp_path, "bubblewrap", backend.base_url, keys, LAB_KEY="sk-1") as server,
    ):
        asked = ("How many?", "--model", "fake-model", *output)
        refused = await error_of(tmp_path, *asked, "--base-url", f"{server.url}/v1")
    unreachable = await error_of(tmp_path, *asked, "--base-url", "http://127.0.0.1:1/v1")
    assert "Incorrect API key" in refused
    assert "Connection error" in unreachable


async def test_run_command_writes_the_trajectory_before_it_downloads_the_files(
    tmp_path: Path,
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "files").write_text("not a directory")
    async with scripted_backend(by_history(SCRIPT)) as backend:
        done = await run(
            tmp_path,
            *("run", "How many lines?", "--model", "fake-model", "--sandbox", "bubblewrap"),
            *("--input-dir", write_inputs(tmp_path), "--output-dir", "out"),
            *("--backend-url", backend.base_url),
            LLM_SANDBOX_BACKEND__TOOL_SUPPORT="always",
        )
    assert done.returncode == 1
    assert read_trajectory(tmp_path)["status"] == "completed"


async def test_temporary_server_refuses_requests_without_its_key(tmp_path: Path) -> None:
    held = Held(text_reply("Never said."), asyncio.Event())
    async with scripted_backend([held]) as backend:
        command = [sys.executable, "-m", "proxy", "run", "How many?", "--model", "fake-model"]
        command += ["--backend-url", backend.base_url, "--sandbox", "bubblewrap"]
        with anyio.fail_after(60):
            async with (
                httpx.AsyncClient() as http,
                await anyio.open_process(
                    command, cwd=tmp_path, env=environment(tmp_path)
                ) as process,
            ):
                await backend.arrived(1)
                listening = listening_ports(process.pid)
                answers = [
                    (await http.get(f"http://127.0.0.1:{port}/v1/models")).status_code
                    for port in listening
                ]
                process.send_signal(signal.SIGINT)
                await process.wait()
    assert 401 in answers
    assert 200 not in answers


async def test_interrupted_run_command_ends_at_once(tmp_path: Path) -> None:
    held = Held(text_reply("Never said."), asyncio.Event())
    async with scripted_backend([held]) as backend:
        command = [sys.executable, "-m", "proxy", "run", "How many?", "--model", "fake-model"]
        command += ["--backend-url", backend.base_url, "--sandbox", "bubblewrap"]
        with anyio.fail_after(60):
            async with await anyio.open_process(
                command, cwd=tmp_path, env=environment(tmp_path)
            ) as process:
                await backend.arrived(1)
                process.send_signal(signal.SIGINT)
                assert await process.wait() == 130
