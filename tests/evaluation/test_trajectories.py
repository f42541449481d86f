"""Trajectories: their bounds, their file, and the patterns in them."""

from pathlib import Path
from typing import Any

import pytest

from evaluation.journal import ResultsError
from evaluation.results import (
    TRAJECTORIES_FILE,
    ProducedFile,
    Result,
    Step,
    Trajectories,
    Trajectory,
)
from evaluation.trajectories import (
    MALFORMED_ERRORS,
    MAX_STEPS,
    MAX_STEPS_CHARS,
    MAX_TEXT_CHARS,
    capabilities_of,
    count_patterns,
    trajectory_of,
)
from tests.evaluation.evaluation_process import sums
from tests.evaluation.made_results import STARTED, USE, plain, trajectory, turn, with_sandbox, write

RESULT = with_sandbox("sum/0", "Answer: 0")


def completion(events: list[dict[str, Any]], **sandbox: Any) -> dict[str, Any]:
    """Return a completion of the proxy with step events."""
    message = {"role": "assistant", "content": "0", "reasoning": "I \ud800 think."}
    return {
        "id": "1",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "sandbox": {"events": events, **sandbox},
    }


def call(step: int, arguments: dict[str, Any], observation: str = "") -> list[dict[str, Any]]:
    """Return the events of one step."""
    start = {"kind": "tool_start", "step": step, "tool": "execute_bash", "arguments": arguments}
    end = {"kind": "tool_end", "step": step, "exit_code": 0, "ms": 7, "observation": observation}
    return [start, end]


def test_trajectory_has_steps_and_files_and_warnings_of_the_completion() -> None:
    unfinished = {"kind": "tool_start", "step": 2, "tool": "execute_bash", "arguments": {"n": 1}}
    found = trajectory_of(
        RESULT,
        completion(
            [{"kind": "run_started"}, *call(1, {"command": "ls"}, "a.txt"), unfinished],
            run_id="run_1",
            files=[{"path": "/a.txt", "bytes": 3, "id": "f"}],
            warnings=[{"code": "slow", "message": "It took long."}],
        ),
    )
    done = Step(
        number=1,
        tool="execute_bash",
        arguments={"command": "ls"},
        observation="a.txt",
        exit_code=0,
        duration_ms=7,
    )
    assert found == Trajectory(
        **RESULT.key._asdict(),
        started=STARTED,
        run_id="run_1",
        reasoning="I ? think.",
        steps=(done, Step(number=2, tool="execute_bash", arguments={"n": "1"})),
        files=(ProducedFile(path="/a.txt", size_bytes=3),),
        warnings=("slow: It took long.",),
    )


def test_long_text_keeps_its_ends_and_says_how_much_is_left_out() -> None:
    observation = "a" * MAX_TEXT_CHARS + "b" * MAX_TEXT_CHARS
    (step,) = trajectory_of(RESULT, completion(call(1, {"command": "x"}, observation))).steps
    half = MAX_TEXT_CHARS // 2
    mark = f"\n[{MAX_TEXT_CHARS:,} characters left out]\n"
    assert step.observation == f"{'a' * half}{mark}{'b' * half}"


@pytest.mark.parametrize(
    ("size", "kept"), [(10, MAX_STEPS), (MAX_TEXT_CHARS, MAX_STEPS_CHARS // MAX_TEXT_CHARS)]
)
def test_trajectory_steps_beyond_the_bounds_are_left_out_and_counted(size: int, kept: int) -> None:
    events = [event for step in range(MAX_STEPS + 5) for event in call(step, {}, "a" * size)]
    found = trajectory_of(RESULT, completion(events))
    assert (len(found.steps), found.steps_left_out) == (kept, MAX_STEPS + 5 - kept)


@pytest.mark.parametrize(
    "events", [[{"step": 1}], [{"kind": "tool_start", "step": 1, "tool": 3, "arguments": {}}]]
)
def test_malformed_step_event_raises_one_of_the_errors_that_the_runner_catches(
    events: list[dict[str, Any]],
) -> None:
    with pytest.raises(MALFORMED_ERRORS):
        trajectory_of(RESULT, completion(events))


def test_result_has_the_trajectory_of_its_own_attempt_and_of_no_earlier_one(tmp_path: Path) -> None:
    earlier = RESULT.model_copy(update={"started": "2025-01-01T00:00:00.000+00:00"})
    other = plain("sum/0", "Answer: 0")
    records = [
        (earlier, trajectory(earlier, "ls")),
        (RESULT, trajectory(RESULT, "pwd")),
        (other, None),
    ]
    write(tmp_path / "output", sums(tmp_path / "data"), records)
    trajectories = Trajectories(tmp_path / "output")
    assert trajectories.get(RESULT) == trajectory(RESULT, "pwd")
    assert trajectories.get(other) is None


def test_unfinished_line_of_a_trajectory_file_is_ignored_and_removed_by_the_next_run(
    tmp_path: Path,
) -> None:
    output, suite = tmp_path / "output", sums(tmp_path / "data")
    write(output, suite, [(RESULT, trajectory(RESULT, "ls"))])
    path = output / TRAJECTORIES_FILE
    complete = path.read_bytes()
    path.write_bytes(complete + b"{" + b"x" * 200_000)
    assert Trajectories(output).get(RESULT) == trajectory(RESULT, "ls")
    assert write(output, suite, []) == {RESULT.key}
    assert path.read_bytes() == complete


def test_error_names_the_line_of_a_malformed_trajectory(tmp_path: Path) -> None:
    (tmp_path / TRAJECTORIES_FILE).write_text('{"model": "m"}\n', encoding="utf-8")
    with pytest.raises(ResultsError, match=r"trajectories.jsonl:1: mode: Field required"):
        Trajectories(tmp_path)


def test_evaluation_without_a_trajectory_file_has_no_trajectories(tmp_path: Path) -> None:
    assert Trajectories(tmp_path).get(RESULT) is None


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("pip install rdkit", {"external_resources"}),
        ("curl https://example.org | grep title", {"external_resources", "file_management"}),
        ("python3 -c 'print(sum(x for x in range(9)))'", {"computation"}),
        ("python3 -c 'print(open(\"a\").read())'", {"file_management"}),
        ("echo 42", set()),
    ],
)
def test_capabilities_of_a_command_are_recognized_by_patterns(
    command: str, expected: set[str]
) -> None:
    step = Step(tool="execute_bash", arguments={"command": command})
    assert set(capabilities_of(step)) == expected


def test_capabilities_of_a_created_file_follow_from_its_text_and_not_from_its_path() -> None:
    text = "import itertools\n"
    arguments = {"command": "create", "path": "/cat /a.py", "file_text": text}
    step = Step(tool="str_replace_editor", arguments=arguments)
    assert capabilities_of(step) == ["computation"]


def test_verification_and_structure_patterns_in_answer_and_reasoning_are_counted() -> None:
    answer = "# Solution\n\n1. Add.\n2. Double-check the sum.\n- I verified it."
    result: Result = plain("sum/0", answer)
    made = trajectory(result, "cat a", "echo 1", reasoning="Let me make sure.\nStep 1: add.")
    found = count_patterns(result, made)
    assert (found.calls, found.matched_calls) == ({"file_management": 1}, 1)
    assert (found.verification, found.structure) == (3, 5)


def test_captured_turn_with_several_calls_of_one_capability_is_counted_once() -> None:
    result = RESULT.model_copy(update={"sandbox": USE.model_copy(update={"turns": 3})})
    turns = [turn(1, 1, 2), turn(2, 3), turn(3)]
    found = count_patterns(result, trajectory(result, "cat a", "cat b", "echo 1", turns=turns))
    assert found.calls == {"file_management": 2}
    assert found.turns is not None
    assert found.turns.matched == {"file_management": 1}
    assert (found.turns.unmatched, found.turns.idle) == (1, 2)
