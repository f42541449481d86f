"""Tasks of inspect_ai with exported samples. The file runs in the environment of inspect_ai."""

from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import json_dataset
from inspect_ai.scorer import pattern
from inspect_ai.solver import generate


@task
def exported(folder: str, name: str) -> Task:
    """Return the exported task of this name."""
    answer = Path(folder, f"{name}.txt").read_text(encoding="utf-8")
    return Task(
        dataset=json_dataset(str(Path(folder, f"{name}.jsonl"))),
        solver=generate(),
        scorer=pattern(answer, ignore_case=False),
    )
