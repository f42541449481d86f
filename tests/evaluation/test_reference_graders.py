"""The strict graders and the reference's on labelled answers, side by side, and `--grader`."""

import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from evaluation.ifbench_grader import NLTK_DATA_PATH
from evaluation.scripted import serve_model
from tests.evaluation.evaluation_process import (
    answered,
    grades_of,
    rows,
    sample,
    sandbox_eval,
    with_packages,
)
from tests.evaluation.grader_packages import grader_packages
from tests.evaluation.labelled_answers import (
    CHOICE,
    GYM,
    GYM_ENTRIES,
    IFBENCH,
    JSONS,
    MATH,
    NEAREST,
    NEAREST_OF_FAMILY,
    NUMBERS,
    TEXTS,
    VERBATIM,
    VERDICTS,
    Case,
    GymCase,
)
from tests.evaluation.test_judge import ReplyingJudge, judge_arguments

pytest.importorskip("math_verify", reason="the extra `evaluation` is not installed")

Work = list[tuple[Mapping[str, Any], str]]
HERE = Path(__file__).parent
GRADERS = ("math", "choice", "ifbench", "judge")
DOMAINS = {"math": "math", "choice": "chemistry", "ifbench": "instructions", "judge": "physics"}
NO_DATA = "ungradable: the NLTK data "
SCORES = {"right": 1.0, "wrong": 0.0, "form": 0.0, "none": None}


@pytest.fixture(scope="module")
def packages() -> Path:
    return grader_packages()


def labelled(grader: str) -> tuple[Work, Sequence[tuple[str, int]]]:
    """Return the samples and the answers of a table, and their labels."""
    domain = DOMAINS[grader]
    if grader == "ifbench":
        work = [(instruction(case.name, case.kwargs), case.answer) for case in IFBENCH]
        return work, [(case.label, case.reference) for case in IFBENCH]
    if grader == "judge":
        work = [(physics(number), f"verdict {number}") for number in range(len(VERDICTS))]
        return work, [(case.label, case.reference) for case in VERDICTS]
    cases = MATH if grader == "math" else CHOICE
    fields = [sample(grader=grader, domain=domain, ground_truth=case.truth) for case in cases]
    work = list(zip(fields, [case.answer for case in cases], strict=True))
    return work, [(case.label, case.reference) for case in cases]


def instruction(name: str, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    entry = {"key": "1", "prompt": "Do.", "instruction_id_list": [name], "kwargs": [kwargs]}
    return sample(grader="ifbench", domain="instructions", ground_truth="", entry=entry)


def physics(number: int) -> Mapping[str, Any]:
    entry = {"question": f"Question {number}?", "rubric": "physics"}
    return sample(grader="judge", domain="physics", ground_truth="1 m", entry=entry)


def verdict_reply(prompt: str, _: int) -> str:
    """Return the reply of the table to an answer `verdict N`."""
    return VERDICTS[int(prompt.rpartition("verdict ")[2].split()[0])].answer


@pytest.mark.parametrize("grader", GRADERS)
async def test_both_graders_agree_with_the_labels_and_the_references_own_scores(
    grader: str, packages: Path, tmp_path: Path
) -> None:
    work, labels = labelled(grader)
    assert len(work) >= 30
    output = answered(tmp_path, work)
    async with serve_model(ReplyingJudge(verdict_reply).reply) as url:
        arguments = ("--grader", "both", *judge_arguments(url, votes=1))
        ended = await sandbox_eval("report", output, *arguments, packages=packages)
        own = await reference_scores(packages, tmp_path, url)
    assert ended.returncode == (3 if grader == "judge" else 0), ended.stderr
    records = grades_of(output)
    without_data = [str(record["error"]).startswith(NO_DATA) for record in records]
    if grader == "ifbench":
        needed = [case.needs_data for case in IFBENCH]
        assert all(needs for needs, lacks in zip(needed, without_data, strict=True) if lacks)
    graded = [number for number, lacks in enumerate(without_data) if not lacks]
    assert len(graded) >= 30
    assert [
        (work[n][1], records[n]["score"], records[n]["format_failure"] or False) for n in graded
    ] == [(work[n][1], SCORES[labels[n][0]], labels[n][0] == "form") for n in graded]
    assert [(work[n][1], records[n]["reference_score"]) for n in graded] == [
        (work[n][1], labels[n][1]) for n in graded
    ]
    assert [records[n]["reference_score"] for n in graded] == [own[n] for n in graded]


def exact_form_sample(grader: str, case: Case | GymCase) -> Mapping[str, Any]:
    """Return the sample of a case, whose domain is the reference's task with the nearest grader."""
    if isinstance(case, Case):
        return sample(grader=grader, domain=NEAREST[grader], ground_truth=case.truth)
    entry = GYM_ENTRIES[case.family]
    return sample(
        grader=grader,
        domain=NEAREST_OF_FAMILY[case.family],
        kind=case.family,
        ground_truth=entry["answer"],
        entry=entry,
    )


@pytest.mark.parametrize(
    ("grader", "cases"),
    [
        ("number", NUMBERS),
        ("text", TEXTS),
        ("verbatim", VERBATIM),
        ("json", JSONS),
        ("reasoning-gym", GYM),
    ],
)
async def test_our_grader_and_nearest_reference_grader_score_exact_form_answers_as_listed(
    grader: str, cases: Sequence[Case | GymCase], packages: Path, tmp_path: Path
) -> None:
    if grader == "reasoning-gym":
        pytest.importorskip("reasoning_gym", reason="the extra `evaluation` is not installed")
    fields = [exact_form_sample(grader, case) for case in cases]
    output = answered(tmp_path, list(zip(fields, [case.answer for case in cases], strict=True)))
    ended = await sandbox_eval("report", output, "--grader", "both", packages=packages)
    assert ended.returncode == 0, ended.stderr
    records = grades_of(output)
    own = await reference_scores(packages, tmp_path, "")
    # The report has no grade of the reference, as it has no grader for these forms.
    assert [
        (case, record["score"], record["format_failure"], record["reference_score"], score)
        for case, record, score in zip(cases, records, own, strict=True)
    ] == [(case, SCORES[case.label], case.label == "form", None, case.reference) for case in cases]


async def test_report_has_the_scores_of_both_graders(packages: Path, tmp_path: Path) -> None:
    choice = sample(grader="choice", domain="chemistry", ground_truth="C")
    answers = ("cannot tell", "Answer: C", "Answer: B", "I think it is C")
    output = answered(tmp_path, [*((choice, answer) for answer in answers), (sample(), "0")])
    ended = await sandbox_eval("report", output, "--grader", "both", packages=packages)
    assert ended.returncode == 0, ended.stderr
    assert rows(ended.stdout, "### Graders") == [
        ["chemistry", "plain", "25.0", "75.0", "-", "2", "0", "0", "0", "0"],
        ["sums", "plain", "100.0", "-", "-", "0", "0", "0", "0", "0"],
        ["all domains", "plain", "40.0", "75.0", "-", "2", "0", "0", "0", "0"],
    ]
    assert (
        "Reference: the paper's own graders, llm-in-sandbox 0.2.0. They have none for sums, which"
        " the column leaves out, also in the row of all domains."
    ) in ended.stdout
    assert "- graders of the accuracy: strict\n" in ended.stdout
    assert [row[1].split()[0] for row in rows(ended.stdout, "## m")] == ["25.0", "100.0", "40.0"]
    ended = await sandbox_eval("report", output, "--grader", "reference", packages=packages)
    assert [row[1].split()[0] for row in rows(ended.stdout, "## m")] == ["75.0", "100.0", "80.0"]
    assert (
        "- graders of the accuracy: those of the reference, llm-in-sandbox 0.2.0; strict in sums,"
        " for which the reference has no grader\n"
    ) in ended.stdout


async def test_report_has_no_reference_score_for_reasoning_gym(tmp_path: Path) -> None:
    entry = {"question": "gcd of 6 and 4?", "answer": "2", "metadata": {}}
    fields = sample(grader="reasoning-gym", domain="reasoning-gym", kind="gcd", entry=entry)
    output = answered(tmp_path, [({**fields, "ground_truth": "2"}, "Answer: 2")])
    ended = await sandbox_eval("report", output, "--grader", "both")
    assert ended.returncode == 0, ended.stderr
    assert rows(ended.stdout, "### Graders")[0][:4] == ["reasoning-gym", "plain", "100.0", "-"]
    assert "They have none for reasoning-gym, which the column leaves out" in ended.stdout
    assert [record["reference_score"] for record in grades_of(output)] == [None]


async def test_context_overflow_counts_as_a_wrong_answer_for_each_grader_of_a_sample(
    packages: Path, tmp_path: Path
) -> None:
    choice = sample(grader="choice", domain="chemistry", ground_truth="C")
    output = answered(tmp_path, [(choice, "C"), (sample(), "0")], status="context_overflow")
    await sandbox_eval("report", output, "--grader", "both", packages=packages)
    scores = [(record["score"], record["reference_score"]) for record in grades_of(output)]
    assert scores == [(0.0, 0.0), (0.0, None)]


async def test_error_of_a_report_names_the_missing_reference_package(tmp_path: Path) -> None:
    output = answered(tmp_path, [(sample(grader="choice", ground_truth="C"), "C")])
    if importlib.util.find_spec("llm_in_sandbox"):
        pytest.skip("the package llm-in-sandbox is installed")
    ended = await sandbox_eval("report", output, "--grader", "reference")
    assert ended.returncode == 1
    assert ended.stderr == (
        "sandbox-eval: the package llm-in-sandbox is not installed: pip install --no-deps"
        " llm-in-sandbox==0.2.0\n"
    )


async def test_long_context_answers_are_judged_with_the_long_context_prompt_of_the_reference(
    packages: Path, tmp_path: Path
) -> None:
    entry = {"question": "Who signed?", "rubric": "long-context"}
    fields = sample(grader="judge", domain="long-context", ground_truth="Ada", entry=entry)
    output = answered(tmp_path, [(fields, "<think>Bo?</think>Ada"), (fields, "")])
    judge = ReplyingJudge(lambda _, __: "No opinion.")
    async with serve_model(judge.reply) as url:
        arguments = ("--grader", "reference", *judge_arguments(url, votes=1))
        ended = await sandbox_eval("report", output, *arguments, packages=packages)
    assert ended.returncode == 0, ended.stderr
    # The reference counts a reply without a verdict as wrong, and also asks about empty answers.
    assert [record["score"] for record in grades_of(output)] == [0.0, 0.0]
    prompts = [body["messages"][0]["content"] for body in judge.bodies]
    assert len(prompts) == 2
    assert all("Who signed?" in prompt and "Bo?" not in prompt for prompt in prompts)


async def reference_scores(packages: Path, home: Path, judge_url: str) -> list[float]:
    """Return the scores of all answers by the reference's functions, called by its own code."""
    spacy = home / "stub" / "spacy"  # IFBench imports it to download a model that it does not use
    spacy.mkdir(parents=True)
    (spacy / "__init__.py").touch()
    (spacy / "cli.py").write_text("def download(name): ...\n", encoding="utf-8")
    environment = {
        **with_packages(packages, spacy.parent),
        "IFBENCH_PATH": str(packages / "ifbench"),
        "NLTK_DATA": str(packages / NLTK_DATA_PATH),
        "HOME": str(home),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    job = {"data": str(home), "judge_url": judge_url}
    with anyio.fail_after(300):
        done = await anyio.run_process(
            [sys.executable, str(HERE / "graders" / "reference_scores.py")],
            input=json.dumps(job).encode(),
            env=environment,
            check=False,
        )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    scores: list[float] = json.loads(done.stdout.splitlines()[-1])
    return scores
