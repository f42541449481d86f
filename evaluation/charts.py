"""The charts of the HTML report: the geometry of horizontal bars, which a template draws as SVG.

All lengths in the direction of the bars are in percent of the chart's width, so that a chart fits
narrow windows and its text keeps its size. The heights are in pixels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log10

from evaluation.measures import CAPABILITIES, Accuracy, TokenUse, ToolUse
from evaluation.statistics import Estimate

AXIS_WIDTH = 80.0
"""The length of the axis. The rest of the width is for the numbers beside the bars."""
LABEL_HEIGHT, BAR_HEIGHT, BAR_GAP, GROUP_GAP, AXIS_HEIGHT = 20, 15, 3, 12, 22
TICK_COUNT = 4
"""The number of marks on the axis, without 0."""
ROUND_STEPS = (1, 1.5, 2, 2.5, 3, 4, 5, 8, 10)
"""The possible distances between marks, each multiplied by any power of ten."""
PLAIN_COLOUR, SANDBOX_COLOUR, MODEL_COLOUR, ENVIRONMENT_COLOUR = 0, 1, 2, 3
"""Numbers of colours in the style sheet."""
CAPABILITY_COLOURS = (4, 5, 6)
TURN_BINS = ((1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, 64), (65, 10**9))
"""The first and the last number of turns of each bar of the histogram."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a bar. `series` is the number of its colour in the style sheet."""

    series: int
    start: float
    width: float


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar, and the text beside it that shows its value."""

    y: int
    segments: Sequence[Segment]
    text: str
    text_x: float
    interval: tuple[float, float] | None
    """The ends of the line that shows a confidence interval."""


@dataclass(frozen=True, slots=True)
class Group:
    """The bars below one label."""

    y: int
    label: str
    bars: Sequence[Bar]


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of horizontal bars."""

    title: str
    description: str
    legend: Sequence[tuple[int, str]]
    """The colour and the name of each series. Empty for one series."""
    groups: Sequence[Group]
    ticks: Sequence[tuple[float, str]]
    """The position and the text of each mark of the axis."""
    axis_y: int
    height: int


@dataclass(frozen=True, slots=True)
class _BarData:
    """The data of a bar: its parts as (colour, length), the text that shows its value, and its
    confidence interval."""

    parts: Sequence[tuple[int, float]]
    text: str
    interval: tuple[float, float] | None = None


_ChartData = Sequence[tuple[str, Sequence[_BarData]]]
"""The label of each group, and the data of its bars."""


def accuracy_chart(accuracies: Sequence[Accuracy]) -> Chart:
    """Return the chart of the accuracy by domain and mode, with intervals."""
    data = [
        (
            each.domain,
            [_accuracy_bar(PLAIN_COLOUR, each.plain), _accuracy_bar(SANDBOX_COLOUR, each.sandbox)],
        )
        for each in accuracies
    ]
    description = "Percent of the problems, with 95 % intervals, by domain."
    return _chart(
        "Accuracy", description, [(PLAIN_COLOUR, "plain"), (SANDBOX_COLOUR, "sandbox")], data, 100
    )


def token_chart(uses: Sequence[TokenUse]) -> Chart:
    """Return the chart of the mean tokens of an answer by domain. Each domain has a bar for plain,
    and one for the sandbox, which shows the parts of the trajectory."""
    data, highest = [], 0.0
    for use in uses:
        plain = use.mean_plain_prompt_tokens + use.mean_plain_completion_tokens
        parts = (
            (SANDBOX_COLOUR, use.mean_first_prompt_tokens),
            (MODEL_COLOUR, use.mean_model_output_tokens),
            (ENVIRONMENT_COLOUR, use.mean_environment_tokens),
        )
        values = [_token_bar([(PLAIN_COLOUR, plain)]), _token_bar(parts)]
        data.append((use.domain, values))
        highest = max(highest, plain, use.mean_trajectory_tokens)
    legend = [
        (PLAIN_COLOUR, "plain"),
        (SANDBOX_COLOUR, "sandbox: first prompt"),
        (MODEL_COLOUR, "sandbox: model"),
        (ENVIRONMENT_COLOUR, "sandbox: environment"),
    ]
    description = "Mean tokens of an answer by domain. Each token counts once."
    return _chart("Tokens", description, legend, data, highest)


def capability_chart(uses: Sequence[ToolUse]) -> Chart:
    """Return the chart of the share of turns with each capability, as the proxy classifies them."""
    colours = list(zip(CAPABILITY_COLOURS, CAPABILITIES, strict=True))
    data = [
        (use.domain, [_share_bar(colour, use.capability_shares[name]) for colour, name in colours])
        for use in uses
    ]
    legend = [(colour, name.replace("_", " ")) for colour, name in colours]
    description = "Percent of the turns with a capability, by the proxy's classification."
    return _chart("Capabilities", description, legend, data, 100)


def turn_chart(use: ToolUse) -> Chart:
    """Return the histogram of the number of turns of all runs."""
    data, highest = [], 0
    for first, last in TURN_BINS:
        if first > max(use.turn_counts):
            break
        count = sum(first <= turns <= last for turns in use.turn_counts)
        label = f"{first}" if first == last else f"{first} to {last}"
        label = label if last < TURN_BINS[-1][1] else f"{first} or more"
        data.append(
            (
                f"{label} turn{'' if last == 1 else 's'}",
                [_BarData([(SANDBOX_COLOUR, count)], _number_text(count))],
            )
        )
        highest = max(highest, count)
    return _chart("Turns", "Number of runs by turns.", [], data, highest)


def _accuracy_bar(colour: int, estimate: Estimate | None) -> _BarData:
    if estimate is None:
        return _BarData([], "no grade")
    interval = estimate.interval and (100 * estimate.interval[0], 100 * estimate.interval[1])
    return _BarData([(colour, 100 * estimate.mean)], f"{100 * estimate.mean:.1f}", interval)


def _token_bar(parts: Sequence[tuple[int, float]]) -> _BarData:
    total = sum(length for _, length in parts)
    return _BarData(parts, _number_text(total) if total else "no answers")


def _share_bar(colour: int, share: float) -> _BarData:
    return _BarData([(colour, 100 * share)], f"{100 * share:.1f}")


def _chart(
    title: str,
    description: str,
    legend: Sequence[tuple[int, str]],
    data: _ChartData,
    max_value: float,
) -> Chart:
    """Return a chart with the bars below each other, on an axis from 0 to at least `max_value`."""
    step = _tick_step(max_value)
    scale = AXIS_WIDTH / (TICK_COUNT * step)
    y, groups = 0, []
    for label, values in data:
        label_y = y + LABEL_HEIGHT - 6
        y += LABEL_HEIGHT
        bars = []
        for value in values:
            bars.append(_bar(y, value, scale))
            y += BAR_HEIGHT + BAR_GAP
        groups.append(Group(label_y, label, bars))
        y += GROUP_GAP
    ticks = [
        (number * AXIS_WIDTH / TICK_COUNT, _number_text(number * step))
        for number in range(TICK_COUNT + 1)
    ]
    return Chart(title, description, legend, groups, ticks, y, y + AXIS_HEIGHT)


def _bar(y: int, value: _BarData, scale: float) -> Bar:
    segments, end = [], 0.0
    for colour, length in value.parts:
        width = scale * length
        segments.append(Segment(colour, round(end, 2), round(width, 2)))
        end += width
    interval = None
    if value.interval:
        low, high = (round(scale * each, 2) for each in value.interval)
        interval, end = (low, high), max(end, high)
    return Bar(y, segments, value.text, round(end, 2), interval)


def _tick_step(max_value: float) -> float:
    """Return the distance between marks: 1 if TICK_COUNT such steps reach `max_value`, else the
    smallest of ROUND_STEPS times a power of ten with which TICK_COUNT steps reach it."""
    if max_value <= TICK_COUNT:
        return 1.0
    needed = max_value / TICK_COUNT
    power = 10.0 ** (ceil(log10(needed)) - 1)
    return next(factor * power for factor in ROUND_STEPS if factor * power >= needed)


def _number_text(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"
