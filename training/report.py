"""A report on trajectories before and after training: rewards, accuracy, turns, capabilities,
tokens and patterns of reasoning.

The input is two exports of the proxy's trajectories with `format=native`. Runs that failed or lost
their sandbox are counted, and left out of everything else. The capability rates are those of arXiv
2601.16206, section 4: the share of turns that use a capability.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from statistics import fmean
from typing import Any

from evaluation.measures import CAPABILITIES
from evaluation.statistics import estimate, percentile
from training.curves import Panel
from training.rollouts import INFRA_ERROR
from training.rows import TaskError

MODEL_STOP_REASONS = frozenset({"submitted", "answered", "refused", "client_tool_calls"})
"""Stop reasons of runs that the model ended. All other stop reasons count as limits."""
_CHECKING_WORDS = re.compile(
    r"\b(?:let me (?:check|confirm)|double[- ]check|verify(?:ing)?|wait|actually|to be sure)\b",
    re.IGNORECASE,
)
"""Words that a model uses when it checks its own work."""
_STRUCTURE_MARKS = re.compile(r"^(?:#{1,6} |[-*] |\d+[.)] )|\*\*[^*\n]+\*\*", re.MULTILINE)
"""Headings, list items and bold text."""


_CHARTED_MEANS = {
    "Turns of a run": ("turns", "turns, 95th percentile", "tool calls"),
    "Tokens of a run": ("tokens written", "tokens of tool output"),
}
"""The means that a chart shows, by the title of their panel."""


@dataclass(frozen=True, slots=True)
class Measures:
    """The measures of a set of trajectories. A rate is None if it has no denominator."""

    trajectories: int
    infra_errors: int
    reward: float | None
    """The mean reward over the tasks, each of which counts with the mean reward of its runs."""
    reward_interval: tuple[float, float] | None
    """The 95 % interval of `reward`, over the tasks."""
    rates: Mapping[str, float | None]
    """Shares from 0 to 1, by name."""
    means: Mapping[str, float | None]
    """Means over the runs, and a percentile of their turns, by name."""


def measure(path: Path) -> Measures:
    """Return the measures of the trajectories in a native export. Raises TaskError."""
    runs, errors = list[_Run](), 0
    for run in _read_runs(path):
        if run is None:
            errors += 1
        else:
            runs.append(run)
    by_task: defaultdict[str, list[float]] = defaultdict(list)
    for run in runs:
        if run.reward is not None:
            by_task[run.task].append(run.reward)
    rewards = [Fraction(fmean(each)).limit_denominator(10_000) for each in by_task.values()]
    found = estimate(rewards)
    turns = sum(run.turns for run in runs)
    scored = [run for run in runs if run.reward is not None]
    with_tokens = [run for run in runs if run.token_segments]
    rates = {
        "accuracy (runs with reward 1)": _share(scored, lambda run: run.reward == 1),
        "runs with a tool call": _share(runs, lambda run: run.tool_calls > 0),
        "runs that submitted": _share(runs, lambda run: run.outcome == "submitted"),
        "runs that ended at a limit": _share(
            runs, lambda run: run.outcome not in MODEL_STOP_REASONS
        ),
        "runs with tokens that are split": _share(with_tokens, lambda run: run.token_segments > 1),
        **{
            f"turns with {name.replace('_', ' ')}": (
                sum(run.capability_turns.get(name, 0) for run in runs) / turns if turns else None
            )
            for name in CAPABILITIES
        },
    }
    means = {
        "turns": _mean([run.turns for run in runs]),
        "turns, 95th percentile": percentile([run.turns for run in runs], 0.95) if runs else None,
        "tool calls": _mean([run.tool_calls for run in runs]),
        "failed commands": _mean([run.failed_commands for run in runs]),
        "tokens written": _mean([run.written_tokens for run in runs]),
        "tokens of tool output": _mean([run.output_tokens for run in runs]),
        "words of checking": _mean([run.checking_words for run in runs]),
        "marks of structure": _mean([run.structure_marks for run in runs]),
    }
    interval = found.interval if found else None
    return Measures(
        len(runs) + errors, errors, found.mean if found else None, interval, rates, means
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """The measures of one trajectory."""

    task: str
    outcome: str
    reward: float | None
    turns: int
    tool_calls: int
    failed_commands: int
    written_tokens: int
    output_tokens: int
    token_segments: int
    capability_turns: Mapping[str, int]
    checking_words: int
    structure_marks: int

    @classmethod
    def from_trajectory(cls, trajectory: Mapping[str, Any]) -> "_Run":
        stats, rewards = trajectory["result"]["stats"], trajectory["rewards"]
        replies = [
            trajectory["messages"][each["reply"]]
            for each in trajectory["model_calls"]
            if each["reply"] is not None
        ]
        said = "\n".join(text for reply in replies for text in _texts(reply))
        return cls(
            task=trajectory["task_id"] or trajectory["id"],
            outcome=trajectory["outcome"],
            reward=rewards[-1]["value"] if rewards else None,
            turns=stats["turns"],
            tool_calls=stats["tool_calls"],
            failed_commands=sum(bool(each.get("exit_code")) for each in trajectory["tool_calls"]),
            written_tokens=stats["completion_tokens"],
            output_tokens=stats["env_tokens"],
            token_segments=len(trajectory["token_segments"]),
            capability_turns=stats["capability_turns"],
            checking_words=len(_CHECKING_WORDS.findall(said)),
            structure_marks=len(_STRUCTURE_MARKS.findall(said)),
        )


def _read_runs(path: Path) -> Iterator[_Run | None]:
    """Yield the runs of an export; None for a run that failed."""
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                yield _parse_run(line, f"{path}:{number}")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path}: {error}") from error


def _parse_run(line: str, location: str) -> _Run | None:
    try:
        trajectory = json.loads(line)
        has_failed = trajectory["outcome"] == INFRA_ERROR or trajectory["result"] is None
        return None if has_failed else _Run.from_trajectory(trajectory)
    except (ValueError, RecursionError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise TaskError(f"{location}: not a trajectory of an export with format=native") from error


def _texts(reply: Mapping[str, Any]) -> Iterator[str]:
    for name in ("reasoning", "reasoning_content", "content"):
        if isinstance(text := reply.get(name), str):
            yield text


def _share(runs: Sequence[_Run], is_counted: Callable[[_Run], bool]) -> float | None:
    return sum(map(is_counted, runs)) / len(runs) if runs else None


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def report(before: Measures, after: Measures) -> str:
    """Return the measures beside each other, as a Markdown table."""
    both = (before, after)
    lines = ["| | before | after | change |", "| --- | --- | --- | --- |"]
    lines.append(_table_line("trajectories", *(f"{each.trajectories}" for each in both)))
    lines.append(
        _table_line("infrastructure errors, left out", *(f"{e.infra_errors}" for e in both))
    )
    change = _change_text(before.reward, after.reward, "{:+.3f}")
    lines.append(_table_line("mean reward (95 % interval)", *map(_reward_text, both), change))
    for name in before.rates:
        one, other = before.rates[name], after.rates[name]
        cells = [_number_text(each, "{:.1%}") for each in (one, other)]
        points = _change_text(one, other, "{:+.1f} points", scale=100)
        lines.append(_table_line(name, *cells, points))
    for name in before.means:
        one, other = before.means[name], after.means[name]
        cells = [_number_text(each, "{:.2f}") for each in (one, other)]
        lines.append(_table_line(f"{name}, of a run", *cells, _change_text(one, other, "{:+.2f}")))
    return "\n".join([*lines, ""])


def chart_panels(before: Measures, after: Measures) -> list[Panel]:
    """Return the panels of a chart: the reward and the rates, the turns, and the tokens. Values
    that one of the sets does not have are left out."""
    shares = {"mean reward": (before.reward, after.reward)}
    shares |= {name: (before.rates[name], after.rates[name]) for name in before.rates}
    panels = [_panel("Rewards and shares", shares, 1.0)]
    for title, names in _CHARTED_MEANS.items():
        panels.append(
            _panel(title, {name: (before.means[name], after.means[name]) for name in names})
        )
    return [panel for panel in panels if panel.pairs]


def _panel(
    title: str, pairs: Mapping[str, tuple[float | None, float | None]], max_value: float = 0.0
) -> Panel:
    known = {
        name: (one, other)
        for name, (one, other) in pairs.items()
        if one is not None and other is not None
    }
    return Panel(title, known, max(max_value, *map(max, known.values()), 0.0))


def _table_line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |" if len(cells) == 4 else f"| {' | '.join(cells)} | |"


def _number_text(value: float | None, template: str) -> str:
    return "none" if value is None else template.format(value)


def _reward_text(measures: Measures) -> str:
    if measures.reward is None or measures.reward_interval is None:
        return _number_text(measures.reward, "{:.3f}")
    low, high = measures.reward_interval
    return f"{measures.reward:.3f} ({low:.3f} to {high:.3f})"


def _change_text(before: float | None, after: float | None, template: str, scale: float = 1) -> str:
    return "" if before is None or after is None else template.format((after - before) * scale)
