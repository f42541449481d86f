"""The numbers of an evaluation by domain: accuracy, tokens, turns, capabilities and speed.

The reports, the charts and the comparison show these numbers.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from fractions import Fraction
from pathlib import Path

from evaluation.grading import GradedResult, Graders
from evaluation.results import MODES, Mode, RequestKey, Result, RunInfo, SandboxUse, Trajectories
from evaluation.samples import Suite
from evaluation.statistics import Estimate, PValue, estimate, paired_p_value, percentile
from evaluation.trajectories import PatternCounts, TurnCounts, count_patterns

ALL_DOMAINS = "all domains"
CAPABILITIES = ("computation", "external_resources", "file_management")
"""The paper's meta-capabilities, as the proxy names them."""
MAX_PAUSE_SHARE = 0.1
"""Maximum share of a mode's time without a running request. Beyond it, no speed is measured."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A graded evaluation."""

    directory: Path
    info: RunInfo
    suites: Sequence[Suite]
    graders: Graders
    graded: Sequence[GradedResult]
    trajectories: Trajectories
    patterns: Mapping[RequestKey, PatternCounts]
    """The counts of patterns in each answer that has a trajectory, by the key of its result."""
    accuracies: Mapping[str, Sequence["Accuracy"]]
    """The accuracy of each model in each domain, and in all domains together."""

    def results_of_model(self, model: str) -> list[GradedResult]:
        """Return the results of a model."""
        return [each for each in self.graded if each.result.model == model]

    @property
    def models(self) -> list[str]:
        """The names of the models, sorted."""
        return sorted({each.result.model for each in self.graded})


def evaluation_of(
    directory: Path,
    info: RunInfo,
    suites: Sequence[Suite],
    graders: Graders,
    graded: Sequence[GradedResult],
) -> Evaluation:
    """Return the evaluation of graded results, with the pattern counts of the trajectories in the
    directory, and with the accuracies. The intervals of the accuracies take seconds to compute."""
    trajectories = Trajectories(directory)
    patterns = {}
    for each in graded:
        if trajectory := trajectories.get(each.result):
            patterns[each.result.key] = count_patterns(each.result, trajectory)
    by_model = results_by_key(graded, lambda each: each.result.model)
    found = {model: accuracies(of_model) for model, of_model in by_model.items()}
    return Evaluation(directory, info, suites, graders, graded, trajectories, patterns, found)


# Groups


def results_by_key(
    graded: Sequence[GradedResult], key: Callable[[GradedResult], str]
) -> dict[str, list[GradedResult]]:
    """Return the results grouped by the value of `key`, with these values sorted."""
    found: dict[str, list[GradedResult]] = defaultdict(list)
    for each in graded:
        found[key(each)].append(each)
    return dict(sorted(found.items()))


def results_by_domain(
    graded: Sequence[GradedResult],
) -> Iterator[tuple[str, Sequence[GradedResult]]]:
    """Yield each domain with its results, and last ALL_DOMAINS with the results of all domains."""
    yield from results_by_key(graded, lambda each: each.sample.domain).items()
    yield ALL_DOMAINS, graded


def results_by_mode(graded: Sequence[GradedResult]) -> Iterator[tuple[Mode, list[GradedResult]]]:
    """Yield each mode that has results, with its results."""
    for mode in MODES:
        if group := [each for each in graded if each.result.mode == mode]:
            yield mode, group


def answered_results(graded: Sequence[GradedResult]) -> list[GradedResult]:
    """Return the results that have an answer."""
    return [each for each in graded if each.result.status == "answered"]


def mean_or_zero(values: Sequence[float]) -> float:
    """Return the mean, or 0 without values."""
    return sum(values) / len(values) if values else 0.0


# Accuracy


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference between two accuracies, over the problems that have a grade for both."""

    estimate: Estimate
    p_value: PValue


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The accuracy of both modes in a domain, from 0 to 1, and their difference. A field is None if
    no problem has the grades for it."""

    domain: str
    plain: Estimate | None
    sandbox: Estimate | None
    difference: Difference | None


def accuracies(graded: Sequence[GradedResult]) -> list[Accuracy]:
    """Return the accuracy in each domain, and in all domains together."""
    found = []
    for domain, of_domain in results_by_domain(graded):
        plain, sandbox = (mean_scores_by_sample(of_domain, mode) for mode in MODES)
        found.append(
            Accuracy(
                domain,
                estimate(list(plain.values())),
                estimate(list(sandbox.values())),
                difference(plain, sandbox),
            )
        )
    return found


def mean_scores_by_sample(graded: Sequence[GradedResult], mode: Mode) -> Mapping[str, Fraction]:
    """Return the mean score of each graded problem in a mode, by the id of its sample."""
    found: dict[str, list[Fraction]] = defaultdict(list)
    for each in graded:
        if each.result.mode == mode and each.grade is not None:
            found[each.sample.id].append(Fraction(each.grade.score))
    return {sample: sum(of, Fraction(0)) / len(of) for sample, of in sorted(found.items())}


def difference(before: Mapping[str, Fraction], after: Mapping[str, Fraction]) -> Difference | None:
    """Return the difference `after` - `before` over the shared problems; None if there are none."""
    values = [after[sample] - before[sample] for sample in sorted(before.keys() & after)]
    found = estimate(values)
    return Difference(found, paired_p_value(values)) if found else None


# Pairs


@dataclass(frozen=True, slots=True)
class AnswerPairs:
    """The answers of both modes to the same problems and repeats. Answers with the same index
    belong together."""

    plain: Sequence[GradedResult]
    sandbox: Sequence[GradedResult]
    left_out: int
    """The number of pairs that are left out because one of the two results has no answer, such as
    pairs whose plain prompt exceeds the context window."""


def answer_pairs(graded: Sequence[GradedResult]) -> AnswerPairs:
    """Return the pairs of one model's answers."""
    plain, sandbox = (
        {(each.sample.id, each.result.repeat): each for each in graded if each.result.mode == mode}
        for mode in MODES
    )
    shared = sorted(plain.keys() & sandbox)
    kept = [key for key in shared if len(answered_results([plain[key], sandbox[key]])) == 2]
    return AnswerPairs(
        [plain[key] for key in kept], [sandbox[key] for key in kept], len(shared) - len(kept)
    )


# Tokens


@dataclass(frozen=True, slots=True)
class TokenUse:
    """Mean tokens of an answer in a domain; 0 where there are no answers."""

    domain: str
    mean_plain_prompt_tokens: float
    mean_plain_completion_tokens: float
    mean_sandbox_prompt_tokens: float
    """The prompt tokens of all model calls of a run together."""
    mean_sandbox_completion_tokens: float
    mean_trajectory_tokens: float
    """The tokens of a run, each counted once."""
    mean_first_prompt_tokens: float
    """The part of the trajectory that neither the model nor a tool wrote."""
    mean_model_output_tokens: float
    """The part of the trajectory that the model wrote."""
    mean_environment_tokens: float
    """The part of the trajectory that is output of tools."""
    pairs: int
    left_out: int
    ratio: float | None
    """The tokens of the trajectories divided by those of the plain mode, over the pairs."""


def token_uses(graded: Sequence[GradedResult]) -> list[TokenUse]:
    """Return the tokens of one model's answers, in each domain and in all domains together."""
    return [_token_use(domain, of_domain) for domain, of_domain in results_by_domain(graded)]


def _token_use(domain: str, graded: Sequence[GradedResult]) -> TokenUse:
    plain = [each.result for each in answered_results(graded) if each.result.mode == "plain"]
    sandbox = [each.result for each in answered_results(graded) if each.result.mode == "sandbox"]
    runs = sandbox_uses(answered_results(graded))
    paired = answer_pairs(graded)
    trajectory = mean_or_zero([run.trajectory_tokens for run in runs])
    environment = mean_or_zero([run.observation_tokens for run in runs])
    completion = mean_or_zero([each.completion_tokens for each in sandbox])
    model = min(completion, trajectory - environment)
    return TokenUse(
        domain,
        mean_plain_prompt_tokens=mean_or_zero([each.prompt_tokens for each in plain]),
        mean_plain_completion_tokens=mean_or_zero([each.completion_tokens for each in plain]),
        mean_sandbox_prompt_tokens=mean_or_zero([each.prompt_tokens for each in sandbox]),
        mean_sandbox_completion_tokens=completion,
        mean_trajectory_tokens=trajectory,
        mean_first_prompt_tokens=max(0.0, trajectory - environment - model),
        mean_model_output_tokens=model,
        mean_environment_tokens=environment,
        pairs=len(paired.plain),
        left_out=paired.left_out,
        ratio=_ratio(
            [run.trajectory_tokens for run in sandbox_uses(paired.sandbox)],
            [_token_count(each) for each in paired.plain],
        ),
    )


def _ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float | None:
    """Return the ratio of two sums, or None if one of them is 0."""
    numerator, denominator = sum(numerators), sum(denominators)
    return numerator / denominator if numerator and denominator else None


def _token_count(graded: GradedResult) -> int:
    return graded.result.prompt_tokens + graded.result.completion_tokens


# Turns, tools and capabilities


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The turns and tool calls of the runs in a domain."""

    domain: str
    runs: int
    turn_counts: Sequence[int]
    """The number of turns of each run, sorted."""
    model_calls: float
    """The mean number of model calls of a run."""
    tool_calls: int
    failed_tool_calls: int
    capability_shares: Mapping[str, float]
    """The share of turns that used a capability, by the proxy's classification."""
    idle_share: float
    """The share of turns without a submission and without a capability. It is a lower bound where
    the turns were not captured, because a turn with several capabilities is subtracted once for
    each capability."""
    pattern_shares: Mapping[str, float]
    """The share of turns with a tool call that matches TABLE15, by capability, over the runs that
    have a trajectory. In runs whose turns were not captured, each matching tool call counts as a
    turn."""
    pattern_idle_share: float | None
    """The share of turns that neither submit the answer nor have a tool call that matches TABLE15,
    over the runs that have a trajectory; None if no run has one. In runs whose turns were not
    captured it is a lower bound, because each matching tool call counts as a turn of its own."""
    captured_runs: int
    """The number of runs whose turns were all captured, so that their shares are exact."""


def tool_uses(evaluation: Evaluation, graded: Sequence[GradedResult]) -> list[ToolUse]:
    """Return the use of tools in each domain that has runs, and in all domains together."""
    found = []
    for domain, of_domain in results_by_domain(answered_results(graded)):
        if runs := sandbox_uses(of_domain):
            found.append(_tool_use(evaluation, domain, of_domain, runs))
    return found


def _tool_use(
    evaluation: Evaluation, domain: str, graded: Sequence[GradedResult], runs: Sequence[SandboxUse]
) -> ToolUse:
    capability_turns, pattern_turns = Counter[str](), Counter[str]()
    idle_turns = kept_turns = pattern_idle_turns = captured_runs = 0
    for each in graded:
        run, patterns = each.result.sandbox, evaluation.patterns.get(each.result.key)
        if run is None:
            continue
        counts = _turn_counts(run, patterns)
        capability_turns.update(run.capability_turns)
        idle_turns += counts.idle
        pattern_turns.update(counts.matched)
        pattern_idle_turns += counts.unmatched
        kept_turns += run.turns if patterns else 0
        captured_runs += bool(patterns and patterns.turns)
    turns = sum(run.turns for run in runs)
    return ToolUse(
        domain,
        runs=len(runs),
        turn_counts=sorted(run.turns for run in runs),
        model_calls=mean_or_zero([run.model_calls for run in runs]),
        tool_calls=sum(run.tool_calls for run in runs),
        failed_tool_calls=sum(run.failed_tool_calls for run in runs),
        capability_shares={name: _share(capability_turns[name], turns) for name in CAPABILITIES},
        idle_share=_share(idle_turns, turns),
        pattern_shares={name: _share(pattern_turns[name], kept_turns) for name in CAPABILITIES},
        pattern_idle_share=pattern_idle_turns / kept_turns if kept_turns else None,
        captured_runs=captured_runs,
    )


def _turn_counts(run: SandboxUse, patterns: PatternCounts | None) -> TurnCounts:
    """Return the turn counts of a run. If its turns were not captured, `matched` counts tool calls
    instead of turns, and `unmatched` and `idle` are lower bounds."""
    if patterns and patterns.turns:
        return patterns.turns
    others = run.turns - (run.stop_reason == "submitted")
    idle = max(0, others - sum(run.capability_turns.values()))
    if patterns is None:
        return TurnCounts({}, 0, idle)
    return TurnCounts(patterns.calls, max(0, others - patterns.matched_calls), idle)


def sandbox_uses(graded: Sequence[GradedResult]) -> list[SandboxUse]:
    """Return the `SandboxUse` of each result that has one."""
    return [each.result.sandbox for each in graded if each.result.sandbox]


def _share(count: int, total: int) -> float:
    return count / total if total else 0.0


# Speed


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of the answers in a domain and a mode."""

    domain: str
    mode: Mode
    answers: int
    per_minute: float
    """Answers per minute: the concurrency divided by the mean latency."""
    measured_per_minute: float | None
    """Answers per minute between the first start and the last end of all requests of the mode.
    None for a single domain, because the requests of the domains take turns. Also None if no
    request ran for more than MAX_PAUSE_SHARE of that time, such as between two `sandbox-eval run`
    of one evaluation, or if the concurrency changed."""
    p50_s: float
    p95_s: float
    pairs: AnswerPairs
    """The pairs of answers in the domain, from which `ratio` is computed."""
    ratio: float | None
    """The sandbox mode's answers per minute divided by the plain mode's, over the pairs."""


def speeds(evaluation: Evaluation, graded: Sequence[GradedResult]) -> list[Speed]:
    """Return the speed of one model in each mode, by domain and for all domains together."""
    found = []
    for domain, of_domain in results_by_domain(graded):
        paired = answer_pairs(of_domain)
        ratio = _ratio(
            _latency_shares_s(evaluation, paired.plain),
            _latency_shares_s(evaluation, paired.sandbox),
        )
        for mode, group in results_by_mode(answered_results(of_domain)):
            times_s = [each.result.latency_s for each in group]
            mean_s = mean_or_zero(_latency_shares_s(evaluation, group))
            per_minute = 60 / mean_s if mean_s else 0.0
            of_mode = [each for each in of_domain if each.result.mode == mode]
            measured = _answers_per_minute(evaluation, of_mode) if domain == ALL_DOMAINS else None
            p50_s, p95_s = (percentile(times_s, share) for share in (0.5, 0.95))
            times = (per_minute, measured, p50_s, p95_s)
            found.append(Speed(domain, mode, len(group), *times, paired, ratio))
    return found


def _answers_per_minute(evaluation: Evaluation, graded: Sequence[GradedResult]) -> float | None:
    """Return the answers per minute between the first start and the last end of the requests of one
    mode; None if the requests had pauses or different concurrencies."""
    times = sorted(_start_and_end(each.result) for each in graded)
    first, last = times[0]
    pause = timedelta()
    for started, ended in times:
        pause += max(timedelta(), started - last)
        last = max(last, ended)
    minutes = (last - first) / timedelta(minutes=1)
    if not minutes or pause > MAX_PAUSE_SHARE * (last - first):
        return None
    if len({each.result.concurrency or evaluation.info.concurrency for each in graded}) > 1:
        return None
    return len(answered_results(graded)) / minutes


def _start_and_end(result: Result) -> tuple[datetime, datetime]:
    """Return the start of a request's first attempt and the end of its last one."""
    started = datetime.fromisoformat(result.started)
    first_started = datetime.fromisoformat(result.first_started or result.started)
    return first_started, started + timedelta(seconds=result.latency_s)


def _latency_shares_s(evaluation: Evaluation, graded: Sequence[GradedResult]) -> list[float]:
    """Return the latency of each request divided by its concurrency, in seconds. The concurrency
    may differ between requests, because each `sandbox-eval run` that continues an evaluation sets
    its own."""
    return [
        each.result.latency_s / (each.result.concurrency or evaluation.info.concurrency)
        for each in graded
    ]
