"""The report of an evaluation, in Markdown."""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction

from evaluation.grading import FAILURES, Graded
from evaluation.reference_graders import PACKAGE, reference_version
from evaluation.results import MODES, Mode, RunInfo
from evaluation.samples import Suite
from evaluation.statistics import bootstrap_interval, mean, paired_p_value, percentile

ALL = "all domains"
NONE = "-"
"""The entry of a table's cell without a value."""


def render(info: RunInfo, suites: Sequence[Suite], graded: Sequence[Graded]) -> str:
    """Return the whole report."""
    parts = [_header(info, suites), render_results(graded), _timing(info, graded)]
    return "\n".join(parts)


def render_results(graded: Sequence[Graded]) -> str:
    """Return the part of the report that does not depend on time."""
    return "\n".join(
        section
        for model, of_model in _groups(graded, lambda each: each.result.model).items()
        for section in (
            f"## {model}\n",
            _accuracy(of_model),
            _apart(of_model),
            _graders(of_model),
            _tokens(of_model),
            _tools(of_model),
            _stop_reasons(of_model),
            _failures(of_model),
        )
        if section
    )


# The sections


def _header(info: RunInfo, suites: Sequence[Suite]) -> str:
    settings = info.settings
    facts = [
        f"- sandbox: `{json.dumps(settings.sandbox)}`",
        f"- request: `{json.dumps(settings.request)}`",
        f"- seed: {NONE if settings.seed is None else settings.seed}",
        *(f"- {name}: {version}" for name, version in info.versions.items()),
    ]
    rows = [
        [each.name, str(each.count), each.source, each.licence, f"`{each.sha256[:12]}`"]
        for each in (suite.manifest for suite in suites)
    ]
    table = _table(["suite", "samples", "source", "licence", "sha256"], rows)
    return "\n".join(["# Evaluation\n", *facts, "", table])


def _accuracy(graded: Sequence[Graded]) -> str:
    """Return the paper's table, with the intervals and the paired test."""
    rows = []
    for domain, of_domain in _domains(graded):
        plain, sandbox = (_scores(of_domain, mode) for mode in MODES)
        shared = [sandbox[sample] - plain[sample] for sample in sorted(plain.keys() & sandbox)]
        rows.append(
            [
                domain,
                *(_percent(list(scores.values())) for scores in (plain, sandbox)),
                _percent(shared, sign="+"),
                str(len(shared)) if shared else NONE,
                _p_value(shared),
            ]
        )
    head = ["domain", "plain", "sandbox", "Δ", "pairs", "p"]
    note = (
        "Accuracy in percent, with the 95 % interval of a bootstrap over problems; repeats of a"
        " problem are averaged first. Δ and p (exact sign-flip test) are over the pairs: the"
        " problems with a grade in both modes.\n"
    )
    return f"{_table(head, rows)}\n{note}"


def _apart(graded: Sequence[Graded]) -> str:
    """Return the counts of results that need a look before the accuracy is believed."""
    rows = [
        [
            domain,
            mode,
            str(len(group)),
            str(sum(each.grade is not None for each in group)),
            str(sum(each.grade is not None and each.grade.format_failure for each in group)),
            str(sum(each.result.status == "context_overflow" for each in group)),
            str(sum(bool(each.grader_error) for each in group)),
            str(sum(each.result.status == "infra_error" for each in group)),
        ]
        for domain, of_domain in _domains(graded)
        for mode, group in _modes(of_domain)
    ]
    head = ["domain", "mode", "results", "graded", "format failures", "context overflows"]
    note = (
        "Format failures and context overflows count as wrong. Grader failures and infrastructure"
        " errors have no grade and are not part of the accuracy.\n"
    )
    table = _table([*head, "grader failures", "infra errors"], rows)
    return f"### Results without an ordinary grade\n\n{table}\n{note}"


def _graders(graded: Sequence[Graded]) -> str:
    """Return the scores of both graders side by side, and the answers without a grade by their
    reason; nothing if no answer has a judge, a second grade or no grade."""
    if not any(each.judge or each.reference or each.grader_error for each in graded):
        return ""
    rows = [
        [
            domain,
            mode,
            _share([each.grade.score for each in group if each.grade]),
            _share([each.reference.score for each in group if each.reference]),
            _share(_loose_scores(group)),
            str(sum(each.grade is not None and each.grade.format_failure for each in group)),
            *(str(sum(each.failure == kind for each in group)) for kind in FAILURES),
            str(sum(bool(each.reference_error) for each in group)),
        ]
        for domain, of_domain in _domains(graded)
        for mode, group in _modes(of_domain)
    ]
    head = ["domain", "mode", "score", "reference", "loose", "format failures", *FAILURES]
    judges = ", ".join(sorted({each.judge for each in graded if each.judge}))
    note = (
        f"Judge: {judges or 'none'}. Reference: the paper's own graders,"
        f" {PACKAGE} {reference_version() or '(not installed)'}. Loose: IFBench's loose test."
        " Scores are means in percent over the answers that have one, and each column leaves out"
        " the answers that it has no grade for.\n"
    )
    return f"### Graders\n\n{_table([*head, 'without reference'], rows)}\n{note}"


def _tokens(graded: Sequence[Graded]) -> str:
    rows = []
    for domain, of_domain in _domains(_answered(graded)):
        plain, sandbox = (
            [each.result for each in of_domain if each.result.mode == mode] for mode in MODES
        )
        runs = [result.sandbox for result in sandbox if result.sandbox]
        trajectory = sum(run.trajectory_tokens for run in runs)
        plain_mean = _mean([each.prompt_tokens + each.completion_tokens for each in plain])
        sandbox_mean = _mean([run.trajectory_tokens for run in runs])
        share = sum(run.observation_tokens for run in runs)
        ratio = sandbox_mean / plain_mean if sandbox_mean and plain_mean else None
        rows.append(
            [
                domain,
                _number(_mean([each.prompt_tokens for each in plain])),
                _number(_mean([each.completion_tokens for each in plain])),
                _number(_mean([each.prompt_tokens for each in sandbox])),
                _number(_mean([each.completion_tokens for each in sandbox])),
                _number(sandbox_mean),
                f"{share / trajectory:.1%}" if trajectory else NONE,
                f"{ratio:.2f}" if ratio is not None else NONE,
            ]
        )
    head = ["domain", "plain: prompt", "plain: completion", "sandbox: prompt"]
    more = ["sandbox: completion", "trajectory", "observations", "ratio"]
    note = (
        "Mean tokens of an answer, as the backend counts them. Prompt and completion are sums over"
        " all model calls. The trajectory counts each token once; observations is the share of tool"
        " output in it; ratio is the trajectory divided by prompt and completion of plain.\n"
    )
    return f"### Tokens\n\n{_table([*head, *more], rows)}\n{note}"


def _tools(graded: Sequence[Graded]) -> str:
    rows = []
    for domain, of_domain in _domains(_answered(graded)):
        runs = [each.result.sandbox for each in of_domain if each.result.sandbox]
        if not runs:
            continue
        turns = sum(run.turns for run in runs)
        uses = Counter[str]()
        for run in runs:
            uses.update(run.capability_turns)
        rows.append(
            [
                domain,
                _number(_mean([run.turns for run in runs]), 1),
                _number(_mean([run.model_calls for run in runs]), 1),
                str(sum(run.tool_calls for run in runs)),
                str(sum(run.failed_tool_calls for run in runs)),
                " ".join(f"{name} {uses[name] / turns:.1%}" for name in sorted(uses) if turns),
            ]
        )
    head = ["domain", "turns", "model calls", "tool calls", "failed", "turns with a capability"]
    note = (
        "Turns and model calls are means; tool calls are sums. A tool call has failed if its"
        " command did not exit with 0. The proxy assigns the capabilities.\n"
    )
    return f"### Turns and tools\n\n{_table(head, rows)}\n{note}"


def _stop_reasons(graded: Sequence[Graded]) -> str:
    rows = []
    for domain, of_domain in _domains(_answered(graded)):
        runs = [each.result.sandbox for each in of_domain if each.result.sandbox]
        plain = Counter(
            each.result.finish_reason for each in of_domain if each.result.mode == "plain"
        )
        sandbox = Counter(run.stop_reason for run in runs)
        rows.append([domain, _counts(plain), _counts(sandbox)])
    table = _table(["domain", "plain: finish reasons", "sandbox: stop reasons"], rows)
    return f"### Ends of the answers\n\n{table}"


def _failures(graded: Sequence[Graded]) -> str:
    """Return all errors and retries by code, and all grader failures."""
    final, retried = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
    for each in graded:
        codes = [failure.code for failure in each.result.failures]
        if each.result.status != "answered":
            final[each.sample.domain, each.result.mode, codes.pop()] += 1
        for code in codes:
            retried[each.sample.domain, each.result.mode, code] += 1
        if each.grader_error:
            final[each.sample.domain, each.result.mode, f"grader: {each.grader_error}"] += 1
    if not final and not retried:
        return "### Errors\n\nThere are none.\n"
    rows = [
        [*place, str(final[place]), str(retried[place])] for place in sorted({*final, *retried})
    ]
    return f"### Errors\n\n{_table(['domain', 'mode', 'error', 'results', 'retried'], rows)}"


def _timing(info: RunInfo, graded: Sequence[Graded]) -> str:
    rows = []
    for model, of_model in _groups(_answered(graded), lambda each: each.result.model).items():
        for mode, group in _modes(of_model):
            times = [each.result.latency_s for each in group]
            per_minute = 60 * info.concurrency / _mean(times) if sum(times) else 0.0
            rows.append(
                [
                    *(model, mode, str(len(times)), f"{per_minute:.1f}"),
                    *(f"{percentile(times, share):.2f}" for share in (0.5, 0.95)),
                ]
            )
    table = _table(["model", "mode", "answers", "per minute", "p50 (s)", "p95 (s)"], rows)
    note = (
        f"With {info.concurrency} requests at a time. Answers per minute are the number of requests"
        " at a time divided by their mean time.\n"
    )
    return f"## Speed\n\n{table}\n{note}"


# Groups and cells


def _groups(graded: Sequence[Graded], key: Callable[[Graded], str]) -> dict[str, list[Graded]]:
    groups: dict[str, list[Graded]] = defaultdict(list)
    for each in graded:
        groups[key(each)].append(each)
    return dict(sorted(groups.items()))


def _domains(graded: Sequence[Graded]) -> Iterator[tuple[str, Sequence[Graded]]]:
    """Yield the results of each domain, and then those of all."""
    yield from _groups(graded, lambda each: each.sample.domain).items()
    yield ALL, graded


def _modes(graded: Sequence[Graded]) -> Iterator[tuple[Mode, list[Graded]]]:
    for mode in MODES:
        if group := [each for each in graded if each.result.mode == mode]:
            yield mode, group


def _answered(graded: Sequence[Graded]) -> list[Graded]:
    return [each for each in graded if each.result.status == "answered"]


def _scores(graded: Sequence[Graded], mode: str) -> Mapping[str, Fraction]:
    """Return the mean score of each problem that has a grade, by the sample's id."""
    scores: dict[str, list[Fraction]] = defaultdict(list)
    for each in graded:
        if each.result.mode == mode and each.grade is not None:
            scores[each.sample.id].append(each.grade.score)
    return {sample: Fraction(sum(found), len(found)) for sample, found in sorted(scores.items())}


def _percent(values: Sequence[Fraction], sign: str = "") -> str:
    """Return the mean and its interval in percent, such as `50.0 [25.0, 75.0]`."""
    if not values:
        return NONE
    interval = bootstrap_interval(values)
    text = f"{100 * mean(values):{sign}.1f}"
    if interval is None:
        return text
    low, high = interval
    return f"{text} [{100 * low:{sign}.1f}, {100 * high:{sign}.1f}]"


def _share(scores: Sequence[Fraction]) -> str:
    """Return the mean in percent."""
    return f"{100 * mean(scores):.1f}" if scores else NONE


def _loose_scores(graded: Sequence[Graded]) -> list[Fraction]:
    grades = [each.grade for each in graded if each.grade]
    return [Fraction(grade.loose) for grade in grades if grade.loose is not None]


def _p_value(differences: Sequence[Fraction]) -> str:
    if not differences:
        return NONE
    value = paired_p_value(differences)
    return f"{value:.4f}" if value >= 0.0001 else "< 0.0001"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _number(value: float, digits: int = 0) -> str:
    return f"{value:,.{digits}f}" if value else NONE


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name or 'none'} {counts[name]}" for name in sorted(counts)) or NONE


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(_escaped(line))} |\n" for line in lines)


def _escaped(cells: Sequence[str]) -> list[str]:
    return [" ".join(cell.split()).replace("|", "\\|") for cell in cells]
