"""Compares several evaluations of the same suites: other models, or a model before and after a
change."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from evaluation.grading import Graded
from evaluation.journal import ResultsError
from evaluation.measures import (
    ALL,
    Evaluation,
    answered,
    average,
    difference,
    domains,
    runs_of,
    scores,
)
from evaluation.report import NONE, Section, judges, number, p_note, p_text, percent, render_section
from evaluation.results import MODES, Mode, read_run
from evaluation.statistics import Estimate

MAX_COMPARED = 50
"""Maximum number of models in all directories."""


@dataclass(frozen=True, slots=True)
class Compared:
    """The results of one model in one directory."""

    label: str
    """A capital letter or, after 26 of them, a number."""
    evaluation: Evaluation
    model: str
    by_domain: dict[str, Sequence[Graded]]

    def accuracy(self, domain: str, mode: Mode) -> Estimate | None:
        """Return the accuracy in a domain and a mode; None without grades."""
        for each in self.evaluation.accuracies[self.model]:
            if each.domain == domain:
                return each.plain if mode == "plain" else each.sandbox
        return None

    def of(self, domain: str, mode: Mode) -> list[Graded]:
        """Return the results in a domain and a mode."""
        found = self.by_domain.get(domain, ())
        return [each for each in found if each.result.mode == mode]


def check_suites(directories: Sequence[Path]) -> None:
    """Raise ResultsError if the evaluations do not have the same suites."""
    first, *others = directories
    expected = read_run(first).settings.suites
    for directory in others:
        found = read_run(directory).settings.suites
        for name in sorted({*expected, *found}):
            if found.get(name) != expected.get(name):
                hashes = (each.get(name) for each in (expected, found))
                ours, theirs = (digest[:12] if digest else "is missing" for digest in hashes)
                raise ResultsError(
                    f"The suites differ: {name} is {ours} in {first}, and {theirs} in {directory}."
                    " Compare evaluations of the same suites."
                )


def render(evaluations: Sequence[Evaluation]) -> str:
    """Return the comparison in Markdown. The first model of the first directory is the baseline.

    Raises ResultsError if an evaluation has no results, or if there are more than MAX_COMPARED
    models.
    """
    compared = _compared(evaluations)
    names = {
        domain: None for each in compared for domain in sorted(each.by_domain) if domain != ALL
    }
    order = [*sorted(names), ALL]
    sections = [
        *(_accuracy(compared, order, mode) for mode in MODES),
        _costs(compared, order),
    ]
    texts = [render_section(section, "##") for section in (_legend(compared), *sections)]
    return "\n".join(["# Comparison of evaluations\n", *texts])


def _compared(evaluations: Sequence[Evaluation]) -> list[Compared]:
    found: list[Compared] = []
    for evaluation in evaluations:
        if not evaluation.models:
            raise ResultsError(f"{evaluation.directory}: there are no results to compare.")
        for model in evaluation.models:
            label = chr(ord("A") + len(found)) if len(found) < 26 else str(len(found) + 1)
            by_domain = dict(domains(evaluation.of_model(model)))
            found.append(Compared(label, evaluation, model, by_domain))
    if len(found) > MAX_COMPARED:
        raise ResultsError(f"{len(found)} models are too many to compare (at most {MAX_COMPARED}).")
    return found


def _legend(compared: Sequence[Compared]) -> Section:
    rows = []
    for each in compared:
        settings = each.evaluation.info.settings
        objects = [f"`{json.dumps(value)}`" for value in (settings.sandbox, settings.request)]
        seed = NONE if settings.seed is None else str(settings.seed)
        where = str(each.evaluation.directory)
        proxy = each.evaluation.info.versions.get("llm-sandbox-proxy", NONE)
        rows.append([each.label, each.model, where, *objects, seed, proxy])
    head = ["", "model", "directory", "sandbox", "request", "seed", "version"]
    graded = [found for each in compared for found in each.evaluation.graded]
    note = f"Differences are to A. Judge: {judges(graded)}."
    return Section("Evaluations", head, rows, note)


def _accuracy(compared: Sequence[Compared], order: Sequence[str], mode: Mode) -> Section:
    rows, p_values = [], []
    for domain, each in _pairs(compared, order):
        values = scores(each.of(domain, mode), mode)
        row = [domain, each.label, percent(each.accuracy(domain, mode))]
        baseline = scores(compared[0].of(domain, mode), mode)
        found = difference(baseline, values) if each is not compared[0] else None
        if found:
            count = str(found.estimate.count)
            row += [percent(found.estimate, sign="+"), count, p_text(found.p_value)]
            p_values.append(found.p_value)
        else:
            row += [NONE, NONE, NONE]
        rows.append(row)
    note = (
        "Accuracy in percent, with the 95 % interval of a bootstrap over problems. The difference"
        " and p (exact sign-flip test) are over the pairs: the problems with a grade in both."
    )
    head = ["domain", "", "accuracy", "difference", "pairs", "p"]
    return Section(f"Accuracy: {mode}", head, rows, note + p_note(p_values))


def _costs(compared: Sequence[Compared], order: Sequence[str]) -> Section:
    rows = []
    for domain, each in _pairs(compared, order):
        plain, sandbox = (answered(each.of(domain, mode)) for mode in MODES)
        runs = runs_of(sandbox)
        means = [average([_tokens(graded) for graded in group]) for group in (plain, sandbox)]
        trajectory = average([run.trajectory_tokens for run in runs])
        turns = average([run.turns for run in runs])
        infra_errors = sum(
            graded.result.status == "infra_error" for graded in each.by_domain.get(domain, ())
        )
        rows.append(
            [
                *(domain, each.label, *map(number, [*means, trajectory])),
                *(number(turns, 1), str(infra_errors)),
            ]
        )
    head = ["domain", "", "plain: tokens", "sandbox: tokens", "trajectory", "turns"]
    note = (
        "Means of an answer. Tokens are prompt and completion of all model calls; the trajectory"
        " counts each token once. Infrastructure errors are counts, and no part of the accuracy."
    )
    return Section("Tokens and turns", [*head, "infra errors"], rows, note)


def _tokens(graded: Graded) -> int:
    return graded.result.prompt_tokens + graded.result.completion_tokens


def _pairs(compared: Sequence[Compared], order: Sequence[str]) -> Iterator[tuple[str, Compared]]:
    """Yield each domain with each model."""
    for domain in order:
        for each in compared:
            yield domain, each
