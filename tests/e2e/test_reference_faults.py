"""Faults of the reference implementation that this project must not have, on real sandboxes."""

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from proxy.models.scripted import call, text_reply, tool_reply
from tests.fakes.backend import Item, scripted_backend
from tests.fakes.server import REAL_KINDS, Kind, running_proxy

MESSAGES = [{"role": "user", "content": "Work."}]
DONE = tool_reply(call("submit", answer="done"))
EDITOR = "str_replace_editor"


def bash(command: str) -> dict[str, Any]:
    return call("execute_bash", command=command)


def raw_call(name: str, arguments: str, id: str = "call_raw") -> dict[str, Any]:
    """Return a reply with a call whose arguments are arbitrary text."""
    function = {"name": name, "arguments": arguments}
    return {
        "message": {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": id, "type": "function", "function": function}],
        },
        "finish_reason": "tool_calls",
    }


class Outcome:
    """A completion and the messages of its last backend request."""

    def __init__(self, response: httpx.Response, requests: list[dict[str, Any]]) -> None:
        self.response = response
        self.body = response.json()
        self.messages: list[dict[str, Any]] = requests[-1]["messages"]
        self.observations = [m["content"] for m in self.messages if m["role"] == "tool"]

    @property
    def answer(self) -> str:
        return str(self.body["choices"][0]["message"]["content"])

    @property
    def files(self) -> dict[str, dict[str, Any]]:
        return {file["filename"]: file for file in self.body["sandbox"]["files"]}


@pytest.fixture(params=REAL_KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param  # type: ignore[no-any-return] - a fixture's parameter has no type


async def run(kind: Kind, tmp_path: Path, *replies: Item, **body: Any) -> Outcome:
    async with (
        scripted_backend(list(replies)) as backend,
        running_proxy(backend, kind, tmp_path) as url,
    ):
        async with httpx.AsyncClient(timeout=60) as client:
            with anyio.fail_after(60):
                request = {"model": "m", "messages": MESSAGES, **body}
                response = await client.post(f"{url}/v1/chat/completions", json=request)
        return Outcome(response, [request.body for request in backend.requests])


async def test_symlinked_answer_file_discloses_nothing_of_the_host(
    kind: Kind, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("the host's secret")
    link = tool_reply(
        bash(f"ln -s {tmp_path}/secret output/answer.txt; ln -s /etc/passwd output/p")
    )
    outcome = await run(kind, tmp_path, link, tool_reply(call("submit")), text_reply("none"))
    assert outcome.answer == "none"
    assert not outcome.files


async def test_special_files_do_not_become_artifacts(kind: Kind, tmp_path: Path) -> None:
    make = tool_reply(bash("mkfifo output/fifo output/answer.txt; echo 1 > output/real"))
    outcome = await run(kind, tmp_path, make, DONE)
    assert list(outcome.files) == ["real"]


async def test_host_environment_is_not_in_the_sandbox(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-canary")
    monkeypatch.setenv("PIP_INDEX_URL", "https://key@index.example")
    look = tool_reply(bash("env; cat /proc/1/environ /proc/self/environ | tr '\\0' '\\n'"))
    outcome = await run(kind, tmp_path, look, DONE)
    assert "sk-canary" not in outcome.observations[0]
    assert "index.example" not in outcome.observations[0]


async def test_each_call_of_a_turn_is_run_and_answered(kind: Kind, tmp_path: Path) -> None:
    turn = tool_reply(bash("echo 1 >> log"), bash("echo 2 >> log"), bash("cat log"))
    outcome = await run(kind, tmp_path, turn, DONE)
    assert "1\n2" in outcome.observations[2]
    calls = outcome.messages[-4]["tool_calls"]
    answered_ids = [message["tool_call_id"] for message in outcome.messages[-3:]]
    assert answered_ids == [each["id"] for each in calls]


@pytest.mark.parametrize(
    "arguments", ['{"command": "ls', '"ls"', "[1]", "42", "null", '{"command": ["ls"]}', "{}"]
)
async def test_invalid_tool_arguments_are_explained_to_the_model_and_nothing_is_run(
    arguments: str, tmp_path: Path
) -> None:
    wrong = raw_call("execute_bash", arguments)
    outcome = await run("bubblewrap", tmp_path, wrong, DONE)
    assert outcome.answer == "done"
    assert "othing was" in outcome.observations[0]
    assert "xit code: 0" not in outcome.observations[0]
    echoed = outcome.messages[-2]["tool_calls"][0]["function"]["arguments"]
    assert isinstance(json.loads(echoed), dict)


async def test_unknown_tool_and_invalid_line_number_do_not_end_the_run(tmp_path: Path) -> None:
    outcome = await run(
        "bubblewrap",
        tmp_path,
        tool_reply(
            call("python", code="1"), call(EDITOR, command="insert", path="x", insert_line=[])
        ),
        DONE,
    )
    assert "no tool 'python'" in outcome.observations[0]
    assert "insert_line" in outcome.observations[1]
    assert outcome.answer == "done"


async def test_prose_without_a_submit_is_accepted_as_the_answer(tmp_path: Path) -> None:
    outcome = await run("bubblewrap", tmp_path, text_reply("It is 42."))
    assert outcome.answer == "It is 42."


async def test_edits_with_the_editor_tool_are_byte_exact(kind: Kind, tmp_path: Path) -> None:
    path = "/testbed/output/a file; touch PWNED"
    steps = [
        call(EDITOR, command="create", path=path, file_text="all:\n\tmake x"),
        call(EDITOR, command="str_replace", path=path, old_str="x", new_str="y"),
        call(EDITOR, command="create", path=path, file_text="overwritten"),
        call(EDITOR, command="create", path="output/empty", file_text=""),
        call(EDITOR, command="create", path="output/large", file_text="x" * 300_000),
        bash("printf 'caf\\351\\r\\nend' > output/latin"),
        call(EDITOR, command="str_replace", path="output/latin", old_str="end", new_str="fin"),
        call(EDITOR, command="str_replace", path="output/none", old_str="a", new_str="b"),
        bash('for f in output/a* output/latin; do base64 -w0 "$f"; echo; done'),
        bash("wc -c output/*; ls | grep -c PWNED"),
    ]
    outcome = await run(kind, tmp_path, tool_reply(*steps), DONE)
    made, latin = outcome.observations[-2].splitlines()[2:4]
    assert base64.b64decode(made) == b"all:\n\tmake y"
    assert base64.b64decode(latin) == b"caf\xe9\r\nfin"
    assert "create does not overwrite" in outcome.observations[2]
    assert "does not exist" in outcome.observations[7]
    assert "300000 output/large" in outcome.observations[-1]
    assert outcome.files["empty"]["bytes"] == 0
    assert outcome.observations[-1].splitlines()[-1] == "0"


async def test_files_and_directories_can_be_viewed_with_the_editor_tool(
    kind: Kind, tmp_path: Path
) -> None:
    steps = [
        bash("echo '{\"a\": 1}' > documents/in.json"),
        call(EDITOR, command="view", path="/testbed/documents/in.json"),
        call(EDITOR, command="view", path="/testbed"),
    ]
    outcome = await run(kind, tmp_path, tool_reply(*steps), DONE)
    assert '{"a": 1}' in outcome.observations[1]
    assert "in.json" in outcome.observations[2]


async def test_long_line_and_large_output_are_truncated(kind: Kind, tmp_path: Path) -> None:
    line = bash("head -c 300000 /dev/zero | tr '\\0' x")
    flood = bash("head -c 100000000 /dev/zero | tr '\\0' y; echo end")
    outcome = await run(kind, tmp_path, tool_reply(line, flood), DONE)
    assert all(len(observation) < 31_000 for observation in outcome.observations)
    assert outcome.observations[1].endswith("end")
    assert "bytes" in outcome.observations[0]


async def test_exit_code_124_is_no_timeout_and_a_timed_out_command_keeps_its_output(
    kind: Kind, tmp_path: Path
) -> None:
    steps = tool_reply(
        bash("echo early; exit 124"),
        bash("cd /tmp; X=kept"),
        bash("timeout 1 bash -c 'echo half; sleep 60'; echo $?"),
        bash("pwd; echo $X"),
    )
    outcome = await run(kind, tmp_path, steps, DONE)
    assert "Exit code: 124\n" in outcome.observations[0]
    assert "early" in outcome.observations[0]
    assert "timed out" not in outcome.observations[0]
    assert "half\n124" in outcome.observations[2]
    assert "/tmp\nkept" in outcome.observations[3]


async def test_orphaned_processes_are_reaped(kind: Kind, tmp_path: Path) -> None:
    spawn = bash("for i in 1 2 3 4 5; do (sleep 0.01 &) ; done; sleep 0.2")
    count = bash("grep -l 'State:.Z' /proc/[0-9]*/status | wc -l")
    outcome = await run(kind, tmp_path, tool_reply(spawn, count), DONE)
    assert outcome.observations[1].splitlines()[-1] == "0"


async def test_backend_failure_is_not_reported_as_success(kind: Kind, tmp_path: Path) -> None:
    failure = {"error": {"status": 500, "message": "on fire"}}
    outcome = await run(kind, tmp_path, tool_reply(bash("true")), *[failure] * 3)
    assert outcome.response.status_code == 500
    assert "on fire" in outcome.body["error"]["message"]


async def test_concurrent_runs_share_no_files(kind: Kind, tmp_path: Path) -> None:
    script = [tool_reply(bash("ls /testbed/output; echo $RANDOM$RANDOM > output/mine")), DONE]
    outcomes: list[Outcome] = []

    async def run_once(number: int) -> None:
        outcomes.append(await run(kind, tmp_path / str(number), *script))

    async with anyio.create_task_group() as both:
        both.start_soon(run_once, 1)
        both.start_soon(run_once, 2)
    first, second = outcomes
    assert first.body["sandbox"]["run_id"] != second.body["sandbox"]["run_id"]
    assert "mine" not in first.observations[0] + second.observations[0]


def test_importing_the_proxy_does_not_change_the_logging_configuration() -> None:
    program = (
        "import logging; handler = logging.StreamHandler(); logging.root.addHandler(handler)\n"
        "import proxy.app, proxy.models.litellm_model\n"
        "assert handler in logging.root.handlers and logging.root.level == logging.WARNING"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
