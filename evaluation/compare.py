"""Compares several evaluations of the same suites, such as those of different models, or of one
model before and after a change."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from evaluation.grading import GradedResult
from evaluation.journal import ResultsError
from evaluation.measures import (
    ALL_DOMAINS,
    Evaluation,
    answered_results,
    difference,
    mean_or_zero,
    mean_scores_by_sample,
    results_by_domain,
    sandbox_uses,
)
from evaluation.report import (
    EMPTY_CELL,
    Section,
    grader_text,
    judge_names,
    number_text,
    p_value_note,
    p_value_text,
    percent_text,
    render_section,
)
from evaluation.results import MODES, Mode, read_run_info
from evaluation.statistics import Estimate

MAX_MODELS = 50
"""Maximum number of models in all directories together."""


@dataclass(frozen=True, slots=True)
class ComparedModel:
    """The results of one model in one directory."""

    label: str
    """A letter from A to Z; a number from the 27th model on."""
    evaluation: Evaluation
    model: str
    by_domain: dict[str, Sequence[GradedResult]]

    def accuracy(self, domain: str, mode: Mode) -> Estimate | None:
        """Return the accuracy in a domain and a mode; None without grades."""
        for each in self.evaluation.accuracies[self.model]:
            if each.domain == domain:
                return each.plain if mode == "plain" else each.sandbox
        return None

    def results_of(self, domain: str, mode: Mode) -> list[GradedResult]:
        """Return the results in a domain and a mode."""
        found = self.by_domain.get(domain, ())
        return [each for each in found if each.result.mode == mode]


def check_same_suites(directories: Sequence[Path]) -> None:
    """Raise ResultsError if the evaluations do not have the same suites."""
    first, *others = directories
    expected = read_run_info(first).settings.suites
    for directory in others:
        found = read_run_info(directory).settings.suites
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

    Raises ResultsError if an evaluation has no results, or if there are more than MAX_MODELS
    models.
    """
    models = _compared_models(evaluations)
    names = {
        domain: None
        for each in models
        for domain in sorted(each.by_domain)
        if domain != ALL_DOMAINS
    }
    domain_order = [*sorted(names), ALL_DOMAINS]
    sections = [
        *(_accuracy_section(models, domain_order, mode) for mode in MODES),
        _cost_section(models, domain_order),
    ]
    texts = [render_section(section, "##") for section in (_legend(models), *sections)]
    return "\n".join(["# Comparison of evaluations\n", *texts])


def _compared_models(evaluations: Sequence[Evaluation]) -> list[ComparedModel]:
    found: list[ComparedModel] = []
    for evaluation in evaluations:
        if not evaluation.models:
            raise ResultsError(f"{evaluation.directory}: there are no results to compare.")
        for model in evaluation.models:
            label = chr(ord("A") + len(found)) if len(found) < 26 else str(len(found) + 1)
            by_domain = dict(results_by_domain(evaluation.results_of_model(model)))
            found.append(ComparedModel(label, evaluation, model, by_domain))
    if len(found) > MAX_MODELS:
        raise ResultsError(f"{len(found)} models are too many to compare (at most {MAX_MODELS}).")
    return found


def _legend(models: Sequence[ComparedModel]) -> Section:
    rows = []
    for each in models:
        settings = each.evaluation.info.settings
        objects = [f"`{json.dumps(value)}`" for value in (settings.sandbox, settings.request)]
        seed = EMPTY_CELL if settings.seed is None else str(settings.seed)
        where = str(each.evaluation.directory)
        proxy = each.evaluation.info.versions.get("llm-sandbox-proxy", EMPTY_CELL)
        rows.append([each.label, each.model, where, *objects, seed, proxy])
    head = ["", "model", "directory", "sandbox", "request", "seed", "version"]
    graded = [found for each in models for found in each.evaluation.graded]
    graders = grader_text(models[0].evaluation.graders, graded)
    note = f"Differences are to A. Graders: {graders}. Judge: {judge_names(graded)}."
    return Section("Evaluations", head, rows, note)


def _accuracy_section(
    models: Sequence[ComparedModel], domain_order: Sequence[str], mode: Mode
) -> Section:
    rows, p_values = [], []
    for domain, each in _domain_model_pairs(models, domain_order):
        values = mean_scores_by_sample(each.results_of(domain, mode), mode)
        row = [domain, each.label, percent_text(each.accuracy(domain, mode))]
        baseline = mean_scores_by_sample(models[0].results_of(domain, mode), mode)
        found = difference(baseline, values) if each is not models[0] else None
        if found:
            count = str(found.estimate.count)
            row += [percent_text(found.estimate, sign="+"), count, p_value_text(found.p_value)]
            p_values.append(found.p_value)
        else:
            row += [EMPTY_CELL, EMPTY_CELL, EMPTY_CELL]
        rows.append(row)
    note = (
        "Accuracy in percent, with the 95 % interval of a bootstrap over problems. The difference"
        " and p (exact sign-flip test) are over the pairs: the problems with a grade in both."
    )
    head = ["domain", "", "accuracy", "difference", "pairs", "p"]
    return Section(f"Accuracy: {mode}", head, rows, note + p_value_note(p_values))


def _cost_section(models: Sequence[ComparedModel], domain_order: Sequence[str]) -> Section:
    rows = []
    for domain, each in _domain_model_pairs(models, domain_order):
        plain, sandbox = (answered_results(each.results_of(domain, mode)) for mode in MODES)
        runs = sandbox_uses(sandbox)
        means = [
            mean_or_zero([_token_count(graded) for graded in group]) for group in (plain, sandbox)
        ]
        trajectory = mean_or_zero([run.trajectory_tokens for run in runs])
        turns = mean_or_zero([run.turns for run in runs])
        infra_errors = sum(
            graded.result.status == "infra_error" for graded in each.by_domain.get(domain, ())
        )
        rows.append(
            [
                *(domain, each.label, *map(number_text, [*means, trajectory])),
                *(number_text(turns, 1), str(infra_errors)),
            ]
        )
    head = ["domain", "", "plain: tokens", "sandbox: tokens", "trajectory", "turns"]
    note = (
        "Means of an answer. Tokens are prompt and completion of all model calls; the trajectory"
        " counts each token once. Infrastructure errors are counts, and no part of the accuracy."
    )
    return Section("Tokens and turns", [*head, "infra errors"], rows, note)


def _token_count(graded: GradedResult) -> int:
    return graded.result.prompt_tokens + graded.result.completion_tokens


def _domain_model_pairs(
    models: Sequence[ComparedModel], domain_order: Sequence[str]
) -> Iterator[tuple[str, ComparedModel]]:
    """Yield all pairs of a domain and a model, domain by domain."""
    for domain in domain_order:
        for each in models:
            yield domain, each
