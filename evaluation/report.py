"""The sections of an evaluation's report, and the functions that render them in Markdown."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from evaluation.grading import ERROR_KINDS, GradedResult, Graders
from evaluation.measures import (
    ALL_DOMAINS,
    CAPABILITIES,
    MAX_PAUSE_SHARE,
    Accuracy,
    Evaluation,
    ToolUse,
    answered_results,
    mean_or_zero,
    results_by_domain,
    results_by_mode,
    sandbox_uses,
    speeds,
    token_uses,
    tool_uses,
)
from evaluation.reference_graders import (
    REFERENCE_PACKAGE,
    has_reference_grader,
    reference_version,
)
from evaluation.results import MODES
from evaluation.statistics import FLIPS, Estimate, PValue, mean, percentile

EMPTY_CELL = "-"
"""The text of a table's cell that has no value."""
RECONSTRUCTED = "reconstructed"
PAIRS_NOTE = (
    "over the pairs: the problems and repeats with an answer in both modes. Left out are those"
    " without an answer in one mode, such as those whose plain prompt exceeds the context window."
)
"""The explanation of the columns `pairs` and `left out`."""
_TAG = re.compile(r"<(?=[A-Za-z/!?])")


@dataclass(frozen=True, slots=True)
class Section:
    """A table of the report with its title and an explanation."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def render(evaluation: Evaluation) -> str:
    """Return the whole report in Markdown."""
    parts = [
        "# Evaluation\n",
        *(f"- {name}: {value}" for name, value in setting_texts(evaluation)),
        "",
    ]
    parts.append(_markdown_table(suites_section(evaluation)))
    for model in evaluation.models:
        first, *others = model_sections(evaluation, model)
        parts += [f"## {model}\n", f"{_markdown_table(first)}\n{first.note}\n"]
        parts += [render_section(section, "###") for section in others]
    parts.append(render_section(speed_section(evaluation), "##"))
    return "\n".join(parts)


def setting_texts(evaluation: Evaluation) -> list[tuple[str, str]]:
    """Return the settings, versions and graders of the evaluation, each as a name and a text."""
    settings = evaluation.info.settings
    return [
        ("sandbox", f"`{json.dumps(settings.sandbox)}`"),
        ("request", f"`{json.dumps(settings.request)}`"),
        ("seed", EMPTY_CELL if settings.seed is None else str(settings.seed)),
        *(
            (f"protocol of {name}", f"`{json.dumps(protocol)}`")
            for name, protocol in settings.protocols.items()
        ),
        *evaluation.info.versions.items(),
        ("graders of the accuracy", grader_text(evaluation.graders, evaluation.graded)),
    ]


def suites_section(evaluation: Evaluation) -> Section:
    """Return the table of the suites."""
    rows = [
        [each.name, str(each.count), each.source, each.licence, f"`{each.sha256[:12]}`"]
        for each in (suite.manifest for suite in evaluation.suites)
    ]
    return Section("Suites", ["suite", "samples", "source", "licence", "sha256"], rows)


def model_sections(evaluation: Evaluation, model: str) -> list[Section]:
    """Return all sections about a model except its speed. The first section shows the accuracy, as
    the main table of the paper does."""
    graded = evaluation.results_of_model(model)
    return [
        _accuracy_section(evaluation.accuracies[model]),
        _failure_count_section(graded),
        *_grader_sections(evaluation.graders, graded),
        _token_section(graded),
        _tool_section(evaluation, graded),
        _capability_section(evaluation, graded),
        _reasoning_section(evaluation, graded),
        _end_reason_section(graded),
        _error_section(graded),
    ]


def speed_section(evaluation: Evaluation) -> Section:
    """Return the section about speed, the only one whose numbers depend on time."""
    rows = []
    for model in evaluation.models:
        for each in speeds(evaluation, evaluation.results_of_model(model)):
            measured = each.measured_per_minute
            numbers = (
                f"{each.per_minute:.1f}",
                EMPTY_CELL if measured is None else f"{measured:.1f}",
                *(f"{each.p50_s:.2f}", f"{each.p95_s:.2f}"),
            )
            row = [model, each.domain, each.mode, str(each.answers), *numbers]
            if each.mode == "plain":
                row += [EMPTY_CELL, EMPTY_CELL, EMPTY_CELL]
            else:
                counts = (len(each.pairs.plain), each.pairs.left_out)
                row += [_ratio_text(each.ratio), *map(str, counts)]
            rows.append(row)
    head = ["model", "domain", "mode", "answers", "per minute", "measured", "p50 (s)", "p95 (s)"]
    parts = {each.result.concurrency or evaluation.info.concurrency for each in evaluation.graded}
    at_a_time = " or ".join(map(str, sorted(parts or {evaluation.info.concurrency})))
    note = (
        f"With {at_a_time} requests at a time. Answers per minute are the number"
        " of requests at a time divided by their mean time. Measured are the answers divided by the"
        " time from the first start to the last end of all requests of the mode, with those that"
        " failed. A single domain has no measured number, as the requests of the domains take"
        f" turns. Nor has a mode whose requests paused for more than {100 * MAX_PAUSE_SHARE:.0f} %"
        " of that time, as when an evaluation is continued later, or whose number of requests at a"
        " time changed."
        f" The ratio is that of the answers per minute to those of plain, {PAIRS_NOTE}"
    )
    return Section("Speed", [*head, "ratio", "pairs", "left out"], rows, note)


def percent_text(estimate: Estimate | None, sign: str = "") -> str:
    """Return a mean and its interval in percent, such as `50.0 [25.0, 75.0]`."""
    if estimate is None:
        return EMPTY_CELL
    text = f"{100 * estimate.mean:{sign}.1f}"
    if estimate.interval is None:
        return text
    low, high = estimate.interval
    return f"{text} [{100 * low:{sign}.1f}, {100 * high:{sign}.1f}]"


def p_value_text(p_value: PValue) -> str:
    """Return a p-value with four decimal places. An estimated p-value begins with `≈`."""
    if not p_value.is_exact:
        return f"≈ {p_value.value:.4f}"
    return f"{p_value.value:.4f}" if p_value.value >= 0.0001 else "< 0.0001"


def p_value_note(p_values: Sequence[PValue]) -> str:
    """Return the sentence that explains estimated p-values, or an empty text if all are exact."""
    if all(each.is_exact for each in p_values):
        return ""
    return f" A p with ≈ is estimated from {FLIPS:,} random sign flips."


def number_text(value: float, digits: int = 0) -> str:
    """Return a number with thousands separators, or EMPTY_CELL for 0."""
    return f"{value:,.{digits}f}" if value else EMPTY_CELL


def judge_names(graded: Sequence[GradedResult]) -> str:
    """Return the names of the judges of these answers, or `none`."""
    return ", ".join(sorted({each.judge for each in graded if each.judge})) or "none"


def grader_text(graders: Graders, graded: Sequence[GradedResult]) -> str:
    """Return a text that names the graders by which the accuracy is computed. If they are those of
    the reference implementation, the text also names the domains for which it has no grader."""
    if graders != "reference":
        return "strict"
    text = f"those of the reference, {_reference_name()}"
    if domains := domains_without_reference_grader(graded):
        return f"{text}; strict in {', '.join(domains)}, for which the reference has no grader"
    return text


def domains_without_reference_grader(graded: Sequence[GradedResult]) -> list[str]:
    """Return the domains, sorted, in which the reference has no grader for any sample."""
    domains = {each.sample.domain for each in graded}
    with_grader = {each.sample.domain for each in graded if has_reference_grader(each.sample)}
    return sorted(domains - with_grader)


def _reference_name() -> str:
    return f"{REFERENCE_PACKAGE} {reference_version() or '(not installed)'}"


def _ratio_text(value: float | None) -> str:
    return EMPTY_CELL if value is None else f"{value:.2f}"


# The sections


def _accuracy_section(accuracies: Sequence[Accuracy]) -> Section:
    rows, p_values = [], []
    for each in accuracies:
        row = [each.domain, percent_text(each.plain), percent_text(each.sandbox)]
        if found := each.difference:
            pairs = str(found.estimate.count)
            row += [percent_text(found.estimate, sign="+"), pairs, p_value_text(found.p_value)]
            p_values.append(found.p_value)
        else:
            row += [EMPTY_CELL, EMPTY_CELL, EMPTY_CELL]
        rows.append(row)
    note = (
        "Accuracy in percent, with the 95 % interval of a bootstrap over problems; repeats of a"
        " problem are averaged first. Δ and p (exact sign-flip test) are over the pairs: the"
        " problems with a grade in both modes."
    )
    head = ["domain", "plain", "sandbox", "Δ", "pairs", "p"]
    return Section("Accuracy", head, rows, note + p_value_note(p_values))


def _failure_count_section(graded: Sequence[GradedResult]) -> Section:
    """Return a table of the numbers of format failures, context overflows, errors of graders and
    infrastructure errors."""
    rows = [
        [
            domain,
            mode,
            str(len(group)),
            str(sum(each.grade is not None for each in group)),
            str(sum(each.grade is not None and each.grade.format_failure for each in group)),
            str(sum(each.result.status == "context_overflow" for each in group)),
            *(str(sum(each.error_kind == kind for each in group)) for kind in ERROR_KINDS),
            str(sum(each.result.status == "infra_error" for each in group)),
        ]
        for domain, of_domain in results_by_domain(graded)
        for mode, group in results_by_mode(of_domain)
    ]
    head = ["domain", "mode", "results", "graded", "format failures", "context overflows"]
    note = (
        "Format failures, context overflows and grader failures count as wrong. A grader has failed"
        " if it exceeded its limits or crashed on the answer. Ungradable answers, judge failures"
        " and infrastructure errors have no grade and are not part of the accuracy."
    )
    more = ["ungradable", "judge failures", "grader failures", "infra errors"]
    return Section("Results without an ordinary grade", [*head, *more], rows, note)


def _grader_sections(graders: Graders, graded: Sequence[GradedResult]) -> list[Section]:
    """Return a list of one section: the scores of both graders and of the loose test, and the
    errors of graders by kind. The list is empty if the reference's graders were not requested and
    no answer has a judge, a loose test or an error of its grader."""
    if graders == "strict" and not any(
        each.judge or each.error or each.sample.grader == "ifbench" for each in graded
    ):
        return []
    rows = [
        [
            domain,
            mode,
            _mean_score_text([each.grade.score for each in group if each.grade]),
            _mean_score_text(
                [each.reference_grade.score for each in group if each.reference_grade]
            ),
            _mean_score_text(_loose_scores(group)),
            str(sum(each.grade is not None and each.grade.format_failure for each in group)),
            *(str(sum(each.error_kind == kind for each in group)) for kind in ERROR_KINDS),
            str(sum(each.reference_grade is None and bool(each.reference_error) for each in group)),
        ]
        for domain, of_domain in results_by_domain(graded)
        for mode, group in results_by_mode(of_domain)
    ]
    head = ["domain", "mode", "score", "reference", "loose", "format failures", *ERROR_KINDS]
    note = (
        f"Judge: {judge_names(graded)}. {_reference_note(graders, graded)}"
        " Loose: IFBench's loose test. Scores are means in percent over the answers that have one,"
        " and each column leaves out the answers that it has no grade for."
    )
    return [Section("Graders", [*head, "without reference"], rows, note)]


def _reference_note(graders: Graders, graded: Sequence[GradedResult]) -> str:
    """Return the sentences that explain the column `reference`."""
    if graders == "strict":
        return "Reference: not asked for, see `--grader both`."
    text = f"Reference: the paper's own graders, {_reference_name()}."
    if domains := domains_without_reference_grader(graded):
        return (
            f"{text} They have none for {', '.join(domains)}, which the column leaves out, also in"
            f" the row of {ALL_DOMAINS}."
        )
    return text


def _mean_score_text(scores: Sequence[Fraction]) -> str:
    """Return the mean score in percent, or EMPTY_CELL without scores."""
    return f"{100 * mean(scores):.1f}" if scores else EMPTY_CELL


def _loose_scores(graded: Sequence[GradedResult]) -> list[Fraction]:
    """Return 1 for each graded answer of IFBench that passes the loose test, else 0."""
    grades = [each.grade for each in graded if each.grade and each.sample.grader == "ifbench"]
    return [Fraction(bool(grade.passes_loose_test)) for grade in grades]


def _token_section(graded: Sequence[GradedResult]) -> Section:
    rows = []
    for use in token_uses(graded):
        trajectory = use.mean_trajectory_tokens
        means = (
            *(use.mean_plain_prompt_tokens, use.mean_plain_completion_tokens),
            *(use.mean_sandbox_prompt_tokens, use.mean_sandbox_completion_tokens, trajectory),
        )
        parts = (
            *(use.mean_first_prompt_tokens, use.mean_model_output_tokens),
            use.mean_environment_tokens,
        )
        shares = [f"{part / trajectory:.1%}" if trajectory else EMPTY_CELL for part in parts]
        counts = (str(use.pairs), str(use.left_out))
        rows.append(
            [use.domain, *map(number_text, means), *shares, _ratio_text(use.ratio), *counts]
        )
    head = ["domain", "plain: prompt", "plain: completion", "sandbox: prompt"]
    parts_head = ["sandbox: completion", "trajectory", "first prompt", "model", "environment"]
    note = (
        "Mean tokens of an answer, as the backend counts them. Prompt and completion are sums over"
        " all model calls. The trajectory counts each token once, and consists of the first prompt,"
        " the text of the model and the environment, which is the output of tools. The ratio is the"
        f" trajectory divided by prompt and completion of plain, {PAIRS_NOTE}"
    )
    return Section("Tokens", [*head, *parts_head, "ratio", "pairs", "left out"], rows, note)


def _tool_section(evaluation: Evaluation, graded: Sequence[GradedResult]) -> Section:
    rows = []
    for use in tool_uses(evaluation, graded):
        failed = f"{use.failed_tool_calls / use.tool_calls:.1%}" if use.tool_calls else EMPTY_CELL
        rows.append(
            [
                use.domain,
                number_text(mean_or_zero(use.turn_counts), 1),
                *(str(percentile(use.turn_counts, share)) for share in (0.5, 0.95)),
                number_text(use.model_calls, 1),
                str(use.tool_calls),
                str(use.failed_tool_calls),
                failed,
            ]
        )
    head = ["domain", "turns", "p50", "p95", "model calls", "tool calls", "failed", "failed share"]
    note = (
        "Turns and model calls are means, with the median and the 95th percentile of the turns;"
        " tool calls are sums. A tool call has failed if its command did not exit with 0."
    )
    return Section("Turns and tools", head, rows, note)


def _capability_section(evaluation: Evaluation, graded: Sequence[GradedResult]) -> Section:
    rows, uses = [], tool_uses(evaluation, graded)
    for use in uses:
        shares = [*(use.capability_shares[name] for name in CAPABILITIES), use.idle_share]
        if use.pattern_idle_share is None:
            patterns = [EMPTY_CELL] * (len(CAPABILITIES) + 1)
        else:
            found = [
                *(use.pattern_shares[name] for name in CAPABILITIES),
                use.pattern_idle_share,
            ]
            patterns = [f"{share:.1%}" for share in found]
        rows.append([use.domain, *(f"{share:.1%}" for share in shares), *patterns])
    names = [*(name.replace("_", " ") for name in CAPABILITIES), "idle"]
    head = ["domain", *names, *(f"{RECONSTRUCTED}: {name}" for name in names)]
    note = (
        "The share of turns that used a capability. The first columns are the proxy's"
        f" classification. The columns marked {RECONSTRUCTED} count the turns with a tool call that"
        " contains a plain text pattern: a reconstruction of the paper's Table 15, whose list is"
        " not known, so that they are not the paper's measure. An idle turn has no capability and"
        f" no submission. {_captured_turns_note(uses)}"
    )
    return Section("Capabilities", head, rows, note)


def _captured_turns_note(uses: Sequence[ToolUse]) -> str:
    """Return the sentences that say which shares of turns are exact. The last element of `uses` is
    for all domains together."""
    if not uses:
        return "There are no runs."
    runs, captured = uses[-1].runs, uses[-1].captured_runs
    if captured == runs:
        return "The turns of all runs were captured, so that the shares are exact."
    some = f"{captured} of {runs} runs" if captured else "no run"
    return (
        f"The turns of {some} were captured. For the others, the columns marked {RECONSTRUCTED}"
        " give the matching tool calls per turn, and the idle shares are lower bounds: capabilities"
        " that share a turn count as turns of their own, and so do several calls in one turn."
    )


def _reasoning_section(evaluation: Evaluation, graded: Sequence[GradedResult]) -> Section:
    rows = []
    for domain, of_domain in results_by_domain(answered_results(graded)):
        for mode, group in results_by_mode(of_domain):
            keys = [each.result.key for each in group if each.result.key in evaluation.patterns]
            found = [evaluation.patterns[key] for key in keys]
            means = (
                mean_or_zero([patterns.verification for patterns in found]),
                mean_or_zero([patterns.structure for patterns in found]),
            )
            rows.append([domain, mode, str(len(found)), *(f"{mean:.2f}" for mean in means)])
    head = ["domain", "mode", "answers", "verification", "structure"]
    note = (
        "Mean counts in the reasoning and the text of an answer. Verification: words such as"
        " “verify”, “double-check” and “make sure”. Structure: headings, items of lists and"
        " numbered steps. The patterns are of this project, not of the paper."
    )
    return Section("Reasoning patterns", head, rows, note)


def _end_reason_section(graded: Sequence[GradedResult]) -> Section:
    rows = []
    for domain, of_domain in results_by_domain(answered_results(graded)):
        plain = Counter(
            each.result.finish_reason for each in of_domain if each.result.mode == MODES[0]
        )
        sandbox = Counter(run.stop_reason for run in sandbox_uses(of_domain))
        rows.append([domain, _counts_text(plain), _counts_text(sandbox)])
    head = ["domain", "plain: finish reasons", "sandbox: stop reasons"]
    return Section("Ends of the answers", head, rows)


def _error_section(graded: Sequence[GradedResult]) -> Section:
    """Return a table of all errors and retries by code, and of all errors of graders."""
    final, retried = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
    for each in graded:
        codes = [failure.code for failure in each.result.failures]
        if each.result.status != "answered":
            final[each.sample.domain, each.result.mode, codes.pop()] += 1
        for code in codes:
            retried[each.sample.domain, each.result.mode, code] += 1
        if each.error:
            final[each.sample.domain, each.result.mode, str(each.error)] += 1
    rows = [
        [*place, str(final[place]), str(retried[place])] for place in sorted({*final, *retried})
    ]
    note = "" if rows else "There are none."
    return Section("Errors", ["domain", "mode", "error", "results", "retried"], rows, note)


def _counts_text(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name or 'none'} {counts[name]}" for name in sorted(counts)) or EMPTY_CELL


# Markdown


def render_section(section: Section, heading_marks: str) -> str:
    """Return a section in Markdown; `heading_marks` begins its heading."""
    parts = [f"{heading_marks} {section.title}\n"]
    parts += [_markdown_table(section)] if section.rows else []
    parts += [f"{section.note}\n"] if section.note else []
    return "\n".join(parts)


def _markdown_table(section: Section) -> str:
    lines = [section.head, ["---"] * len(section.head), *section.rows]
    return "".join(f"| {' | '.join(_escape_cells(line))} |\n" for line in lines)


def _escape_cells(cells: Sequence[str]) -> list[str]:
    """Return each cell on one line, with HTML tags, links and images escaped. A cell may contain
    the code of an error, which is untrusted text from a server."""
    lines = (
        " ".join(cell.split()).replace("\\", r"\\").replace("|", r"\|").replace("](", r"\](")
        for cell in cells
    )
    return [_TAG.sub("&lt;", line) for line in lines]
