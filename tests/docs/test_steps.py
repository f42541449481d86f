"""The step events in the manual are those that the server sends."""

import json
import re

from policies.limits import StopReason
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
from proxy.schemas.steps import StepEventRenderer
from sandbox_runtime.egress.decision import Decision
from tests.docs.pages import ROOT


def test_step_events_in_the_guide_equal_the_rendered_events() -> None:
    page = (ROOT / "docs/guides/steps.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```json\n(\[\s*\{\"v\".*?)```", page, re.DOTALL)
    renderer = StepEventRenderer("5f")
    decision = Decision("example.com", 443, "denied", "not allowed", 0, 0, 0.1)
    finished = ToolCallFinished(
        1, "c", "execute_bash", "Exit code: 0\n[stdout]\ncc -o a a.c", 0, 1, 1.21
    )
    events: list[Event] = [
        RunStarted("5f"),
        ToolCallStarted(1, "c", "execute_bash", {"command": "make"}),
        ToolOutput(1, "stdout", "cc -o a a.c\n"),
        EgressDecided(decision),
        RuleMatched("no-force", "deny", "command", "git push -f", "it is shared"),
        finished,
        StepsOmitted(12),
        FileProduced("cfile_1", "/testbed/output/a", 880),
        RunFinished(StopReason.SUBMITTED),
    ]
    assert json.loads(block) == [renderer.render(event) for event in events]
