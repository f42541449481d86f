"""A made task, for tests that need one."""

import json

from training.rows import Meta, QaType, TaskRow

META = Meta(
    source="made",
    licence="none",
    seed=0,
    context="0" * 64,
    question="Which?",
    n_examples=0,
    n_files=1,
    n_distractors=0,
    sizes=(1,),
    gold_files=("a.txt",),
)


def made_row(
    gold: str,
    qa_type: QaType,
    id: str = "made/1",
    problem: str = "Which?",
    file: tuple[str, str] = ("a.txt", "x"),
) -> TaskRow:
    """Return a task with the right answer `gold`. `file` is a name and a text."""
    return TaskRow(
        id=id,
        domain="made",
        problem_statement=problem,
        ground_truth=gold,
        input_files=json.dumps(dict([file])),
        qa_type=qa_type,
        meta=META,
    )
