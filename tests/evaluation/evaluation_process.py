"""Run the real `sandbox-eval` command as a process."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio

from evaluation.results import Result, RunInfo, RunSettings, Status, open_results
from evaluation.samples import Draft, Suite, load_suite, write_suite

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "evaluation")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
TIMEOUT_S = 300


async def sandbox_eval(
    *arguments: str | Path, packages: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the command until it exits, with the Python packages of a folder and with further
    environment variables."""
    environment = ENVIRONMENT if packages is None else with_packages(packages)
    with anyio.fail_after(TIMEOUT_S):
        ended = await anyio.run_process(
            [*COMMAND, *map(str, arguments)], check=False, env={**environment, **variables}
        )
    output = (ended.stdout.decode(), ended.stderr.decode())
    return subprocess.CompletedProcess(ended.args, ended.returncode, *output)


def with_packages(*folders: Path) -> Mapping[str, str]:
    """Return the environment of a process that imports the packages of folders."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *folders)))}


async def report_of(output: Path) -> str:
    """Return the report of an evaluation."""
    ended = await sandbox_eval("report", output)
    assert ended.returncode == 0, ended.stderr
    assert (output / "report.md").read_text("utf-8") + "\n" == ended.stdout
    return ended.stdout


async def synthetic_suite(data: Path, count: int) -> Suite:
    """Prepare the suite `synthetic`."""
    ended = await sandbox_eval("prepare", "synthetic", "--data", data, "--count", str(count))
    assert ended.returncode == 0, ended.stderr
    return load_suite(data / "synthetic")


def sums(data: Path, count: int = 1) -> Suite:
    """Write a suite named `synthetic` of `count` sums; the sum number n is n + n."""
    drafts = [Draft(sample(number)) for number in range(count)]
    return write_suite(data / "synthetic", "synthetic", drafts, licence="none", source="a test")


def sample(number: int = 0, **changes: Any) -> Mapping[str, Any]:
    """Return the fields of a sample."""
    fields = {
        "id": f"sum/{number}",
        "domain": "sums",
        "kind": "sum",
        "problem": f"What is {number} + {number}?",
        "ground_truth": str(2 * number),
        "grader": "number",
    }
    return {**fields, **changes}


def answered(
    home: Path, work: Sequence[tuple[Mapping[str, Any], str]], status: Status = "answered"
) -> Path:
    """Write an evaluation in which each sample has one plain answer. Return its results directory.
    The samples get ids in their order."""
    drafts = [
        Draft({**fields, "id": f"case/{number:03}"}) for number, (fields, _) in enumerate(work)
    ]
    data = home / "data"
    suite = write_suite(data / "synthetic", "synthetic", drafts, licence="none", source="a test")
    settings = RunSettings(
        suites={"synthetic": suite.manifest.sha256}, sandbox={}, request={}, seed=None
    )
    info = RunInfo(settings=settings, data=str(data), concurrency=1, versions={})
    with open_results(home / "output", info) as writer:
        for draft, (_, answer) in zip(drafts, work, strict=True):
            result = Result(
                model="m",
                mode="plain",
                repeat=0,
                sample=draft.fields["id"],
                status=status,
                answer=answer,
                started="2026-01-01T00:00:00.000+00:00",
                latency_s=1.0,
            )
            writer.append(result)
    return home / "output"


def grades_of(output: Path) -> list[dict[str, Any]]:
    """Return the grades that the last report has written."""
    return [json.loads(line) for line in (output / "grades.jsonl").read_text("utf-8").splitlines()]


def rows(report: str, heading: str) -> list[Sequence[str]]:
    """Return the cells of the first table after a line of the report, without the head."""
    table = report.partition(f"{heading}\n\n")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
