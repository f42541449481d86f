"""The scripted model gives the results that follow from its table of behaviours."""

from collections import Counter
from importlib import resources
from pathlib import Path

import pytest

from evaluation.reasoning_gym_suite import FAMILIES
from evaluation.scripted import BEHAVIOURS
from evaluation.synthetic import KINDS
from tests.evaluation.evaluation_process import ROOT, rows, sandbox_eval

pytest.importorskip("rich", reason="the extra `evaluation` is not installed")

KNOWN = (resources.files("evaluation") / "known_results.md").read_text(encoding="utf-8")
COUNT = 24
DOMAINS = {**{domain: list(kinds) for domain, kinds in KINDS.items()}, "reasoning-gym": [*FAMILIES]}
RIGHT = {"plain": {"right"}, "sandbox": {"computes", "stumbles"}}


async def test_self_check_finds_the_known_results(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym", reason="the extra `evaluation` is not installed")
    ended = await sandbox_eval("self-check", "--output", tmp_path / "new")
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.endswith("The results are those known in advance.\n")
    assert KNOWN in (tmp_path / "new" / "report.md").read_text("utf-8")


def test_every_kind_of_problem_has_a_scripted_behaviour() -> None:
    kinds = [kind for kinds in DOMAINS.values() for kind in kinds]
    assert sorted(BEHAVIOURS) == sorted(kinds)
    assert {COUNT % len(kinds) for kinds in DOMAINS.values()} == {0}


@pytest.mark.parametrize("domain", DOMAINS)
def test_known_accuracy_follows_from_the_behaviours(domain: str) -> None:
    kinds = [BEHAVIOURS[kind] for kind in DOMAINS[domain]]
    fits = domain != "long-documents"  # their plain prompts are too long for the model
    plain = 100 * sum(fits and each.plain == "right" for each in kinds) / len(kinds)
    graded = [each.tools for each in kinds if each.tools != "fails"]
    sandbox = 100 * sum(each in RIGHT["sandbox"] for each in graded) / len(graded)
    (row,) = (row for row in rows(KNOWN, "## scripted-model") if row[0] == domain)
    assert [cell.split(" ")[0] for cell in row[1:3]] == [f"{plain:.1f}", f"{sandbox:.1f}"]


@pytest.mark.parametrize("domain", DOMAINS)
def test_tool_call_counts_in_the_known_results_follow_from_the_behaviours(domain: str) -> None:
    kinds = DOMAINS[domain]
    calls = {"computes": 1, "stumbles": 2, "guesses": 0, "wanders": 4, "fails": 0}
    total = sum(calls[BEHAVIOURS[kind].tools] for kind in kinds) * COUNT // len(kinds)
    failed = Counter(BEHAVIOURS[kind].tools for kind in kinds)["stumbles"] * COUNT // len(kinds)
    (row,) = (row for row in rows(KNOWN, "### Turns and tools") if row[0] == domain)
    assert row[5:7] == [str(total), str(failed)]


def test_manual_shows_the_table_of_the_known_results() -> None:
    table = KNOWN.partition("\n\n")[2].partition("\n\n")[0]
    page = ROOT / "docs" / "research" / "sandbox-eval.md"
    assert f"```text\n{table}\n```" in page.read_text(encoding="utf-8")
