"""Reads and writes the directory of an evaluation. Each result is written when its request ends.

run.json             the settings, which a later run that continues the evaluation must not change
results.jsonl        one record a line, in the order in which the requests end
trajectories.jsonl   the steps of each completion, with --capture also the turns, one record a line
report.md            the report
report.html          the report with charts and the trajectories

Other modules write grades.jsonl (evaluation/grading.py), judgements.jsonl (evaluation/judge.py) and
report-samples/ (evaluation/html_report.py) to the same directory.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from evaluation.journal import (
    ResultsError,
    append_record,
    first_fault,
    open_journal,
    parse_record,
    read_lines,
    read_records,
)

Mode = Literal["plain", "sandbox"]
"""sandbox: the proxy answers with a sandbox. plain: it answers without one."""
Status = Literal["answered", "context_overflow", "infra_error"]
MODES: tuple[Mode, ...] = ("plain", "sandbox")
RUN_FILE, RESULTS_FILE, TRAJECTORIES_FILE = "run.json", "results.jsonl", "trajectories.jsonl"
REPORT_FILE, HTML_REPORT_FILE = "report.md", "report.html"


class RequestKey(NamedTuple):
    """The identity of a request: a later record replaces an earlier one with the same key."""

    model: str
    mode: Mode
    repeat: int
    sample: str


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Failure(_Record):
    """One failed attempt of a request."""

    status: int | None = None
    """The HTTP status; None without a response."""
    code: str
    message: str


class SandboxUse(_Record):
    """Use of a sandbox by one run: numbers of turns, calls and tokens, and the stop reason."""

    stop_reason: str
    route: str
    turns: int
    model_calls: int
    tool_calls: int
    failed_tool_calls: int
    """The number of calls whose exit code is not 0. A call without an exit code does not count."""
    observation_tokens: int
    """Tokens of tool output in the prompts, each counted once. A part of them is estimated."""
    trajectory_tokens: int
    capability_turns: Mapping[str, int]
    """The number of turns that used each of the paper's capabilities."""


class Result(_Record):
    """The outcome of one request."""

    model: str
    mode: Mode
    repeat: int
    sample: str
    status: Status
    """answered: there is an answer to grade. context_overflow: the prompt does not fit the model's
    context window, which counts as wrong. infra_error: there is no answer, for a reason that is not
    the model's."""
    answer: str = ""
    finish_reason: str = ""
    failures: Sequence[Failure] = ()
    """The failed attempts, in order. If the status is not answered, the last one is the reason."""
    seed: int | None = None
    started: str
    """The start of the last attempt, in UTC and ISO 8601."""
    first_started: str | None = None
    """The start of the first attempt. None if there was only one attempt, and in records of earlier
    versions."""
    latency_s: float
    """Duration of the last attempt, in seconds."""
    concurrency: int | None = None
    """The maximum number of requests at a time; None in records of earlier versions."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    sandbox: SandboxUse | None = None

    @property
    def key(self) -> RequestKey:
        return RequestKey(self.model, self.mode, self.repeat, self.sample)


class Step(_Record):
    """One tool call of a run."""

    number: int = 0
    """The proxy's number of the call in its run; 0 in records of earlier versions."""
    tool: str
    arguments: Mapping[str, str]
    """The arguments by name. Values other than text are in JSON."""
    observation: str = ""
    """The text that the model got."""
    exit_code: int | None = None
    duration_ms: int | None = None
    """The duration of the call in ms; None for a call that did not end."""

    @property
    def char_count(self) -> int:
        """The length of the observation and of the values of the arguments."""
        return len(self.observation) + sum(map(len, self.arguments.values()))


class Turn(_Record):
    """One turn of a run: the replies of the model, and its tool calls."""

    number: int
    """The number of the turn in its run, from 1."""
    text: str = ""
    reasoning: str = ""
    errors: tuple[str, ...] = ()
    """The errors of the model calls that failed."""
    model_s: float
    """Seconds of the model calls, with their retries."""
    steps: tuple[int, ...] = ()
    """The numbers of the steps of the trajectory that belong to this turn."""
    other_calls: tuple[Step, ...] = ()
    """The tool calls of the turn that are not steps, such as the submission of the answer."""
    capabilities: tuple[str, ...] | None = None
    """The paper's capabilities that its tool calls use, by the proxy's classification; None in
    records of earlier versions, and if the proxy does not classify calls."""


class ProducedFile(_Record):
    """A file that a run returned."""

    path: str
    size_bytes: int


class Trajectory(_Record):
    """The tool calls, reasoning and files of one completion. They belong to the Result with the
    same `key` and `started`."""

    model: str
    mode: Mode
    repeat: int
    sample: str
    started: str
    run_id: str = ""
    """The proxy's id of the run; empty without a sandbox."""
    reasoning: str = ""
    """The model's reasoning, and its text between the tool calls."""
    steps: tuple[Step, ...] = ()
    """The tool calls that the completion reports as events. The call that submits the answer is not
    one of them."""
    steps_left_out: int = 0
    """The number of steps that were left out because the trajectory would be too long."""
    files: tuple[ProducedFile, ...] = ()
    warnings: tuple[str, ...] = ()
    turns: tuple[Turn, ...] | None = None
    """The turns of the run; None if they were not captured."""
    turns_left_out: int = 0
    """The number of turns that were left out because the trajectory would be too long."""
    turns_error: str = ""
    """The reason why the turns could not be read, or empty."""

    def calls_of(self, turn: Turn) -> list[Step]:
        """Return the tool calls of a turn in their order, without steps that were left out of the
        trajectory."""
        steps = [step for step in self.steps if step.number in turn.steps]
        return sorted([*steps, *turn.other_calls], key=lambda step: step.number)

    @property
    def key(self) -> RequestKey:
        return RequestKey(self.model, self.mode, self.repeat, self.sample)


class RunSettings(_Record):
    """The settings that must stay the same when a later `sandbox-eval run` continues the
    evaluation."""

    suites: Mapping[str, str]
    """The SHA-256 of each suite, by name."""
    sandbox: Mapping[str, Any]
    """The `sandbox` object of the requests with a sandbox."""
    request: Mapping[str, Any]
    """Further fields of all requests."""
    protocols: Mapping[str, Mapping[str, Any]] = {}
    """The settings of each suite's protocol that differ from their defaults, without `repeats`."""
    seed: int | None


class RunInfo(_Record):
    """The contents of run.json."""

    settings: RunSettings
    data: str
    """The directory of the suites."""
    concurrency: int
    """The concurrency of the last `sandbox-eval run`."""
    versions: Mapping[str, str]
    """The versions of the programs of the last `sandbox-eval run`, by name."""


class ResultWriter:
    """Appends records to results.jsonl and trajectories.jsonl."""

    def __init__(
        self, results: IO[bytes], trajectories: IO[bytes], done_keys: set[RequestKey]
    ) -> None:
        self._results = results
        self._trajectories = trajectories
        self.done_keys = done_keys
        """The keys that need no further request. Infrastructure errors are not among them."""

    def append(self, result: Result, trajectory: Trajectory | None = None) -> None:
        """Write a result and its trajectory. Both survive a later kill of this process."""
        # The trajectory is first, so that a kill between the lines leaves no result without one.
        # The next run sends the request again, and the reader ignores the first trajectory.
        if trajectory is not None:
            append_record(self._trajectories, trajectory)
        append_record(self._results, result)
        if result.status != "infra_error":
            self.done_keys.add(result.key)


@contextmanager
def open_results(directory: Path, info: RunInfo) -> Iterator[ResultWriter]:
    """Create or continue an evaluation, and yield the writer of its results.

    Raises ResultsError if the settings differ from the earlier ones, if another process writes to
    the directory, or if a record is malformed. An incomplete last line, which a killed process
    leaves, is removed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (
        open_journal(directory / RESULTS_FILE) as file,
        open_journal(directory / TRAJECTORIES_FILE) as trajectories,
    ):
        _check_settings(directory, info.settings)
        _write_run_info(directory, info)
        latest = {
            result.key: result.status for result in read_records(directory / RESULTS_FILE, Result)
        }
        done = {key for key, status in latest.items() if status != "infra_error"}
        yield ResultWriter(file, trajectories, done)


def _write_run_info(directory: Path, info: RunInfo) -> None:
    """Replace run.json in one step, so that a kill leaves the old file or the new one."""
    temporary = directory / f"{RUN_FILE}.new"
    temporary.write_text(info.model_dump_json(indent=2) + "\n", encoding="utf-8")
    temporary.replace(directory / RUN_FILE)


def read_run_info(directory: Path) -> RunInfo:
    """Return the contents of run.json. Raises ResultsError if it is missing or malformed."""
    path = directory / RUN_FILE
    try:
        return RunInfo.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror}. `sandbox-eval run` writes it.") from error
    except ValidationError as error:
        raise ResultsError(f"{path}: {first_fault(error)}") from error


def read_results(directory: Path) -> list[Result]:
    """Return the newest record of each key, sorted by key. Raises ResultsError if the file cannot
    be read or if a record is malformed."""
    latest = {result.key: result for result in read_records(directory / RESULTS_FILE, Result)}
    return [latest[key] for key in sorted(latest)]


class Trajectories:
    """The trajectories of an evaluation. They stay in the file, and are read one at a time."""

    def __init__(self, directory: Path) -> None:
        """Index the records of trajectories.jsonl. Without this file, an evaluation has no
        trajectories. Raises ResultsError if a record is malformed."""
        self._path = directory / TRAJECTORIES_FILE
        self._line_positions: dict[tuple[RequestKey, str], tuple[int, int]] = {}
        if not self._path.exists():
            return
        for number, offset, line in read_lines(self._path):
            trajectory = parse_record(self._path, number, line, Trajectory)
            self._line_positions[trajectory.key, trajectory.started] = (number, offset)

    def get(self, result: Result) -> Trajectory | None:
        """Return the trajectory of a result, or None if there is none."""
        place = self._line_positions.get((result.key, result.started))
        if place is None:
            return None
        number, offset = place
        with self._path.open("rb") as file:
            file.seek(offset)
            return parse_record(self._path, number, file.readline(), Trajectory)


def _check_settings(directory: Path, settings: RunSettings) -> None:
    if not (directory / RUN_FILE).exists():
        return
    now, before = (
        json.loads(each.model_dump_json()) for each in (settings, read_run_info(directory).settings)
    )
    for name in now:
        if now[name] != before[name]:
            raise ResultsError(
                f"{directory}: its results have {name} {json.dumps(before[name])}, not"
                f" {json.dumps(now[name])}. Use the same value, or another --output."
            )
