"""The examples: each program runs against a proxy, and each configuration is valid.

`tests/test_paper_examples.py` tests those of `examples/paper`.
"""

import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml

from proxy.bootstrap import build_keyring, require_keys
from proxy.config import parse, read_secret
from proxy.models.scripted import call, text_reply, tool_reply
from proxy.profiles import build_profiles
from tests.clients.stacks.environments import node_command, python_of, variables
from tests.fakes.backend import scripted_backend
from tests.fakes.server import running_proxy

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
CONFIGS = EXAMPLES / "configs"
MAX_LINES = 60
TIMEOUT_S = 60
DURATION = re.compile(r"\d+\.\d s")

SVG = '<svg xmlns="http://www.w3.org/2000/svg"><rect width="120" height="20"/></svg>'
DRAW = f"""python3 - <<'END'
import csv
months = [row["month"] for row in csv.DictReader(open("/testbed/documents/revenue.csv"))]
print(*months)
open("/testbed/output/chart.svg", "w").write('{SVG}')
END"""
WRITE_SQUARES = "for n in $(seq 20); do echo $((n * n)); done > squares.txt"
ADD_SQUARES = "awk '{total += $1} END {print total}' squares.txt"
PRIMES = "echo 78498"


def bash(command: str) -> dict[str, Any]:
    return tool_reply(call("execute_bash", command=command))


def submit(answer: str) -> dict[str, Any]:
    return tool_reply(call("submit", answer=answer))


def submit_observed(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a reply that submits the last line of the newest observation."""
    observation = body["messages"][-1]["content"]
    return submit(observation.splitlines()[-1])


Reply = Mapping[str, Any] | Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Example:
    program: str
    replies: Sequence[Reply]
    """The model's replies; a function gets the request body."""
    output: str
    """Standard output of the program."""
    environment: str = ""
    """Name of the locked environment that has the packages of the program."""

    def __str__(self) -> str:
        return self.program

    def command(self) -> list[str]:
        path = EXAMPLES / self.program
        if path.suffix == ".sh":
            return ["bash", str(path)]
        if path.suffix == ".mjs":
            return node_command(self.environment, path)
        python = python_of(self.environment) if self.environment else sys.executable
        return [str(python), str(path)]


PROGRAMS = [
    Example(
        "chat.py",
        [bash(PRIMES), submit_observed],
        "78498\nsteps: 1\nstop reason: submitted\n",
    ),
    Example(
        "stream_steps.py",
        [bash("echo Python 3.11"), submit_observed],
        "[step 1] execute_bash {'command': 'echo Python 3.11'}\n"
        "Python 3.11\n"
        "[step 1] exit code 0\n"
        "Python 3.11\n",
    ),
    Example(
        "csv_to_chart.py",
        [bash(DRAW), submit_observed],
        f"January February March April\nsaved chart.svg (image/svg+xml, {len(SVG)} bytes)\n",
    ),
    Example(
        "session_files.py",
        [bash(WRITE_SQUARES), submit("Written."), bash(ADD_SQUARES), submit_observed],
        "Written.\n2870\nsame container: True\n",
    ),
    Example(
        "own_tools.py",
        [
            tool_reply(
                call("execute_bash", command="echo 70 86 > fahrenheit"),
                call("get_temperature", city="Bonn"),
                call("get_temperature", city="Rome"),
            ),
            bash("cat fahrenheit"),
            submit_observed,
        ],
        "get_temperature('Bonn') -> 21.0\nget_temperature('Rome') -> 30.0\n70 86\n",
    ),
    Example(
        "long_document.py",
        [bash("grep -rhF 9.81 /testbed/documents"), submit_observed],
        "12345 pump 3 pressure 9.81 bar\n"
        "characters in the document: 628,231\n"
        "moved to a file: yes\n",
    ),
    Example(
        "json_schema.py",
        [
            bash("echo computed"),
            submit("mean 3.875"),
            text_reply('{"mean": 3.875, "median": 3.5, "largest": 9}'),
        ],
        "mean 3.875, median 3.5, largest 9\n",
    ),
    Example(
        "detach_and_poll.py",
        [bash("echo 104729"), submit_observed],
        "disconnected\nstatus: completed\n104729\n",
    ),
    Example(
        "responses_api.py",
        [bash(WRITE_SQUARES), submit("Written."), bash(ADD_SQUARES), submit_observed],
        "Written.\n2870\nstored: completed\n",
    ),
    Example(
        "anthropic_messages.py",
        [bash(PRIMES), submit_observed],
        f"command: {PRIMES}\noutput: 78498\n78498\n",
        environment="anthropic",
    ),
    Example(
        "langchain_agent.py",
        [tool_reply(call("get_temperature", city="Bonn")), bash("echo 69.8"), submit_observed],
        "get_temperature({'city': 'Bonn'}) -> 21.0\n69.8\n",
        environment="langchain",
    ),
    Example(
        "ai_sdk.mjs",
        [bash(PRIMES), submit_observed],
        f"````console\n$ {PRIMES}\n78498\n[exit 0, 0.0 s, 1 line]\n````\n\n== answer\n78498\n",
        environment="ai-7",
    ),
]
CURL = Example("curl.sh", [bash(PRIMES), submit_observed] * 2, "")


@pytest.mark.parametrize("example", PROGRAMS, ids=str)
async def test_example_prints_its_answer(example: Example, tmp_path: Path) -> None:
    output = await run_example(example, tmp_path)
    assert DURATION.sub("0.0 s", output) == example.output
    if example.program == "csv_to_chart.py":
        assert (tmp_path / "chart.svg").read_text(encoding="utf-8") == SVG


async def test_curl_prints_an_answer_and_a_stream_with_steps(tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is missing")
    answer, _, stream = (await run_example(CURL, tmp_path)).partition("\n")
    assert json.loads(answer)["choices"][0]["message"]["content"] == "78498"
    *lines, end = [line for line in stream.splitlines() if line.startswith("data: ")]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    steps = [chunk["sandbox"]["kind"] for chunk in chunks if "kind" in chunk.get("sandbox", {})]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert steps == ["run_started", "tool_start", "tool_output", "tool_end", "run_finished"]
    assert "".join(delta.get("content") or "" for delta in deltas) == "78498"
    assert end == "data: [DONE]"


async def run_example(example: Example, folder: Path) -> str:
    """Run the program in `folder` against a proxy and return its standard output."""
    command = example.command()
    replies = iter(example.replies)

    def next_reply(body: dict[str, Any]) -> Mapping[str, Any]:
        reply = next(replies)
        return reply(body) if callable(reply) else reply

    async with (
        scripted_backend(next_reply) as backend,
        running_proxy(backend, "bubblewrap", folder / "state") as url,
    ):
        environment = {
            **variables(folder),
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": "none",
        }
        with anyio.fail_after(TIMEOUT_S):
            done = await anyio.run_process(command, check=False, cwd=folder, env=environment)
    assert (done.returncode, done.stderr.decode()) == (0, "")
    assert next(replies, None) is None
    return done.stdout.decode()


@pytest.mark.parametrize("path", sorted(CONFIGS.iterdir()), ids=lambda path: path.name)
def test_example_configuration_is_valid(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RESEARCH_KEY", "STUDENTS_KEY", "OPERATOR_KEY", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, f"sk-{name}")
    config = parse(yaml.safe_load(path.read_text(encoding="utf-8")), str(path))
    require_keys(config, config.server.host)
    keyring = build_keyring(config)
    assert all(keyring.find(read_secret(key.env) or "") for key in config.keys)
    assert build_profiles(config).default.name == config.profile


def example_files() -> list[Path]:
    """Return the files of all examples, without what Python has compiled."""
    files = [path for path in EXAMPLES.rglob("*") if path.is_file()]
    return [path for path in files if path.suffix != ".pyc"]


def test_every_example_is_run_or_validated() -> None:
    programs = {path.name for path in EXAMPLES.iterdir()} - {"README.md", "configs", "paper"}
    assert programs == {example.program for example in [*PROGRAMS, CURL]}
    assert {path.suffix for path in CONFIGS.iterdir()} == {".yaml"}


def test_table_in_the_readme_of_the_examples_lists_every_example() -> None:
    table = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    files = example_files()
    names = [str(path.relative_to(EXAMPLES)) for path in files if path.name != "README.md"]
    assert [name for name in names if f"[`{name}`]({name})" not in table] == []


def test_examples_are_short() -> None:
    files = [path for path in example_files() if path.name != "README.md"]
    lengths = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert {name: lines for name, lines in lengths.items() if lines >= MAX_LINES} == {}
