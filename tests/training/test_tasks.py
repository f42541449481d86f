"""`sandbox-train tasks`: the rules of a build, the draw of distractors, and the conversions."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluation.samples import load_suites
from proxy.models.scripted import text_reply
from tests.evaluation.evaluation_process import grades_of, report_of, sandbox_eval
from tests.fakes.backend import scripted_backend
from tests.fakes.server import running_proxy
from tests.training.made_sources import (
    HARBOUR,
    NORMANS,
    SQUAD_1,
    build,
    build_all,
    write_json,
    write_lines,
)
from training.__main__ import main
from training.contexts import Context, Document, Question
from training.convert import prompt_of
from training.distractors import MODES, Bm25
from training.leaks import NGRAM_WORDS, DecontaminationFilter
from training.rows import TaskRow, read_tasks
from training.sources import Source
from training.tasks import BuildOptions, BuildResult
from training.tasks import build as build_tasks

ROOT = Path(__file__).parents[2]
WORDS = ("Rollo", "1912", "12", "red fox", "the harbour", "Ada", "Ad", "912", "north")


def words_of(text: str) -> str:
    """Return the words of a text in lower case, by another rule than the code's."""
    kept = (char if char.isalnum() else " " for char in text.lower())
    return f" {' '.join(''.join(kept).split())} "


def statements(words: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(words, min_size=1, max_size=6).map(" met ".join)


@st.composite
def contexts(draw: st.DrawFn) -> list[Context]:
    """Return contexts whose texts and answers are made of few words, so that they collide. The
    number of a context is in its texts and in its questions."""
    words = st.sampled_from(WORDS)
    texts = st.lists(statements(words), min_size=1, max_size=3)
    return [
        Context(
            "made",
            draw(st.sampled_from(("a", "b"))),
            tuple(Document("title", f"Context c{number}: {text}.") for text in draw(texts)),
            tuple(
                Question(f"Question {at} of c{number}?", (draw(words),))
                for at in range(draw(st.integers(0, 5)))
            ),
        )
        for number in range(draw(st.integers(1, 8)))
    ]


def built(made: Sequence[Context], **options: Any) -> BuildResult:
    source = Source("generic", "made", "none", made)
    return build_tasks(source, BuildOptions(**{"seed": 0, "tasks_per_context": 9, **options}))


MADE = contexts()
OPTIONS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 3),
        "examples": st.integers(0, 4),
        "distractors": st.integers(0, 4),
        "distractor_mode": st.sampled_from(MODES),
        "names": st.sampled_from(("neutral", "titles")),
        "val_fraction": st.sampled_from((0.0, 0.5)),
    }
)


@given(MADE, OPTIONS)
@settings(max_examples=200)
def test_no_example_and_no_distractor_contains_the_answer(
    made: Sequence[Context], options: Mapping[str, Any]
) -> None:
    for row in [row for rows in built(made, **options).rows.values() for row in rows]:
        examples = row.problem_statement.split("\nAnswer: ")[1:]
        shown = [each.split("\n")[0] for each in examples]
        assert len(shown) == row.meta.n_examples <= options["examples"]
        assert not [each for each in shown if row.ground_truth.lower() in each.lower()]
        own = f"Context {row.meta.question.split()[-1].rstrip('?')}: "
        others = [text for text in row.files.values() if not text.startswith(own)]
        assert len(others) == row.meta.n_distractors <= options["distractors"]
        assert not [text for text in others if words_of(row.ground_truth) in words_of(text)]


@given(MADE, OPTIONS)
def test_metadata_of_a_task_row_agrees_with_its_files(
    made: Sequence[Context], options: Mapping[str, Any]
) -> None:
    for row in [row for rows in built(made, **options).rows.values() for row in rows]:
        files = row.files
        assert len(files) == row.meta.n_files
        assert [len(text) for text in files.values()] == list(row.meta.sizes)
        assert set(row.meta.gold_files) <= set(files)
        if row.qa_type == "span":
            golds = [words_of(files[name]) for name in row.meta.gold_files]
            assert all(row.ground_truth.lower() in gold for gold in golds)


@given(MADE, OPTIONS)
def test_splits_share_no_context_and_no_document(
    made: Sequence[Context], options: Mapping[str, Any]
) -> None:
    rows = built(made, **options).rows
    hashes = [{row.meta.context for row in rows[split]} for split in ("train", "val")]
    assert not hashes[0] & hashes[1]
    texts = [
        {text for row in rows[split] for text in row.files.values()} for split in ("train", "val")
    ]
    assert not texts[0] & texts[1]
    ids = [row.id for each in rows.values() for row in each]
    assert len(ids) == len(set(ids))


@given(MADE, st.integers(1, 5))
def test_limit_selects_a_subset_of_all_tasks(made: Sequence[Context], limit: int) -> None:
    everything = {row.id for row in built(made).rows["train"]}
    limited = [row.id for row in built(made, limit=limit).rows["train"]]
    assert len(limited) == min(limit, len(everything))
    assert set(limited) <= everything


# Determinism


def build_in_process(source: Path, out: Path, hash_seed: str) -> bytes:
    """Build in a new process, with a seed of Python's hashes, and return all bytes."""
    command = [sys.executable, "-m", "training", "tasks", "build", str(source), "--kind", "squad"]
    options = ["--seed", "7", "--val-fraction", "0.4", "--distractor-mode", "bm25"]
    subprocess.run(
        [*command, *options, "--out", str(out)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed},
        check=True,
        capture_output=True,
    )
    return b"".join(path.read_bytes() for path in sorted(out.iterdir()))


def test_equal_seeds_build_equal_task_files_in_different_processes(tmp_path: Path) -> None:
    source = write_json(tmp_path / "train.json", SQUAD_1)
    found = {build_in_process(source, tmp_path / each, each) for each in ("1", "2", "3")}
    assert len(found) == 1


def test_another_seed_gives_other_tasks_and_the_same_split(tmp_path: Path) -> None:
    options = ("--val-fraction", "0.3")
    first, second = (
        build("30", "synthetic", tmp_path / str(seed), *options, seed=seed) for seed in (1, 2)
    )
    assert {row.id for row in first.all_rows}.isdisjoint(row.id for row in second.all_rows)
    source = write_json(tmp_path / "train.json", SQUAD_1)
    splits = [
        {split: {row.meta.context for row in rows} for split, rows in each.rows.items()}
        for each in (build(source, "squad", tmp_path / f"s{n}", *options, seed=n) for n in (1, 2))
    ]
    assert splits[0] == splits[1]


def test_build_replaces_an_earlier_set_of_tasks_in_its_directory(tmp_path: Path) -> None:
    build("30", "synthetic", tmp_path / "out", "--val-fraction", "0.5")
    assert (tmp_path / "out/val.jsonl").exists()
    build("3", "synthetic", tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "manifest.json",
        "train.jsonl",
    ]


# Examples, names and distractors


def test_examples_of_a_task_are_earlier_questions_about_the_same_context(tmp_path: Path) -> None:
    rows = build_all(write_json(tmp_path / "train.json", SQUAD_1), "squad", tmp_path / "out")
    assert rows["In what country is Normandy located?"].meta.n_examples == 0
    assert rows["When did Rollo swear fealty?"].problem_statement == (
        "These questions about the documents have their answers beside them.\n\n"
        "Question: In what country is Normandy located?\nAnswer: France\n\n"
        "Question: Who was the Norse leader?\nAnswer: Rollo\n\n"
        "Answer the next question about the documents.\n\n"
        "Question: When did Rollo swear fealty?\n\nThe answer is a number."
    )


def test_multiple_choice_example_may_share_the_answer_letter_but_not_the_answer_text(
    tmp_path: Path,
) -> None:
    tasks = [
        {"q": "First?", "a": "A", "choices": ["bread", "milk"]},
        {"q": "Second?", "a": "A", "choices": ["salt", "milk"]},
        {"q": "Third?", "a": "B", "choices": ["oil", "salt"]},
    ]
    source = write_lines(tmp_path / "rows.jsonl", {"context": HARBOUR, "tasks": tasks})
    rows = build_all(source, "generic", tmp_path / "out")
    assert "First?" in rows["Second?"].problem_statement
    assert "First?" in rows["Third?"].problem_statement
    assert "Second?" not in rows["Third?"].problem_statement  # its answer is salt as well


def test_context_gets_one_task_by_default(tmp_path: Path) -> None:
    source = write_json(tmp_path / "train.json", SQUAD_1)
    assert len(build(source, "squad", tmp_path / "out").all_rows) == 2


def test_file_names_made_of_equal_titles_get_numbers(tmp_path: Path) -> None:
    contexts = {"Old port!": HARBOUR, "old port": "Another text."}
    row = {"contexts": contexts, "tasks": [{"q": "Who?", "a": "Edda Crane"}]}
    source = write_lines(tmp_path / "rows.jsonl", row)
    (task,) = build(source, "generic", tmp_path / "out", "--names", "titles").all_rows
    assert sorted(name.lower() for name in task.files) == ["old-port.txt", "old-port_2.txt"]


TOPICS = {
    "boats": ("A boat with a red keel.", "A boat with two masts and a keel."),
    "birds": ("A bird with a red bill.", "A heron stands on one leg."),
}


def distractors(tmp_path: Path, mode: str, question: str, answer: str) -> set[str]:
    """Return the two distractors of a task on the first text about boats."""
    rows: list[Mapping[str, Any]] = [
        {"context": text, "domain": topic, "tasks": []}
        for topic, texts in TOPICS.items()
        for text in texts
    ]
    own = "The keel of the boat was laid by Omar."
    asked = {"context": own, "domain": "boats", "tasks": [{"q": question, "a": answer}]}
    source = write_lines(tmp_path / "rows.jsonl", asked, *rows)
    options = ("--distractor-mode", mode, "--distractors", "2")
    (task,) = build(source, "generic", tmp_path / "out", *options).all_rows
    return set(task.files.values()) - {own}


def test_same_domain_distractors_have_the_domain_of_the_question(tmp_path: Path) -> None:
    found = distractors(tmp_path, "same-domain", "Who laid it?", "Omar")
    assert found == set(TOPICS["boats"])


def test_distractors_by_bm25_share_rare_words_with_the_question(tmp_path: Path) -> None:
    found = distractors(tmp_path, "bm25", "Whose red bill or masts are they?", "Omar")
    assert found == {"A bird with a red bill.", "A boat with two masts and a keel."}


DOCUMENTS = st.lists(st.lists(st.sampled_from("abcdef"), max_size=8), min_size=1, max_size=6)


@given(DOCUMENTS, st.lists(st.sampled_from("abcdefg"), max_size=4), st.integers(0, 6))
def test_distractor_ranking_follows_the_bm25_formula(
    documents: list[list[str]], query: list[str], count: int
) -> None:
    mean = sum(map(len, documents)) / len(documents) or 1

    def score(document: list[str]) -> float:
        total = 0.0
        for word in set(query) & set(document):
            having = sum(word in each for each in documents)
            weight = math.log(1 + (len(documents) - having + 0.5) / (having + 0.5))
            times = document.count(word)
            norm = 1.2 * (1 - 0.75 + 0.75 * len(document) / mean)
            total += weight * times * 2.2 / (times + norm)
        return total

    scores = list(map(score, documents))
    found = [scores[number] for number in Bm25(documents).best_documents(query, count)]
    expected = sorted((each for each in scores if each > 0), reverse=True)
    assert found == pytest.approx(expected[:count])


@pytest.mark.parametrize("mode", MODES)
def test_document_with_the_answer_is_no_distractor(mode: str, tmp_path: Path) -> None:
    found = distractors(tmp_path, mode, "Which keel of a boat with masts?", "Two masts")
    assert "A boat with two masts and a keel." not in found


def test_answer_that_is_a_number_is_found_as_a_whole_word_only(tmp_path: Path) -> None:
    rows = [
        {"context": "It has 12 piers.", "tasks": [{"q": "How many piers?", "a": "12"}]},
        {"context": "Built in 1912.", "tasks": []},
        {"context": "There are 12 birds.", "tasks": []},
    ]
    source = write_lines(tmp_path / "rows.jsonl", *rows)
    (task,) = build(source, "generic", tmp_path / "out").all_rows
    assert sorted(task.files.values()) == ["Built in 1912.", "It has 12 piers."]


def test_short_answer_is_found_in_a_script_without_spaces(tmp_path: Path) -> None:
    rows = [
        {"context": "首都は東京です。", "tasks": [{"q": "首都は", "a": "東京"}]},
        {"context": "彼女は東京に住んでいる。", "tasks": []},
    ]
    source = write_lines(tmp_path / "rows.jsonl", *rows)
    (task,) = build(source, "generic", tmp_path / "out").all_rows
    assert (task.qa_type, list(task.files.values())) == ("span", ["首都は東京です。"])


# Decontamination

PROMPT = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"


@given(st.integers(0, 20), st.sampled_from((" ", ", ", "\n")))
def test_text_that_shares_13_words_in_a_row_with_a_prompt_is_contaminated(
    length: int, space: str
) -> None:
    decontamination = DecontaminationFilter([f"{PROMPT} and more"])
    shared = space.join(PROMPT.upper().split()[1 : 1 + length])
    expected = min(length, 13) >= NGRAM_WORDS
    assert decontamination.is_contaminated(f"Before {shared} after") is expected


def test_contaminated_contexts_and_questions_are_dropped(tmp_path: Path) -> None:
    prompts = write_lines(
        tmp_path / "samples.jsonl", {"problem": PROMPT}, {"prompt": "How many piers are there?"}
    )
    source = write_lines(
        tmp_path / "rows.jsonl",
        {"context": f"So {PROMPT}.", "tasks": [{"q": "Which number is last?", "a": "fourteen"}]},
        {
            "context": HARBOUR,
            "tasks": [
                {"q": "How many piers are there?", "a": "12"},
                {"q": "Who dredged it?", "a": "Edda Crane"},
            ],
        },
        {"context": NORMANS, "tasks": []},
    )
    rows = build_all(source, "generic", tmp_path / "out", "--decontaminate", str(prompts))
    assert list(rows) == ["Who dredged it?"]
    assert sorted(rows["Who dredged it?"].files.values()) == sorted((HARBOUR, NORMANS))
    assert read_tasks(tmp_path / "out").manifest.dropped == {
        "contexts: contaminated": 1,
        "questions: contaminated": 1,
    }


# Reading, statistics and conversions


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    build("12", "synthetic", tmp_path / "tasks", "--val-fraction", "0.3")
    return tmp_path / "tasks"


def test_command_stats_prints_the_counts_of_the_rows(
    tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tasks", "stats", str(tasks)]) == 0
    printed = capsys.readouterr().out
    rows = read_tasks(tasks).rows
    counts = f"{len(rows['train'])} | {len(rows['val'])} | 12"
    assert f"| all types | {counts} |" in printed
    assert "| files | 7 | 7 |" in printed
    assert "12 contexts and 180 questions in the source" in printed


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (
            lambda text: text[:-5],
            "train.jsonl: the file's hash is not the manifest's. Build the tasks again.",
        ),
        (None, "train.jsonl: No such file or directory. Build the tasks: sandbox-train tasks"),
    ],
)
def test_changed_or_missing_tasks_file_is_refused(
    change: Any, fault: str, tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tasks / "train.jsonl"
    if change is None:
        path.unlink()
    else:
        path.write_text(change(path.read_text("utf-8")), "utf-8")
    assert main(["tasks", "stats", str(tasks)]) == 1
    assert fault in capsys.readouterr().err


def converted(tasks: Path, target: str, *options: str) -> list[dict[str, Any]]:
    out = tasks.parent / f"{target}.jsonl"
    command = ["tasks", "convert", str(tasks), "--to", target, "--out", str(out)]
    assert main([*command, *options]) == 0
    return [json.loads(line) for line in out.read_text("utf-8").splitlines()]


def test_tasks_converted_for_trl_have_the_columns_of_the_task(tasks: Path) -> None:
    rows = read_tasks(tasks).rows["train"]
    assert converted(tasks, "trl") == [
        {
            "prompt": [{"role": "user", "content": row.problem_statement}],
            **{name: getattr(row, name) for name in TaskRow.model_fields if name != "meta"},
        }
        for row in rows
    ]


def test_tasks_converted_for_verl_have_the_fields_of_its_data_format(tasks: Path) -> None:
    row, found = read_tasks(tasks).rows["val"][0], converted(tasks, "verl", "--split", "val")[0]
    assert found == {
        "data_source": "synthetic",
        "prompt": [{"role": "user", "content": row.problem_statement}],
        "ability": row.qa_type,
        "reward_model": {"style": "rule", "ground_truth": row.ground_truth},
        "extra_info": {
            "split": "val",
            "index": 0,
            "id": row.id,
            "qa_type": row.qa_type,
            "input_files": row.input_files,
        },
    }


@pytest.mark.parametrize("target", ["trl", "verl"])
def test_prompt_contains_the_documents_of_its_row_with_option_context_prompt(
    target: str, tasks: Path
) -> None:
    row, found = read_tasks(tasks).rows["train"][0], converted(tasks, target, "--context", "prompt")
    (message,) = found[0]["prompt"]
    assert message["content"] == prompt_of(row, "prompt")
    assert message["content"].endswith(row.problem_statement)
    for name, text in row.files.items():
        assert f"BEGIN DOCUMENT {name}\n{text}\nEND DOCUMENT {name}\n" in message["content"]
    assert found[0].get("input_files", found[0].get("extra_info", {}).get("input_files")) == "{}"


def test_tasks_converted_to_a_suite_keep_their_files_and_get_graders(tmp_path: Path) -> None:
    rows = {
        "context": HARBOUR,
        "tasks": [
            {"q": "Who?", "a": "Edda Crane"},
            {"q": "How many?", "a": "12"},
            {"q": "Which?", "a": "B", "choices": ["Rollo", "Edda"]},
            {"q": "Which ones?", "a": ["A", "C"], "choices": ["Edda", "Rollo", "Tallow"]},
            {"q": "Why?", "a": "to let ships in"},
        ],
    }
    source = write_lines(tmp_path / "rows.jsonl", rows)
    build(source, "generic", tmp_path / "tasks", "--tasks-per-context", "9")
    out = tmp_path / "data/port"
    command = ["tasks", "convert", str(tmp_path / "tasks"), "--to", "bench", "--out", str(out)]
    assert main(command) == 0
    (suite,) = load_suites(tmp_path / "data", ["port"])
    assert {sample.kind: (sample.grader, sample.ground_truth) for sample in suite.samples} == {
        "span": ("text", "Edda Crane"),
        "number": ("number", "12"),
        "mcq1": ("choice", "B"),
        "mcqN": ("text", "A,C"),
        "free": ("judge", "to let ships in"),
    }
    assert [suite.read(file) for file in suite.samples[0].files] == [HARBOUR]
    assert main([*command, "--context", "prompt"]) == 0
    (suite,) = load_suites(tmp_path / "data", ["port"])
    assert HARBOUR in suite.samples[0].problem
    assert not suite.samples[0].files


async def test_converted_suite_is_evaluated_by_sandbox_eval(tmp_path: Path) -> None:
    pytest.importorskip("rich", reason="the extra `evaluation` is not installed")
    row = {"context": HARBOUR, "tasks": [{"q": "Who?", "a": "Edda Crane"}]}
    build(write_lines(tmp_path / "rows.jsonl", row), "generic", tmp_path / "tasks")
    out = tmp_path / "data/port"
    command = ["tasks", "convert", str(tmp_path / "tasks"), "--to", "bench", "--out", str(out)]
    assert main(command) == 0
    script = [text_reply("Edda dredged it.\nAnswer: Edda Crane"), text_reply("Answer: Omar")]
    async with (
        scripted_backend(script, model="m") as backend,
        running_proxy(backend, "memory", tmp_path / "state") as url,
    ):
        where = ("--output", tmp_path / "output", "--data", tmp_path / "data")
        what = ("--models", "m", "--modes", "plain", "--repeats", "2", "--concurrency", "1")
        ended = await sandbox_eval("run", *where, *what, "--base-url", f"{url}/v1")
    assert ended.returncode == 0, ended.stderr
    await report_of(tmp_path / "output")
    assert [each["score"] for each in grades_of(tmp_path / "output")] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--split", "val"], "there are no rows in the split val"),
        (["--to", "bench", "--out", "no name"], "no name: the name of a suite has letters"),
        (["--out", "."], ".: Is a directory"),
    ],
)
def test_conversion_with_impossible_options_is_refused(
    options: Sequence[str], fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build("2", "synthetic", tmp_path / "tasks")
    command = ["tasks", "convert", str(tmp_path / "tasks"), "--to", "trl"]
    assert main([*command, "--out", str(tmp_path / "a.jsonl"), *options]) == 1
    assert fault in capsys.readouterr().err
