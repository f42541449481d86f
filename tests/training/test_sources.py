"""The sources of tasks: made files in each format, and the messages about malformed ones."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.training.made_sources import (
    HARBOUR,
    NORMANS,
    RACE,
    SQUAD_1,
    SQUAD_2,
    build,
    build_all,
    write_json,
    write_lines,
)
from training.__main__ import main
from training.rows import read_tasks


def test_questions_of_squad_1_become_tasks_of_the_types_span_and_number(tmp_path: Path) -> None:
    source = write_json(tmp_path / "train-v1.1.json", SQUAD_1)
    rows = build_all(source, "squad", tmp_path / "out")
    assert {question: (row.qa_type, row.ground_truth) for question, row in rows.items()} == {
        "In what country is Normandy located?": ("span", "France"),
        "Who was the Norse leader?": ("span", "Rollo"),
        "When did Rollo swear fealty?": ("number", "911"),
        "How many piers are there?": ("number", "12"),
    }
    row = rows["Who was the Norse leader?"]
    assert NORMANS in row.files.values()
    assert (row.domain, row.meta.licence) == ("squad", "CC-BY-SA-4.0")
    assert row.meta.source.startswith("train-v1.1.json (sha256 ")


def test_squad_file_may_be_indented(tmp_path: Path) -> None:
    source = tmp_path / "train.json"
    source.write_text(json.dumps(SQUAD_1, indent=2), "utf-8")
    assert len(build_all(source, "squad", tmp_path / "out")) == 4


def test_squad_2_questions_without_an_answer_are_dropped(tmp_path: Path) -> None:
    source = write_json(tmp_path / "dev-v2.0.json", SQUAD_2)
    assert list(build_all(source, "squad", tmp_path / "out")) == ["Who was the Norse leader?"]
    assert read_tasks(tmp_path / "out").manifest.dropped == {"questions: unanswerable": 1}


def test_squad_rows_of_one_context_are_grouped(tmp_path: Path) -> None:
    source = write_lines(
        tmp_path / "rows.jsonl",
        *(
            {
                "id": str(number),
                "title": "Normans",
                "context": NORMANS,
                "question": question,
                "answers": {"text": [answer], "answer_start": [0]},
            }
            for number, (question, answer) in enumerate(
                [("Where is Normandy?", "France"), ("Who was the leader?", "Rollo")]
            )
        ),
    )
    rows = build_all(source, "squad", tmp_path / "out")
    assert read_tasks(tmp_path / "out").manifest.contexts == 1
    assert "Question: Where is Normandy?\nAnswer: France\n" in (
        rows["Who was the leader?"].problem_statement
    )


def test_questions_of_a_race_directory_become_choice_tasks(tmp_path: Path) -> None:
    write_json(tmp_path / "RACE/train/high/1234.txt", RACE)
    rows = build_all(tmp_path / "RACE", "race", tmp_path / "out")
    row = rows["What does Omar do?"]
    assert (row.qa_type, row.ground_truth, row.domain) == ("mcq1", "B", "race")
    assert row.meta.question == (
        "What does Omar do?\nA. A dentist.\nB. A baker.\nC. A pilot.\nD. A nurse."
    )
    assert rows["Omar is famous for his  _  ."].meta.gold_files == ("doc_01.txt",)


def test_race_rows_in_the_format_of_the_hugging_face_hub_are_read(tmp_path: Path) -> None:
    fields = {
        "example_id": "middle7.txt",
        "article": "Ina paints boats.",
        "answer": "A",
        "question": "What does Ina paint?",
        "options": ["Boats", "Walls", "Hats", "Doors"],
    }
    source = write_lines(tmp_path / "train.jsonl", fields, {**fields, "question": "And Ina?"})
    rows = build_all(source, "race", tmp_path / "out")
    assert {row.ground_truth for row in rows.values()} == {"A"}
    assert read_tasks(tmp_path / "out").manifest.contexts == 1


def test_directory_of_documents_with_questions_becomes_tasks(tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    write_lines(
        folder / "questions.jsonl",
        {"question": "Who dredged it?", "answer": "Edda Crane", "documents": "port/tallow.md"},
        {"question": "How many piers?", "answer": 12, "documents": ["port/tallow.md"]},
        {
            "question": "Which two names occur?",
            "answer": ["Rollo", "Edda"],
            "choices": ["Rollo", "Edda", "Omar"],
            "documents": ["port/tallow.md", "normans.txt"],
            "domain": "names",
        },
    )
    (folder / "port").mkdir()
    (folder / "port/tallow.md").write_text(HARBOUR, "utf-8")
    (folder / "normans.txt").write_text(NORMANS, "utf-8")
    (folder / "spare.txt").write_text("A text that no question names.", "utf-8")
    options = ("--licence", "MIT", "--names", "titles")
    rows = build_all(folder, "directory", tmp_path / "out", *options)
    assert {q: (r.domain, r.qa_type, r.ground_truth) for q, r in rows.items()} == {
        "Who dredged it?": ("port", "span", "Edda Crane"),
        "How many piers?": ("port", "number", "12"),
        "Which two names occur?": ("names", "mcqN", "A,B"),
    }
    assert rows["Who dredged it?"].meta.gold_files == ("tallow.txt",)
    assert rows["Who dredged it?"].meta.licence == "MIT"
    assert "spare.txt" in rows["Who dredged it?"].files
    names = rows["Which two names occur?"].files
    assert (names["tallow.txt"], names["normans.txt"]) == (HARBOUR, NORMANS)


def test_generic_rows_may_have_several_documents_and_a_stated_type(tmp_path: Path) -> None:
    source = write_lines(
        tmp_path / "rows.jsonl",
        {
            "contexts": {"Port": HARBOUR, "People": NORMANS},
            "tasks": [
                {"q": "Which letters come first?", "a": ["A"], "choices": ["a", "b"]},
                {"q": "Describe the harbour.", "a": "dredged", "type": "free"},
                {"q": "What is it like?", "a": "quite old"},
            ],
            "domain": "mixed",
        },
        {"context": "One text.", "tasks": [{"question": "How many?", "answer": "One"}]},
    )
    rows = build_all(source, "generic", tmp_path / "out", "--distractors", "0")
    assert {question: row.qa_type for question, row in rows.items()} == {
        "Which letters come first?": "mcq1",
        "Describe the harbour.": "free",
        "What is it like?": "free",
        "How many?": "span",
    }
    row = rows["Describe the harbour."]
    assert sorted(row.files.values()) == sorted((HARBOUR, NORMANS))
    assert [row.files[name] for name in row.meta.gold_files] == [HARBOUR]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "unanswerable"),
        ("", "unanswerable"),
        ("Yes", "yes or no"),
        ("no.", "yes or no"),
        ("+", "answer without letters and digits"),
        ("word " * 31, "answer over 30 tokens"),
        ("x" * 10_001, "answer over 10,000 characters"),
    ],
)
def test_question_that_cannot_be_rewarded_is_dropped(
    answer: str | None, reason: str, tmp_path: Path
) -> None:
    kept = {"q": "How many piers?", "a": "12"}
    row = {"context": HARBOUR, "tasks": [kept, {"q": "Is it old?", "a": answer}]}
    source = write_lines(tmp_path / "rows.jsonl", row)
    assert list(build_all(source, "generic", tmp_path / "out")) == ["How many piers?"]
    assert read_tasks(tmp_path / "out").manifest.dropped == {f"questions: {reason}": 1}


def test_answer_of_30_tokens_is_kept(tmp_path: Path) -> None:
    row = {"context": HARBOUR, "tasks": [{"q": "Why?", "a": " ".join(["word"] * 30)}]}
    source = write_lines(tmp_path / "rows.jsonl", row)
    assert list(build_all(source, "generic", tmp_path / "out")) == ["Why?"]


def test_question_of_type_number_whose_answer_is_no_number_is_dropped(tmp_path: Path) -> None:
    tasks = [{"q": "Why?", "a": "about 12", "type": "number"}, {"q": "How many?", "a": 12}]
    source = write_lines(tmp_path / "rows.jsonl", {"context": HARBOUR, "tasks": tasks})
    assert list(build_all(source, "generic", tmp_path / "out")) == ["How many?"]


def test_question_with_equal_choices_and_repeated_question_are_dropped(tmp_path: Path) -> None:
    twice = {"q": "Who?", "a": "Edda Crane"}
    equal = {"q": "Which?", "a": "A", "choices": ["Boats", "boats."]}
    row = {"context": HARBOUR, "tasks": [twice, {"q": "who", "a": "Edda"}, equal]}
    source = write_lines(tmp_path / "rows.jsonl", row)
    assert list(build_all(source, "generic", tmp_path / "out")) == ["Who?"]
    dropped = read_tasks(tmp_path / "out").manifest.dropped
    assert dropped == {"questions: repeated": 1, "questions: two equal choices": 1}


GENERIC: Mapping[str, Any] = {"context": HARBOUR, "tasks": [{"q": "Who?", "a": "Edda Crane"}]}


@pytest.mark.parametrize(
    ("kind", "row", "fault"),
    [
        ("squad", {"data": 1}, "rows.jsonl:1: data: a list is required"),
        ("squad", {"data": ["x"]}, "rows.jsonl:1: data: a list of objects is required"),
        ("squad", {"data": [{}]}, "rows.jsonl:1: the field title is missing"),
        (
            "squad",
            {"context": "c", "question": "q", "answers": ["x"]},
            "rows.jsonl:1: answers: an object with a list `text` is required",
        ),
        ("race", {"article": "a"}, "rows.jsonl:1: the field options is missing"),
        (
            "race",
            {"article": "a", "question": "q", "options": ["x", "y"], "answer": "C"},
            "rows.jsonl:1: answer: 'C' is none of the choices",
        ),
        ("generic", {"tasks": []}, "rows.jsonl:1: the field context is missing"),
        ("generic", {**GENERIC, "tasks": []}, "there are no questions"),
        ("generic", {**GENERIC, "tasks": [{"a": "x"}]}, "rows.jsonl:1: the field question is"),
        (
            "generic",
            {**GENERIC, "tasks": [{"q": "x"}]},
            "rows.jsonl:1: the field answer is missing",
        ),
        (
            "generic",
            {**GENERIC, "tasks": [{"q": "x", "a": "y", "type": "mcq1"}]},
            "rows.jsonl:1: type: 'mcq1' is not number, span or free",
        ),
        (
            "generic",
            {**GENERIC, "tasks": [{"q": "x", "a": "A", "choices": ["one"]}]},
            "rows.jsonl:1: choices: a list of 2 to 26 texts is required",
        ),
        (
            "generic",
            {**GENERIC, "tasks": [{"q": "x", "a": {"b": 1}}]},
            "rows.jsonl:1: answer: text or a number is required",
        ),
        ("generic", {**GENERIC, "contexts": 5}, "rows.jsonl:1: contexts: "),
        ("generic", {**GENERIC, "domain": "\ud800"}, "rows.jsonl:1: not valid Unicode: "),
        (
            "generic",
            {"context": "\ud800", "tasks": [{"q": "x", "a": "y"}]},
            "rows.jsonl:1: not valid Unicode: ",
        ),
        (
            "generic",
            {**GENERIC, "tasks": [{"q": "Is it?", "a": "yes"}]},
            "every question was left out: questions: yes or no (1)",
        ),
    ],
)
def test_error_names_the_fault_of_a_malformed_source_in_one_line(
    kind: str,
    row: Mapping[str, Any],
    fault: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = write_lines(tmp_path / "rows.jsonl", row)
    arguments = ["tasks", "build", str(source), "--kind", kind, "--out", str(tmp_path / "out")]
    assert main([*arguments, "--seed", "0"]) == 1
    message = capsys.readouterr().err
    assert message.startswith("sandbox-train: ")
    assert fault in message
    assert message.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ({}, "questions.jsonl: No such file or directory."),
        (
            {"questions.jsonl": '{"question": "q", "answer": "a", "documents": "b.txt"}'},
            "documents: there is no file b.txt in ",
        ),
        (
            {"questions.jsonl": '{"question": "q", "answer": "a", "documents": []}'},
            "documents: a file is required",
        ),
        ({"questions.jsonl": '{"question": "q"}'}, "the field documents is missing"),
        ({"a.txt": "\udcff", "questions.jsonl": "{}"}, "a.txt: not UTF-8: "),
    ],
)
def test_error_names_the_fault_of_a_malformed_directory_in_one_line(
    files: Mapping[str, str], fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    arguments = ["tasks", "build", str(folder), "--kind", "directory", "--out", "out"]
    assert main([*arguments, "--seed", "0"]) == 1
    message = capsys.readouterr().err
    assert (message.count("\n"), fault in message) == (1, True), message


def test_invalid_count_of_synthetic_contexts_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["tasks", "build", "many", "--kind", "synthetic", "--out", "out", "--seed", "0"]
    assert main(arguments) == 1
    assert "the source is a number of contexts from 1 to 200000" in capsys.readouterr().err


def test_error_names_a_race_file_that_is_not_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "1.txt").write_text("An article.", "utf-8")
    arguments = ["tasks", "build", str(tmp_path), "--kind", "race", "--out", "out", "--seed", "0"]
    assert main(arguments) == 1
    assert "sandbox-train: 1.txt: not JSON: " in capsys.readouterr().err


def test_column_input_files_holds_a_json_object_of_names_and_texts(tmp_path: Path) -> None:
    (row,) = build(
        write_lines(tmp_path / "rows.jsonl", GENERIC), "generic", tmp_path / "out"
    ).all_rows
    line = json.loads((tmp_path / "out/train.jsonl").read_text("utf-8"))
    assert list(line) == [
        *("id", "domain", "problem_statement", "ground_truth", "input_files", "qa_type", "meta")
    ]
    assert json.loads(line["input_files"]) == {"doc_01.txt": HARBOUR} == row.files
