"""Suites on disk: what is generated, and the errors of malformed ones."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from evaluation import synthetic
from evaluation.samples import Draft, SuiteError, load_suite, load_suites, write_suite
from tests.evaluation.evaluation_process import sample, sandbox_eval, sums


def write_lines(data: Path, *lines: str) -> Path:
    """Replace the samples of a suite by lines, with a manifest of the right hash."""
    suite = sums(data).directory
    text = "".join(f"{line}\n" for line in lines)
    (suite / "samples.jsonl").write_text(text, "utf-8")
    manifest = json.loads((suite / "manifest.json").read_text("utf-8"))
    manifest |= {"count": len(lines), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    (suite / "manifest.json").write_text(json.dumps(manifest), "utf-8")
    return suite


def fault_of(directory: Path) -> str:
    with pytest.raises(SuiteError) as caught:
        load_suite(directory)
    return str(caught.value)


SAMPLE = sample()
LAW = {"question": "?", "rubric": "law"}
WITHOUT_PROBLEM = {name: value for name, value in SAMPLE.items() if name != "problem"}


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("not json", "the object: Invalid JSON"),
        ("[]", "the object: "),
        (WITHOUT_PROBLEM, "problem: Field required"),
        ({**SAMPLE, "problem": ""}, "problem: String should have at least 1 character"),
        ({**SAMPLE, "ground_truth": 4}, "ground_truth: Input should be a valid string"),
        ({**SAMPLE, "grader": "exact"}, "grader: Input should be 'number', 'text'"),
        ({**SAMPLE, "id": "../x"}, "id: String should match pattern"),
        ({**SAMPLE, "more": 1}, "more: Extra inputs are not permitted"),
        ({**SAMPLE, "files": [{"name": "a/b", "sha256": "0" * 64}]}, "files.0.name: String should"),
        ({**SAMPLE, "files": [{"name": "a", "sha256": "../x"}]}, "files.0.sha256: String should"),
        ({**SAMPLE, "grader": "reasoning-gym"}, "entry: the grader reasoning-gym needs an entry"),
        ({**SAMPLE, "grader": "json", "ground_truth": "{"}, "ground_truth: not JSON"),
        ({**SAMPLE, "grader": "choice", "ground_truth": "c"}, "ground_truth: not one capital"),
        ({**SAMPLE, "grader": "judge"}, "entry: the grader judge needs an entry"),
        ({**SAMPLE, "grader": "judge", "entry": {"question": "?"}}, "entry.rubric: Field required"),
        ({**SAMPLE, "grader": "judge", "entry": LAW}, "entry.rubric: Input should be 'physics' or"),
        ({**SAMPLE, "grader": "ifbench", "entry": {"key": "1"}}, "entry.prompt: Field required"),
    ],
)
def test_error_names_the_line_and_field_of_a_malformed_sample(
    line: str | dict[str, Any], fault: str, tmp_path: Path
) -> None:
    text = line if isinstance(line, str) else json.dumps(line)
    suite = write_lines(tmp_path, json.dumps(sample(7)), text)
    assert fault_of(suite).startswith(f"{suite}/samples.jsonl:2: {fault}")


def test_error_names_an_id_that_two_samples_of_a_suite_have(tmp_path: Path) -> None:
    suite = write_lines(tmp_path, json.dumps(SAMPLE), json.dumps(SAMPLE))
    assert fault_of(suite) == f"{suite}/samples.jsonl:2: id: sum/0 is also on line 1"


def test_error_names_an_id_that_two_suites_have(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_suite(tmp_path / name, name, [Draft(SAMPLE)], licence="none", source="a test")
    with pytest.raises(SuiteError, match="the id sum/0 is in two suites"):
        load_suites(tmp_path, ["a", "b"])


def test_changed_samples_are_refused(tmp_path: Path) -> None:
    suite = sums(tmp_path).directory
    text = (suite / "samples.jsonl").read_text("utf-8")
    (suite / "samples.jsonl").write_text(text.replace("0 + 0", "0 + 1"), "utf-8")
    assert "does not have the manifest's hash" in fault_of(suite)


def test_error_for_missing_samples_has_the_actual_and_the_expected_count(tmp_path: Path) -> None:
    suite = sums(tmp_path, 2).directory
    text = (suite / "samples.jsonl").read_text("utf-8")
    (suite / "samples.jsonl").write_text(text.splitlines()[0] + "\n", "utf-8")
    assert "1 samples, but the manifest says 2" in fault_of(suite)


def test_changed_input_file_is_refused(tmp_path: Path) -> None:
    drafts = [Draft(SAMPLE, {"a.txt": "one"})]
    suite = write_suite(tmp_path / "a", "a", drafts, licence="none", source="a test")
    (file,) = suite.samples[0].files
    assert suite.read(file) == "one"
    (tmp_path / "a" / "files" / file.sha256).write_text("two", "utf-8")
    with pytest.raises(SuiteError, match="the file was changed"):
        suite.read(file)


async def test_error_for_an_unprepared_suite_has_the_command_that_prepares_it(
    tmp_path: Path,
) -> None:
    pytest.importorskip("rich", reason="the extra `evaluation` is not installed")
    ended = await sandbox_eval(
        *("run", "--data", tmp_path, "--output", tmp_path / "out", "--models", "m"),
        *("--suites", "synthetic"),
    )
    assert ended.returncode == 1
    assert f"Prepare the suite: sandbox-eval prepare synthetic --data {tmp_path}\n" in ended.stderr


async def test_error_names_an_unknown_suite(tmp_path: Path) -> None:
    ended = await sandbox_eval("prepare", "aime", "--data", tmp_path)
    assert (ended.returncode, ended.stderr) == (
        1,
        "sandbox-eval: no such suite: aime (use synthetic, reasoning-gym,"
        " aime25, ugphysics, chembench4k, medxpertqa, aa-lcr, ifbench)\n",
    )


def test_synthetic_problems_depend_only_on_the_seed() -> None:
    assert synthetic.generate(1, 12) == synthetic.generate(1, 12)
    assert synthetic.generate(1, 12) != synthetic.generate(2, 12)


def test_synthetic_problems_are_all_different() -> None:
    problems = [draft.fields["problem"] for draft in synthetic.generate(0, 200)]
    assert len(set(problems)) == len(problems)


def test_documents_of_long_document_problems_exceed_80_000_characters() -> None:
    drafts = [draft for draft in synthetic.generate(0, 6) if draft.documents]
    long = [draft for draft in drafts if draft.fields["domain"] == "long-documents"]
    assert min(sum(map(len, draft.documents.values())) for draft in long) > 80_000


async def test_reasoning_gym_problems_depend_only_on_the_seed(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym", reason="the extra `evaluation` is not installed")
    for name in ("a", "b"):
        ended = await sandbox_eval("prepare", "reasoning-gym", "--data", tmp_path / name)
        assert ended.returncode == 0, ended.stderr
    a, b = (load_suite(tmp_path / name / "reasoning-gym") for name in ("a", "b"))
    assert a.samples == b.samples
    assert a.manifest == b.manifest
    assert a.manifest.licence == "Apache-2.0"
    assert a.manifest.source.endswith("(PyPI), seed 0")
