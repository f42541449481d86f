"""The reference's benchmark command and sandbox-eval give the same score to each sample.

Both run the same tasks with the same scripted model, with and without a sandbox. The environment of
the benchmark command has hundreds of MiB: INSTALL_LARGE_STACKS=1 installs it into .stacks.
"""

import asyncio
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from evaluation.results import MODES, Mode
from evaluation.scripted import serve_model
from proxy.models.scripted import call, text_reply, tool_reply
from tests.e2e import proxy_process
from tests.evaluation.evaluation_process import grades_of, sandbox_eval
from tests.evaluation.grader_packages import grader_packages
from tests.evaluation.test_judge import ReplyingJudge, judge_arguments
from tests.fakes.backend import scripted_backend
from tests.reference.environment import (
    benchmark_image,
    benchmark_python,
    run_benchmark,
    run_judge,
)

pytest.importorskip("rich", reason="the extra `evaluation` is not installed")
pytestmark = pytest.mark.docker

MODEL = "m"
REFERENCE_MODES: Mapping[Mode, str] = {"plain": "llm", "sandbox": "llm-in-sandbox"}
DOCUMENT = "Ada signed it."
Answers = Sequence[tuple[str, str | None, float]]
"""A right answer, the model's answer (None: no answer file) and the score of the reference."""

MATH: Answers = [
    ("7", r"\boxed{7}", 1),
    ("7", r"\boxed{8}", 0),
    ("7", "7", 1),
    ("1/2", r"So it is \boxed{\frac{2}{4}}.", 1),
    ("7", "The answer is 7, I think.", 1),
    ("7", "cannot tell", 0),
    ("7", "", 0),
    ("7", None, 0),
]
CHOICE: Answers = [
    ("C", "C", 1),
    ("C", "D", 0),
    ("C", "c", 1),
    ("C", "cannot tell", 1),
    ("C", "The answer is C because A is wrong.", 1),
    ("C", "Not B but C.", 1),
    ("A", "It is a base.", 1),
    ("C", "", 0),
    ("C", None, 0),
]
LONG: Answers = [
    ("Ada", "Ada", 1),
    ("Ada", "Bo", 0),
    ("Ada", "<think>Bo?</think>Ada", 1),
    ("Ada", "It was Ada who signed.", 0),
    ("Ada", "", 0),
    ("Ada", None, 0),
]
PHYSICS: Answers = [
    ("9.8", "9.8", 1),
    ("9.8", "9.7", 0),
    ("9.8", "<think>9.7?</think>9.8", 1),
    ("9.8", r"\boxed{9.8}", 0),
    ("9.8", "", 0),
    ("9.8", None, 0),
]
BIOMED: Answers = [
    ("J", "J", 1),
    ("C", "D", 0),
    ("C", r"So it is \boxed{C}.", 1),
    ("C", "cannot tell", 1),
    ("C", "It is not C but D.", 0),
    ("C", "Answer: C, for A and B are wrong.", 1),
    ("A", "It is a base.", 1),
    ("C", "", 0),
    ("C", None, 0),
]
NO_SPACES = json.dumps({"instruction_id_list": ["format:no_whitespace"], "kwargs": [{}]})
FEW_WORDS = json.dumps(
    {
        "instruction_id_list": ["count:word_count_range", "format:title_case"],
        "kwargs": [{"min_words": 3, "max_words": 5}, {}],
    }
)
INSTRUCTIONS: Answers = [
    (NO_SPACES, "Oneword", 1),
    (NO_SPACES, "Two words", 0),
    (NO_SPACES, "Here it is:\nOneword", 1),
    (FEW_WORDS, "Three Nice Words", 1),
    (FEW_WORDS, "Three nice words", 0),
    (FEW_WORDS, "Two Words", 0),
    (NO_SPACES, "", 0),
    (NO_SPACES, None, 0),
]
TASKS: Mapping[str, tuple[str, Answers]] = {
    "math": ("aime25", MATH),
    "physics": ("ugphysics", PHYSICS),
    "chem": ("chembench4k", CHOICE),
    "biomed": ("medxpertqa", BIOMED),
    "long_context": ("aa-lcr", LONG),
    "instruct_follow": ("ifbench", INSTRUCTIONS),
}
"""The reference's name, our suite and the answers of each task."""
JUDGED = ("physics", "long_context")
"""The tasks whose answers the benchmark command scores with 0, until the reference's `judge.py`
judges them."""


def problems(task: str) -> list[dict[str, Any]]:
    """Return the rows of a task, as the reference's data set has them."""
    files = {"letter.txt": DOCUMENT} if task == "long_context" else None
    return [
        {
            "id": f"{task}-{number}",
            "domain": task,
            "problem_statement": f"Problem {task}-{number}: what is it?",
            "ground_truth": truth,
            "input_files": json.dumps(files) if files else None,
        }
        for number, (truth, _, _) in enumerate(TASKS[task][1])
    ]


def reply(body: dict[str, Any]) -> Mapping[str, Any]:
    """Write the answer of the problem, then submit; without tools, reply with the answer."""
    text = json.dumps(body["messages"])
    task, _, number = text.partition("Problem ")[2].partition(":")[0].rpartition("-")
    answer = TASKS[task][1][int(number)][1]
    if "tools" not in body:
        return text_reply(answer or "")
    if answer is None or any(message["role"] == "tool" for message in body["messages"]):
        return tool_reply(call("submit"))
    command = f"printf %s {shlex.quote(answer)} > /testbed/answer.txt"
    if task == "long_context":
        command += " && cat /testbed/documents/*"
    return tool_reply(call("execute_bash", command=command))


def verdict(prompt: str, _: int) -> str:
    """Return the reply of a judge that accepts nothing but the right answer itself."""
    official = prompt.partition("The OFFICIAL ANSWER: ")[2].partition("\n")[0]
    candidate = prompt.partition("CANDIDATE ANSWER TO ASSESS: ")[2].partition("\n")[0]
    return "CORRECT" if candidate == official else "INCORRECT"


async def test_sandbox_eval_gives_the_scores_of_the_references_benchmark_command(
    tmp_path: Path,
) -> None:
    python, packages = benchmark_python(), grader_packages()
    files = {task: tmp_path / f"{task}.json" for task in TASKS}
    for task, path in files.items():
        path.write_text("".join(json.dumps(row) + "\n" for row in problems(task)), "utf-8")
    judge = ReplyingJudge(verdict)
    expected = {
        (mode, f"{task}-{number}"): float(score)
        for mode in MODES
        for task, (_, answers) in TASKS.items()
        for number, (_, _, score) in enumerate(answers)
    }
    async with (
        scripted_backend(reply, model=MODEL) as backend,
        serve_model(judge.reply) as judge_url,
    ):
        with benchmark_image():
            theirs = await asyncio.to_thread(
                scores_by_reference, python, packages, files, backend.base_url, judge_url, tmp_path
            )
        seen_by_reference = len(backend.requests)
        ours = await scores_by_proxy(packages, files, backend.base_url, judge_url, tmp_path)
    assert theirs == expected
    assert ours == theirs
    texts = [json.dumps(each.body["messages"]) for each in backend.requests]
    halves = texts[:seen_by_reference], texts[seen_by_reference:]
    assert len(halves[0]) == len(halves[1])
    with_document = [sum(DOCUMENT in text for text in half) for half in halves]
    assert with_document[0] == with_document[1] > 0


def scores_by_reference(
    python: Path,
    packages: Path,
    files: Mapping[str, Path],
    base_url: str,
    judge_url: str,
    home: Path,
) -> dict[tuple[Mode, str], float]:
    """Return the scores of the reference by mode and problem."""
    scores: dict[tuple[Mode, str], float] = {}
    for mode in MODES:
        for task, path in files.items():
            found = run_benchmark(
                python, task, path, base_url, REFERENCE_MODES[mode], home, ifbench_packages=packages
            )
            results = {key: each["reward"] for key, each in found.items()}
            if task in JUDGED:
                judged = run_judge(python, task, found, judge_url, home)
                results = {key: each["score"] for key, each in judged.items()}
            scores |= {(mode, key): float(score) for key, score in results.items()}
    return scores


async def scores_by_proxy(
    packages: Path, files: Mapping[str, Path], base_url: str, judge_url: str, home: Path
) -> dict[tuple[Mode, str], float]:
    """Return the scores of sandbox-eval with the reference's graders, by mode and problem."""
    data, output = home / "data", home / "output"
    for task, path in files.items():
        name = TASKS[task][0]
        ended = await sandbox_eval("prepare", name, "--from", path, "--data", data)
        assert ended.returncode == 0, ended.stderr
    config = {"profile": "paper-long-context"}
    async with proxy_process.serving(home, "docker", base_url, config) as server:
        ended = await sandbox_eval(
            *("run", "--output", output, "--data", data, "--base-url", f"{server.url}/v1"),
            *("--models", MODEL, "--repeats", "1", "--concurrency", "1"),
        )
    assert ended.returncode == 0, ended.stderr
    arguments = ("--grader", "reference", *judge_arguments(judge_url, votes=1))
    ended = await sandbox_eval("report", output, *arguments, packages=packages)
    assert ended.returncode == 0, ended.stderr
    return {
        (each["mode"], each["sample"].rpartition("/")[2]): each["score"]
        for each in grades_of(output)
    }
