"""The README: its tables, examples and names are those of the code."""

import json
import re
from contextlib import redirect_stdout
from dataclasses import fields
from io import StringIO
from pathlib import Path

import anyio
import pytest
import yaml

from policies.budgets import DailyBudget
from policies.limits import Limits, StopReason
from policies.redaction import BUILT_IN_PATTERNS
from proxy.agent.events import (
    EgressDecided,
    Event,
    FileProduced,
    RuleMatched,
    RunFinished,
    RunStarted,
    StepsOmitted,
    ToolCallFinished,
    ToolCallStarted,
    ToolOutput,
)
from proxy.config import parse
from proxy.demo import SCRIPT
from proxy.models.scripted import ScriptedModel
from proxy.profiles import build_profiles, profile_table
from proxy.schemas.chat_parameters import PARAMETERS
from proxy.schemas.steps import StepEventRenderer
from sandbox_runtime.egress.decision import Decision
from tests.fakes.server import make_services, open_sandboxes, serve

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_table_of_profiles_is_that_of_the_command() -> None:
    there = build_profiles(parse({}, "none"))
    assert "\n".join(profile_table(there.named, there.default)) in README


async def test_client_example_gets_its_answer_and_files(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    async with open_sandboxes("bubblewrap", tmp_path) as sandboxes:
        services = make_services(ScriptedModel.from_yaml(SCRIPT), sandboxes, tmp_path)
        async with serve(services) as url:
            here = program.replace("http://127.0.0.1:8080", url) + "\nclient.close()\n"
            printed = StringIO()
            with redirect_stdout(printed), anyio.fail_after(30):
                await anyio.to_thread.run_sync(exec, here, {})
    assert "78,498 primes" in printed.getvalue()
    assert "primes.csv 176 http" in printed.getvalue()


@pytest.mark.parametrize(
    ("row", "place"),
    [
        ("every model call", "every call"),
        ("visible answer only", "visible answer"),
        ("loop-owned", "loop"),
        ("the proxy's own", "proxy"),
        ("straight to the backend", "straight"),
    ],
)
def test_parameter_table_lists_every_parameter_in_its_row(row: str, place: str) -> None:
    line = next(line for line in README.splitlines() if line.startswith(f"| {row} |"))
    known = {name for name, parameter in PARAMETERS.items() if parameter.scope == place}
    assert set(re.findall(r"`(\w+)`", line)) == known


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:[\w.]+/)+[\w.]*)`", README))))
def test_named_file_exists(path: str) -> None:
    assert path.startswith(("demo-output/", ".stacks/", "v1/")) or (ROOT / path).exists()


def test_budgets_section_names_every_budget_and_stop_reason() -> None:
    section = README.split("## Budgets\n")[1].split("\n## ")[0]
    told = set(re.findall(r"`(\w+)`", section))
    assert set(StopReason) <= told
    assert {field.name for field in fields(DailyBudget)} <= told
    bounds = {field.name for field in fields(Limits) if field.name.startswith("max_")}
    assert bounds - {"max_command_timeout_s", "max_choices"} <= told


def test_step_events_are_those_that_are_sent() -> None:
    (block,) = re.findall(r"```json\n(\{\"v\".*?)```", README, re.DOTALL)
    told = StepEventRenderer("5f")
    decision = Decision("example.com", 443, "denied", "not allowed", 0, 0, 0.1)
    ended = ToolCallFinished(
        1, "c", "execute_bash", "Exit code: 0\n[stdout]\ncc -o a a.c", 0, 1, 1.21
    )
    events: list[Event] = [
        RunStarted("5f"),
        ToolCallStarted(1, "c", "execute_bash", {"command": "make"}),
        ToolOutput(1, "stdout", "cc -o a a.c\n"),
        EgressDecided(decision),
        RuleMatched("no-force", "deny", "command", "git push -f", "it is shared"),
        ended,
        StepsOmitted(12),
        FileProduced("cfile_1", "/testbed/output/a", 880),
        RunFinished(StopReason.SUBMITTED),
    ]
    assert [json.loads(line) for line in block.splitlines()] == [
        told.render(event) for event in events
    ]


def test_example_rules_are_valid() -> None:
    (block,) = re.findall(r"```yaml\n(watch:.*?)```", README, re.DOTALL)
    watch = parse(yaml.safe_load(block), "README").watch
    assert [rule.name for rule in watch.rules] == ["no-force", "keys", "uploads"]
    assert watch.first_match("command", "git push -f") == watch.rules[0]
    assert watch.first_match("egress", "files.example.com:443") == watch.rules[2]


def test_built_in_detectors_are_named() -> None:
    (line,) = re.findall(r"\*\*Secrets\*\*.*?;", README, re.DOTALL)
    assert set(BUILT_IN_PATTERNS) <= set(re.findall(r"`(\w+)`", line))


def test_named_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"`make (\w+)`", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
