"""Makes trajectories from completions, and counts patterns in them.

The patterns for tool calls are a reconstruction of the paper's Table 15. Only examples of its list
are known; the other patterns are of the same kind. The patterns for texts, VERIFICATION_WORD and
STRUCTURE_MARK, are not from the paper.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evaluation.results import ProducedFile, Result, Step, Trajectory

MAX_STEPS = 500
MAX_TEXT_CHARS = 40_000
"""Maximum length of one text. The proxy's default limit for observations is lower."""
MAX_STEPS_CHARS = 2_000_000
"""Maximum length of all steps of one trajectory."""
MAX_ARGUMENTS = 20
MAX_FILES = 100
MAX_WARNINGS = 20
MALFORMED_ERRORS = (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError)
"""The errors that reading a response raises if it does not have the expected form."""
CODE_ARGUMENTS = ("command", "file_text", "new_str")
"""The arguments of the sandbox's tools that contain code."""

TABLE15: Mapping[str, Sequence[str]] = {
    "computation": (
        *("range(", "while ", "itertools", "solve(", "solve_ivp(", "odeint(", "minimize("),
        *("linprog(", "numpy", "scipy", "sympy"),
    ),
    "external_resources": (
        *("pip install", "pip3 install", "apt install", "apt-get install", "conda install"),
        *("npm install", "curl ", "wget ", "git clone", "requests.get(", "urlopen(", "rdkit"),
    ),
    "file_management": (
        *("open(", "cat ", "grep ", "pathlib", "head ", "tail ", "sed ", "awk ", "ls -", "ls /"),
        *("find /", "find .", "read_csv(", "os.listdir(", "os.walk("),
    ),
}
"""Substrings of tool calls, by capability. They also match inside longer words."""
VERIFICATION_WORD = re.compile(
    r"\b(?:verif(?:y|ies|ied|ying|ication)|(?:double|re|sanity)[- ]?check(?:s|ed|ing)?"
    r"|check(?:s|ed|ing)?|confirm(?:s|ed|ing)?|make sure)\b",
    re.IGNORECASE,
)
STRUCTURE_MARK = re.compile(
    r"^ {0,3}(?:#{1,6} |[-*+] |\d{1,3}[.)] |step \d)", re.IGNORECASE | re.MULTILINE
)
"""The beginning of a line that is a heading, an item of a list or a numbered step."""


@dataclass(frozen=True, slots=True)
class TurnCounts:
    """Numbers of turns in one run. A turn that submits the answer is neither unmatched nor idle."""

    matched: Mapping[str, int]
    """The number of turns with a tool call that matches TABLE15, by capability."""
    unmatched: int
    """The number of turns without a tool call that matches TABLE15."""
    idle: int
    """The number of turns without a capability, by the proxy's classification."""


@dataclass(frozen=True, slots=True)
class PatternCounts:
    """Counts of patterns in one answer and its trajectory."""

    calls: Mapping[str, int]
    """The number of tool calls that match TABLE15, by capability."""
    matched_calls: int
    """The number of tool calls that match any pattern of TABLE15."""
    turns: TurnCounts | None
    """The numbers of turns; None unless all turns of the run were captured."""
    verification: int
    """The number of words such as `verify` and `check` in the reasoning and the answer."""
    structure: int
    """The number of headings, items and numbered steps in the reasoning and the answer."""


def trajectory_of(result: Result, completion: Mapping[str, Any]) -> Trajectory:
    """Return the trajectory of a completion. Raises the errors of MALFORMED_ERRORS.

    Texts and lists that exceed the bounds of this module are shortened.
    """
    message = completion["choices"][0]["message"]
    sandbox = completion.get("sandbox") or {}
    all_steps = list(_steps(sandbox.get("events") or ()))
    steps = _first_steps(all_steps)
    files = (sandbox.get("files") or ())[:MAX_FILES]
    warnings = (sandbox.get("warnings") or ())[:MAX_WARNINGS]
    return Trajectory(
        **result.key._asdict(),
        started=result.started,
        run_id=_bounded_text(sandbox.get("run_id") or ""),
        reasoning=_bounded_text(message.get("reasoning") or message.get("reasoning_content") or ""),
        steps=steps,
        steps_left_out=len(all_steps) - len(steps),
        files=tuple(
            ProducedFile(path=_bounded_text(each["path"]), size_bytes=each["bytes"])
            for each in files
        ),
        warnings=tuple(_bounded_text(f"{each['code']}: {each['message']}") for each in warnings),
    )


def count_patterns(result: Result, trajectory: Trajectory) -> PatternCounts:
    """Return the counts of patterns in an answer and its trajectory."""
    calls: Counter[str] = Counter()
    matched_calls = 0
    for step in trajectory.steps:
        found = capabilities_of(step)
        calls.update(found)
        matched_calls += bool(found)
    text = f"{trajectory.reasoning}\n{result.answer}"
    counts = (len(pattern.findall(text)) for pattern in (VERIFICATION_WORD, STRUCTURE_MARK))
    return PatternCounts(calls, matched_calls, _turn_counts(result, trajectory), *counts)


def _turn_counts(result: Result, trajectory: Trajectory) -> TurnCounts | None:
    """Return the numbers of turns of a run. Return None if one of its turns was not captured, if
    the trajectory leaves out tool calls, or if the proxy did not classify them."""
    run, turns = result.sandbox, trajectory.turns or ()
    is_complete = run is not None and len(turns) == run.turns and not trajectory.steps_left_out
    if run is None or not is_complete or any(turn.capabilities is None for turn in turns):
        return None
    submission = turns[-1:] if run.stop_reason == "submitted" else ()
    matched: Counter[str] = Counter()
    unmatched = idle = 0
    for turn in turns:
        found = {name for step in trajectory.calls_of(turn) for name in capabilities_of(step)}
        matched.update(found)
        if turn not in submission:
            unmatched += not found
            idle += not turn.capabilities
    return TurnCounts(matched, unmatched, idle)


def capabilities_of(step: Step) -> list[str]:
    """Return the capabilities whose patterns of TABLE15 match the code of a tool call."""
    code = "\n".join(step.arguments.get(name, "") for name in CODE_ARGUMENTS)
    return [name for name, parts in TABLE15.items() if any(part in code for part in parts)]


def shorten(text: str, max_chars: int) -> str:
    """Return the text, without its middle if it is longer than `max_chars`. A truncation marker in
    place of the middle says how many characters are left out, and is not counted itself."""
    if len(text) <= max_chars:
        return text
    head, tail = text[: max_chars // 2], text[len(text) - max_chars // 2 :]
    return f"{head}\n[{len(text) - len(head) - len(tail):,} characters left out]\n{tail}"


def replace_surrogates(text: str) -> str:
    """Return a text without lone surrogates, which cannot be written to a file."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def step_of(
    number: int,
    tool: str,
    arguments: Mapping[str, Any],
    *,
    observation: str | None,
    exit_code: int | None,
    duration_ms: int | None,
) -> Step:
    """Return a tool call, with its texts within the bounds of this module. Raises the errors of
    MALFORMED_ERRORS."""
    kept = list(arguments.items())[:MAX_ARGUMENTS]
    return Step(
        number=number,
        tool=_bounded_text(tool),
        arguments={
            _bounded_text(name): _bounded_text(_argument_text(value)) for name, value in kept
        },
        observation=_bounded_text(observation or ""),
        exit_code=exit_code,
        duration_ms=duration_ms,
    )


def _steps(events: Sequence[Mapping[str, Any]]) -> Iterator[Step]:
    """Yield the steps of a run's events, in their order."""
    ends = {event["step"]: event for event in events if event["kind"] == "tool_end"}
    for event in events:
        if event["kind"] == "tool_start":
            end = ends.get(event["step"], {})
            yield step_of(
                event["step"],
                event["tool"],
                event["arguments"],
                observation=end.get("observation"),
                exit_code=end.get("exit_code"),
                duration_ms=end.get("ms"),
            )


def _first_steps(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Return the first steps, up to MAX_STEPS and MAX_STEPS_CHARS."""
    kept: list[Step] = []
    chars = 0
    for step in steps[:MAX_STEPS]:
        chars += step.char_count
        if chars > MAX_STEPS_CHARS:
            break
        kept.append(step)
    return tuple(kept)


def _argument_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _bounded_text(text: str) -> str:
    return shorten(replace_surrogates(text), MAX_TEXT_CHARS)
