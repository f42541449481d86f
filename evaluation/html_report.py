"""The report of an evaluation as one HTML page, with charts and the trajectories.

The page loads nothing. Texts of models and commands are hostile: the templates escape all of them,
and the page's policy permits no script but its own. The samples are inert `template` elements. If
they exceed MAX_EMBEDDED_CHARS, each sample becomes a page of its own in a directory beside the
report.
"""

import base64
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from evaluation.charts import Chart, accuracy_chart, capability_chart, token_chart, turn_chart
from evaluation.grading import GradedResult
from evaluation.measures import Evaluation, token_uses, tool_uses
from evaluation.report import (
    EMPTY_CELL,
    Section,
    model_sections,
    setting_texts,
    speed_section,
    suites_section,
)
from evaluation.results import HTML_REPORT_FILE, MODES, Mode, Step
from evaluation.trajectories import capabilities_of, shorten

MAX_EMBEDDED_CHARS = 16_000_000
"""Maximum number of characters of the HTML of all samples in the page."""
MAX_SAMPLES = 20_000
"""Maximum number of samples in the viewer."""
MAX_TEXT_CHARS = 20_000
"""Maximum length of one text in the viewer."""
SAMPLE_PAGES_DIRECTORY = "report-samples"
"""The directory beside the report for the pages of samples."""
_NUMERIC_CELL = re.compile(r"[-+<≈]?[ \d.,%\[\]+-]*")
_INVISIBLE_CHARS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)
"""Control characters, and those that change the direction of the text around them."""


@dataclass(frozen=True, slots=True)
class WrittenReport:
    """The result of writing an HTML report."""

    path: Path
    summary: str
    """The number of samples, the place of their HTML (the page, or the directory of their own
    pages), and the number of samples that are left out."""


@dataclass(frozen=True, slots=True)
class ModeAnswer:
    """The answer of one mode in the viewer."""

    mode: Mode
    graded: GradedResult | None
    verdict: str
    """The grade in words: right, wrong, partly with the score, ungraded, or missing."""


@dataclass(frozen=True, slots=True)
class SampleRow:
    """A row of the viewer: the answers of a model to a problem in one repeat."""

    number: int
    model: str
    repeat: int
    mode_answers: Sequence[ModeAnswer]

    @property
    def sample(self) -> Any:
        """The problem of the row, to which all its answers belong."""
        return next(side.graded.sample for side in self.mode_answers if side.graded)

    @property
    def filter_values(self) -> str:
        """The value that the page's filters read: `mode status grade` of each answer, separated by
        `|`."""
        return "|".join(
            f"{side.mode} {side.graded.result.status} {side.verdict.partition(' ')[0]}"
            for side in self.mode_answers
            if side.graded
        )


@dataclass(slots=True)
class _Shortener:
    """Shortens long texts, and counts the shortened ones."""

    count: int = field(default=0)

    def __call__(self, text: str) -> str:
        self.count += len(text) > MAX_TEXT_CHARS
        return shorten(text, MAX_TEXT_CHARS)


def write_html(evaluation: Evaluation) -> WrittenReport:
    """Write report.html, and the pages of samples if they do not fit into it."""
    shortener = _Shortener()
    templates = _template_environment(shortener)
    pages = evaluation.directory / SAMPLE_PAGES_DIRECTORY
    _remove_pages(pages)
    rows, left_out = _sample_rows(evaluation)
    embedded = _sample_htmls(evaluation, rows, templates)
    if embedded is None:
        shortener.count = 0  # the samples are rendered again, and so their texts are counted again
        pages.mkdir(exist_ok=True)
        page = templates.get_template("sample_page.html")
        for row in rows:
            text = _sample_html(evaluation, row, templates)
            html = page.render(
                row=row, content=text, report=HTML_REPORT_FILE, styles=_styles(templates)
            )
            (pages / f"{row.number}.html").write_text(html, encoding="utf-8")
    script = _template_source(templates, "report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    html = templates.get_template("report.html").render(
        evaluation=evaluation,
        facts=setting_texts(evaluation),
        suites=suites_section(evaluation),
        speed=speed_section(evaluation),
        models=[(model, *_sections_and_charts(evaluation, model)) for model in evaluation.models],
        rows=rows,
        embedded=embedded,
        filters=_filter_choices(rows),
        left_out=left_out,
        shortened=shortener.count,
        max_chars=MAX_TEXT_CHARS,
        pages=SAMPLE_PAGES_DIRECTORY,
        styles=_styles(templates),
        script=Markup(script),
        script_digest=digest,
    )
    path = evaluation.directory / HTML_REPORT_FILE
    path.write_text(html, encoding="utf-8")
    place = "in the page" if embedded is not None else f"on pages in {pages}"
    return WrittenReport(path, f"{len(rows)} samples {place}, {left_out} left out")


def _template_environment(shortener: _Shortener) -> Environment:
    templates = Environment(
        loader=PackageLoader("evaluation"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_replace_invisible_chars,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters.update(
        shorten=shortener, command=_call_text, is_numeric=_numeric_columns, labels=capabilities_of
    )
    return templates


def _replace_invisible_chars(value: Any) -> Any:
    """Return a text with U+FFFD in place of characters that a browser hides or that reorder other
    characters. Return Markup and other values unchanged."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return _INVISIBLE_CHARS.sub("\N{REPLACEMENT CHARACTER}", value.replace("\r\n", "\n"))
    return value


def _template_source(templates: Environment, name: str) -> str:
    """Return the source of a file in the directory of the templates."""
    if templates.loader is None:
        raise TypeError("the environment has no loader")
    return templates.loader.get_source(templates, name)[0]


def _styles(templates: Environment) -> Markup:
    # Not escaped: the style sheet is a file of this package, not text of a model.
    return Markup(_template_source(templates, "report.css"))


def _remove_pages(directory: Path) -> None:
    """Remove the pages of an earlier report."""
    for path in directory.glob("*.html"):
        if path.stem.isdigit():
            path.unlink()


def _sections_and_charts(evaluation: Evaluation, model: str) -> tuple[list[Section], list[Chart]]:
    """Return the sections about a model and its charts."""
    graded = evaluation.results_of_model(model)
    charts = [accuracy_chart(evaluation.accuracies[model]), token_chart(token_uses(graded))]
    if uses := tool_uses(evaluation, graded):
        charts += [capability_chart(uses), turn_chart(uses[-1])]
    return model_sections(evaluation, model), charts


# The samples


def _sample_rows(evaluation: Evaluation) -> tuple[list[SampleRow], int]:
    """Return the rows of the viewer, and the number of those that are left out."""
    found: dict[tuple[str, str, int], dict[Mode, GradedResult]] = {}
    for each in evaluation.graded:
        place = (each.result.model, each.result.sample, each.result.repeat)
        found.setdefault(place, {})[each.result.mode] = each
    kept = sorted(found)[:MAX_SAMPLES]
    rows = [
        SampleRow(number, model, repeat, _mode_answers(found[model, sample, repeat]))
        for number, (model, sample, repeat) in enumerate(kept, 1)
    ]
    return rows, len(found) - len(kept)


def _mode_answers(by_mode: Mapping[Mode, GradedResult]) -> list[ModeAnswer]:
    return [ModeAnswer(mode, by_mode.get(mode), _verdict(by_mode.get(mode))) for mode in MODES]


def _verdict(graded: GradedResult | None) -> str:
    if graded is None:
        return "missing"
    if graded.grade is None:
        return "ungraded"
    score = float(graded.grade.score)
    return "right" if score == 1 else f"partly ({score:.0%})" if score else "wrong"


def _sample_htmls(
    evaluation: Evaluation, rows: Sequence[SampleRow], templates: Environment
) -> list[Markup] | None:
    """Return the HTML of all samples, or None if they exceed MAX_EMBEDDED_CHARS."""
    texts, chars = [], 0
    for row in rows:
        texts.append(_sample_html(evaluation, row, templates))
        chars += len(texts[-1])
        if chars > MAX_EMBEDDED_CHARS:
            return None
    return texts


def _sample_html(evaluation: Evaluation, row: SampleRow, templates: Environment) -> Markup:
    """Return the HTML of a sample. Its trajectories are read from the file at each call."""
    trajectories = [
        side.graded and evaluation.trajectories.get(side.graded.result) for side in row.mode_answers
    ]
    mode_answers = list(zip(row.mode_answers, trajectories, strict=True))
    return Markup(templates.get_template("sample.html").render(row=row, mode_answers=mode_answers))


def _filter_choices(rows: Sequence[SampleRow]) -> Mapping[str, list[str]]:
    """Return the choices of each filter. Filters with a single choice are left out."""
    states = [state.split(" ") for row in rows for state in row.filter_values.split("|")]
    choices = {
        "model": {row.model for row in rows},
        "domain": {row.sample.domain for row in rows},
        "mode": {state[0] for state in states},
        "status": {state[1] for state in states},
        "grade": {state[2] for state in states},
    }
    return {name: sorted(found) for name, found in choices.items() if len(found) > 1}


def _call_text(step: Step) -> str:
    """Return a tool call as text: the command, or a line for each argument."""
    arguments = step.arguments
    if step.tool == "execute_bash" and set(arguments) <= {"command"}:
        return arguments.get("command", "")
    return "\n".join(f"{name}: {value}" for name, value in arguments.items())


# Tables


def _numeric_columns(section: Section) -> list[bool]:
    """Return, for each column, True if all its cells are numbers or empty."""
    columns: Iterator[tuple[str, ...]] = zip(*section.rows, strict=True)
    return [
        all(cell == EMPTY_CELL or _NUMERIC_CELL.fullmatch(cell) for cell in column)
        for column in columns
    ]
