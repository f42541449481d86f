"""`sandbox-eval compare`: several evaluations of the same suites beside each other."""

from pathlib import Path
from typing import Any

import pytest

from evaluation.samples import Suite
from evaluation.scripted import serve_model
from tests.evaluation.evaluation_process import answered, grades_of, rows, sandbox_eval, sums
from tests.evaluation.made_results import USE, plain, with_sandbox, write
from tests.evaluation.test_judge import ReplyingJudge, judge_arguments, judged

pytest.importorskip("rich", reason="the extra `evaluation` is not installed")


def evaluation(output: Path, suite: Suite, right: int, **changes: Any) -> Path:
    """Write an evaluation whose first `right` answers are right in both modes."""
    records = []
    for number, each in enumerate(suite.samples):
        answer = f"Answer: {each.ground_truth if number < right else -1}"
        records += [(plain(each.id, answer, **changes), None)]
        records += [(with_sandbox(each.id, answer, **changes), None)]
    write(output, suite, records)
    return output


async def test_second_and_third_evaluation_are_compared_with_the_first(tmp_path: Path) -> None:
    suite = sums(tmp_path / "data", 8)
    outputs = [
        evaluation(tmp_path / "a", suite, 2),
        evaluation(tmp_path / "b", suite, 8, sandbox=USE.model_copy(update={"turns": 5})),
        evaluation(tmp_path / "c", suite, 1, model="other-model"),
    ]
    ended = await sandbox_eval("compare", *outputs, "--output", tmp_path / "comparison.md")
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "comparison.md").read_text("utf-8") + "\n" == ended.stdout
    assert [row[:3] for row in rows(ended.stdout, "## Evaluations")] == [
        ["A", "made-model", str(outputs[0])],
        ["B", "made-model", str(outputs[1])],
        ["C", "other-model", str(outputs[2])],
    ]
    for mode in ("plain", "sandbox"):
        found = rows(ended.stdout, f"## Accuracy: {mode}")
        assert [row[0] for row in found] == ["sums"] * 3 + ["all domains"] * 3
        a, b, c = found[:3]
        assert a == ["sums", "A", "25.0 [0.0, 62.5]", "-", "-", "-"]
        assert b == ["sums", "B", "100.0 [100.0, 100.0]", "+75.0 [+37.5, +100.0]", "8", "0.0312"]
        assert c[:2] + c[4:] == ["sums", "C", "8", "1.0000"]
    assert rows(ended.stdout, "## Tokens and turns")[1] == [
        *("sums", "B", "130", "130", "150", "5.0", "0")
    ]


async def test_comparison_counts_only_problems_that_both_evaluations_have(tmp_path: Path) -> None:
    suite = sums(tmp_path / "data", 4)
    first = [(plain(f"sum/{number}", "Answer: -1"), None) for number in range(3)]
    second = [(plain(f"sum/{n}", f"Answer: {2 * n}"), None) for n in range(1, 4)]
    write(tmp_path / "a", suite, first)
    write(tmp_path / "b", suite, second)
    ended = await sandbox_eval("compare", tmp_path / "a", tmp_path / "b")
    assert rows(ended.stdout, "## Accuracy: plain")[1][3:5] == ["+100.0 [+100.0, +100.0]", "2"]
    assert rows(ended.stdout, "## Accuracy: sandbox")[1][2:] == ["-", "-", "-", "-"]


async def test_comparison_lists_each_model_of_a_directory_as_an_evaluation(tmp_path: Path) -> None:
    suite = sums(tmp_path / "data", 2)
    output = evaluation(tmp_path / "a", suite, 2)
    evaluation(output, suite, 1, model="other-model")
    evaluation(tmp_path / "b", suite, 0)
    ended = await sandbox_eval("compare", output, tmp_path / "b")
    legend = rows(ended.stdout, "## Evaluations")
    assert [row[:2] for row in legend] == [
        ["A", "made-model"],
        ["B", "other-model"],
        ["C", "made-model"],
    ]


async def test_comparison_names_the_judge_and_exits_with_3_if_verdicts_are_missing(
    tmp_path: Path,
) -> None:
    outputs = [
        answered(tmp_path / "a", [(judged(1), "1 m"), (judged(2), "1 m")]),
        answered(tmp_path / "b", [(judged(1), "1 m"), (judged(2), "2 m")]),
    ]
    judge = ReplyingJudge(lambda prompt, _: "No." if "Question 2?" in prompt else "CORRECT")
    async with serve_model(judge.reply) as url:
        ended = await sandbox_eval("compare", *outputs, *judge_arguments(url, votes=1))
        assert (ended.returncode, ended.stderr) == (
            3,
            "The judge gave no verdict on 2 answers. The same command asks again.\n",
        )
        assert "Differences are to A. Graders: strict. Judge: judge, votes: 1." in ended.stdout
        judge = ReplyingJudge(lambda _, __: "CORRECT")
    async with serve_model(judge.reply) as url:
        ended = await sandbox_eval("compare", *outputs, *judge_arguments(url, votes=1))
    assert (ended.returncode, ended.stderr) == (0, "")


async def test_comparison_does_not_change_the_grades_of_the_last_report(tmp_path: Path) -> None:
    outputs = [answered(tmp_path / name, [(judged(1), "1 m")]) for name in ("a", "b")]
    judge = ReplyingJudge(lambda _, __: "CORRECT")
    async with serve_model(judge.reply) as url:
        await sandbox_eval("report", outputs[0], *judge_arguments(url, votes=1))
    ended = await sandbox_eval("compare", *outputs)
    assert ended.returncode == 0, ended.stderr
    assert [record["score"] for record in grades_of(outputs[0])] == [1.0]
    assert not (outputs[1] / "grades.jsonl").exists()


async def test_comparison_of_different_suites_is_refused(tmp_path: Path) -> None:
    one, two = sums(tmp_path / "one", 2), sums(tmp_path / "two", 3)
    outputs = [evaluation(tmp_path / "a", one, 1), evaluation(tmp_path / "b", two, 1)]
    ended = await sandbox_eval("compare", *outputs)
    assert (ended.returncode, ended.stdout) == (1, "")
    hashes = [suite.manifest.sha256[:12] for suite in (one, two)]
    assert ended.stderr == (
        f"sandbox-eval: The suites differ: synthetic is {hashes[0]} in {outputs[0]}, and"
        f" {hashes[1]} in {outputs[1]}. Compare evaluations of the same suites.\n"
    )


@pytest.mark.parametrize("names", [("a",), ("a", "a")])
async def test_compare_needs_two_different_directories(names: tuple[str], tmp_path: Path) -> None:
    evaluation(tmp_path / "a", sums(tmp_path / "data"), 1)
    ended = await sandbox_eval("compare", *(tmp_path / name for name in names))
    assert ended.returncode == 1
    assert ended.stderr == "sandbox-eval: compare needs two or more different directories\n"


async def test_error_names_a_directory_that_has_no_run(tmp_path: Path) -> None:
    evaluation(tmp_path / "a", sums(tmp_path / "data"), 1)
    ended = await sandbox_eval("compare", tmp_path / "a", tmp_path / "b")
    assert ended.returncode == 1
    assert f"{tmp_path / 'b' / 'run.json'}: No such file or directory" in ended.stderr
