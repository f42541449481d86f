"""Curves and bars from 0 to 1 as SVG pictures, which are readable in light and in dark mode."""

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 640, 300, 44, 34, 40
COLOURS = ("#2a7de1", "#8a8f98", "#d2691e", "#2e9d6e")
STYLE = (
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


def bar_chart(
    groups: Mapping[str, tuple[float, float]], series: tuple[str, str], title: str
) -> str:
    """Return an SVG picture of pairs of horizontal bars from 0 to 1, one pair for each name."""
    left, row = 230, 40
    width, height = WIDTH - left - 60, TOP + row * len(groups) + BOTTOM
    parts = [f'<rect width="{WIDTH}" height="{height}"/>', _svg_text(8, 18, title)]
    for index, (name, values) in enumerate(groups.items()):
        y = TOP + row * index
        parts.append(_svg_text(8, y + 19, name))
        for number, value in enumerate(values):
            at, length = y + 14 * number, width * min(1.0, max(0.0, value))
            colour = COLOURS[1 - number]
            bar = f'<path d="M{left},{at}h{length:.1f}v12h-{length:.1f}z" fill="{colour}"/>'
            parts += [bar, _svg_text(left + length + 6, at + 11, f"{value:.2f}")]
    for number, name in enumerate(series):
        x = left + 120 * number
        parts.append(f'<circle cx="{x}" cy="{height - 14}" r="5" fill="{COLOURS[1 - number]}"/>')
        parts.append(_svg_text(x + 10, height - 10, name))
    return _svg_picture(parts, height)


def _svg_picture(parts: Sequence[str], height: int) -> str:
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>'
    return "\n".join([head, *parts, "</svg>\n"])


def _svg_text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:g}" y="{y:.1f}">{escape(text)}</text>'
