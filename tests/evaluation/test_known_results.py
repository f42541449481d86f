"""The scripted model gives the results that follow from its table of behaviours."""

from collections import Counter
from importlib import resources
from math import ceil
from pathlib import Path
from statistics import mean

import pytest

from evaluation.reasoning_gym_suite import FAMILIES
from evaluation.runner import plain_prompt
from evaluation.scripted import BEHAVIOURS
from evaluation.synthetic import KINDS, generate
from tests.evaluation.evaluation_process import ROOT, rows, sandbox_eval

pytest.importorskip("rich", reason="the extra `evaluation` is not installed")

KNOWN = (resources.files("evaluation") / "known_results.md").read_text(encoding="utf-8")
COUNT = 24
DOMAINS = {**{domain: list(kinds) for domain, kinds in KINDS.items()}, "reasoning-gym": [*FAMILIES]}
RIGHT = {"plain": {"right"}, "sandbox": {"computes", "stumbles", "installs", "checks"}}
ANSWERED = {
    domain: [kind for kind in kinds if BEHAVIOURS[kind].tools != "fails"]
    for domain, kinds in DOMAINS.items()
}
"""The kinds of problems of each domain that have an answer in the mode sandbox."""
TURNS = {"computes": 2, "stumbles": 3, "installs": 3, "checks": 2, "guesses": 1, "wanders": 4}
"""The turns of each conduct with tools, with the one that submits."""
REMINDER = "\n[3 steps remain. Hand in what you have.]"
"""The end of the last observation of the first of four turns."""
NO_OUTPUT = "Exit code: 0\n(no output)"
OBSERVATIONS = {
    "computes": [f"{NO_OUTPUT}{REMINDER}"],
    "stumbles": [f"Exit code: 1\n[stdout]\nThere is no such file.{REMINDER}", NO_OUTPUT],
    "installs": [f"Exit code: 0\n[stdout]\nThere is no such package.{REMINDER}", NO_OUTPUT],
    "guesses": [],
}
"""The observations in the prompts of each conduct whose observations do not depend on the
problem."""


async def test_self_check_command_reports_the_results_known_in_advance(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym", reason="the extra `evaluation` is not installed")
    ended = await sandbox_eval("self-check", "--output", tmp_path / "new")
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.endswith("The results are those known in advance.\n")
    assert KNOWN in (tmp_path / "new" / "report.md").read_text("utf-8")


def test_self_check_has_a_scripted_behaviour_for_every_kind_of_synthetic_problem() -> None:
    kinds = [kind for kinds in DOMAINS.values() for kind in kinds]
    assert sorted(BEHAVIOURS) == sorted(kinds)
    assert {COUNT % len(kinds) for kinds in DOMAINS.values()} == {0}


@pytest.mark.parametrize("domain", DOMAINS)
def test_known_accuracy_of_the_self_check_follows_from_the_scripted_behaviours(domain: str) -> None:
    kinds = [BEHAVIOURS[kind] for kind in DOMAINS[domain]]
    fits = domain != "long-documents"  # their plain prompts are too long for the model
    plain = 100 * sum(fits and each.plain == "right" for each in kinds) / len(kinds)
    graded = [each.tools for each in kinds if each.tools != "fails"]
    sandbox = 100 * sum(each in RIGHT["sandbox"] for each in graded) / len(graded)
    (row,) = (row for row in rows(KNOWN, "## scripted-model") if row[0] == domain)
    assert [cell.split(" ")[0] for cell in row[1:3]] == [f"{plain:.1f}", f"{sandbox:.1f}"]


@pytest.mark.parametrize("domain", DOMAINS)
def test_known_tool_call_counts_follow_from_the_scripted_behaviours(domain: str) -> None:
    kinds = DOMAINS[domain]
    calls = {"computes": 1, "stumbles": 2, "installs": 2, "checks": 2, "guesses": 0}
    calls |= {"wanders": 4, "fails": 0}
    total = sum(calls[BEHAVIOURS[kind].tools] for kind in kinds) * COUNT // len(kinds)
    failed = Counter(BEHAVIOURS[kind].tools for kind in kinds)["stumbles"] * COUNT // len(kinds)
    (row,) = (row for row in rows(KNOWN, "### Turns and tools") if row[0] == domain)
    assert row[5:7] == [str(total), str(failed)]


@pytest.mark.parametrize("domain", ["computation", "files", "formats"])
def test_known_prompt_tokens_of_the_plain_mode_follow_from_the_prompt_lengths(domain: str) -> None:
    prompts = [
        plain_prompt(draft.fields["problem"], draft.documents)
        for draft in generate(0, COUNT)
        if draft.fields["domain"] == domain
    ]
    (row,) = (row for row in rows(KNOWN, "### Tokens") if row[0] == domain)
    assert row[1] == f"{mean(ceil(len(prompt) / 4) for prompt in prompts):,.0f}"


def test_environment_tokens_in_the_known_report_follow_from_the_observation_lengths() -> None:
    # In `computation` the proxy also asks a last question, whose tokens it estimates.
    tokens: dict[str, list[int]] = {domain: [] for domain in KINDS if domain != "computation"}
    for draft in generate(0, COUNT):
        if draft.fields["domain"] not in tokens:
            continue
        conduct = BEHAVIOURS[draft.fields["kind"]].tools
        of_check = f"Exit code: 0\n[stdout]\n{draft.fields['ground_truth']}{REMINDER}"
        texts = [NO_OUTPUT, of_check] if conduct == "checks" else OBSERVATIONS[conduct]
        tokens[draft.fields["domain"]].append(sum(ceil(len(text) / 4) for text in texts))
    for domain, of_answers in tokens.items():
        (row,) = (row for row in rows(KNOWN, "### Tokens") if row[0] == domain)
        share = 100 * mean(of_answers) / float(row[5].replace(",", ""))
        assert float(row[8].removesuffix("%")) == pytest.approx(share, abs=0.1), domain


@pytest.mark.parametrize("domain", DOMAINS)
def test_known_capability_shares_of_the_self_check_follow_from_the_scripted_behaviours(
    domain: str,
) -> None:
    conducts = Counter(BEHAVIOURS[kind].tools for kind in ANSWERED[domain])
    turns = sum(TURNS[conduct] * count for conduct, count in conducts.items())
    (row,) = (row for row in rows(KNOWN, "### Capabilities") if row[0] == domain)
    external = f"{conducts['installs'] / turns:.1%}"
    idle = f"{2 * conducts['wanders'] / turns:.1%}"
    assert (row[2], row[4], row[6]) == (external, idle, external)


@pytest.mark.parametrize("domain", DOMAINS)
def test_reasoning_patterns_in_the_known_report_follow_from_the_scripted_behaviours(
    domain: str,
) -> None:
    kinds = [BEHAVIOURS[kind] for kind in DOMAINS[domain]]
    right = mean(each.plain == "right" and domain != "formats" for each in kinds)
    checks = mean(BEHAVIOURS[kind].tools == "checks" for kind in ANSWERED[domain])
    expected = {"plain": right, "sandbox": checks}
    found = {row[1]: row[3:] for row in rows(KNOWN, "### Reasoning patterns") if row[0] == domain}
    for mode, counts in found.items():
        assert counts == [f"{expected[mode]:.2f}", f"{2 * expected[mode]:.2f}"], mode


def test_known_totals_of_the_self_check_are_not_zero_in_any_column() -> None:
    for heading in ("### Tokens", "### Turns and tools", "### Capabilities"):
        total = rows(KNOWN, heading)[-1]
        assert not {"0", "0.0%", "-"} & set(total[1:]), heading
    for total in rows(KNOWN, "### Reasoning patterns")[-2:]:
        assert "0.00" not in total


def test_sandbox_eval_page_shows_the_table_of_the_self_check_results() -> None:
    table = KNOWN.partition("\n\n")[2].partition("\n\n")[0]
    page = ROOT / "docs" / "research" / "sandbox-eval.md"
    assert f"```text\n{table}\n```" in page.read_text(encoding="utf-8")
