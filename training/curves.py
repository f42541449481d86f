"""Curves and bars as SVG pictures, which are readable in light and in dark mode."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor, log10
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 640, 300, 44, 34, 40
BARS_LEFT = 230
TICKS = 4
"""Number of marks on the axis of bars, without 0."""
COLOURS = ("#2a7de1", "#8a8f98", "#d2691e", "#2e9d6e")
STYLE = (
    "text.bold{font-weight:600}text.tick{font-size:11px;text-anchor:middle}"
    "text{font:13px system-ui,sans-serif;fill:#24292f}line{stroke:#d0d7de}rect{fill:#fff}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}line{stroke:#30363d}rect{fill:#0d1117}}"
)


def line_chart(values_by_name: Mapping[str, Sequence[float]], title: str, x_label: str) -> str:
    """Return an SVG picture of lines of values from 0 to 1, one for each name."""
    steps = max(2, *(len(values) for values in values_by_name.values()))
    width, height = WIDTH - LEFT - 16, HEIGHT - TOP - BOTTOM
    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}"/>', _svg_text(LEFT, 18, title)]
    for tick in range(5):
        y = TOP + height * (1 - tick / 4)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - 16}" y2="{y:.1f}"/>')
        parts.append(_svg_text(8, y + 4, f"{tick / 4:.2f}"))
    for number, (name, values) in enumerate(values_by_name.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(
            f"{LEFT + width * step / (steps - 1):.1f},{TOP + height * (1 - value):.1f}"
            for step, value in enumerate(values)
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.5"/>'
        )
        x = LEFT + 180 * number + 130
        parts.append(f'<circle cx="{x}" cy="{HEIGHT - 14}" r="5" fill="{colour}"/>')
        parts.append(_svg_text(x + 10, HEIGHT - 10, name))
    parts.append(_svg_text(LEFT, HEIGHT - 10, f"{x_label} 1 to {steps}"))
    return _svg_picture(parts, HEIGHT)


@dataclass(frozen=True, slots=True)
class Panel:
    """Pairs of bars on one axis, which begins at 0."""

    title: str
    pairs: Mapping[str, tuple[float, float]]
    max_value: float
    """The axis ends at this value, or above it if TICKS round steps do not end there exactly."""


def bar_chart(panels: Sequence[Panel], series: tuple[str, str], title: str) -> str:
    """Return an SVG picture of panels below each other, with one pair of horizontal bars for each
    name. Each panel has an axis of its own."""
    parts, y = [_svg_text(8, 18, title, "bold")], TOP
    for panel in panels:
        drawn, y = _panel_parts(panel, y)
        parts += drawn
    height = y + BOTTOM
    for number, name in enumerate(series):
        x = BARS_LEFT + 120 * number
        parts.append(f'<circle cx="{x}" cy="{height - 14}" r="5" fill="{COLOURS[1 - number]}"/>')
        parts.append(_svg_text(x + 10, height - 10, name))
    return _svg_picture([f'<rect width="{WIDTH}" height="{height}"/>', *parts], height)


def _panel_parts(panel: Panel, top: int) -> tuple[list[str], int]:
    """Return the parts of a panel, and the y coordinate of its end."""
    row, step = 40, _tick_step(panel.max_value)
    scale = (WIDTH - BARS_LEFT - 70) / (TICKS * step)
    first = top + 26
    bottom = first + row * len(panel.pairs) - 6
    parts = [_svg_text(8, top + 14, panel.title, "bold")]
    for tick in range(TICKS + 1):
        x = BARS_LEFT + tick * step * scale
        parts.append(f'<line x1="{x:.1f}" y1="{first - 4}" x2="{x:.1f}" y2="{bottom}"/>')
        parts.append(_svg_text(x, bottom + 15, f"{tick * step:,g}", "tick"))
    for index, (name, values) in enumerate(panel.pairs.items()):
        y = first + row * index
        parts.append(_svg_text(8, y + 19, name))
        for number, value in enumerate(values):
            at, length = y + 14 * number, value * scale
            bar = f"M{BARS_LEFT},{at}h{length:.1f}v12h-{length:.1f}z"
            parts.append(f'<path d="{bar}" fill="{COLOURS[1 - number]}"/>')
            parts.append(_svg_text(BARS_LEFT + length + 6, at + 11, _value_text(value)))
    return parts, bottom + 34


def _tick_step(max_value: float) -> float:
    """Return the smallest round number with which TICKS steps reach `max_value`."""
    if max_value <= 0:
        return 1.0
    power = 10.0 ** floor(log10(max_value / TICKS))
    return next(n * power for n in (1, 2, 2.5, 5, 10) if n * power * TICKS >= max_value)


def _value_text(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def _svg_picture(parts: Sequence[str], height: int) -> str:
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>'
    return "\n".join([head, *parts, "</svg>\n"])


def _svg_text(x: float, y: float, text: str, style: str = "") -> str:
    """Return a text. `style` is a class of STYLE."""
    named = f' class="{style}"' if style else ""
    return f'<text{named} x="{x:g}" y="{y:.1f}">{escape(text)}</text>'
