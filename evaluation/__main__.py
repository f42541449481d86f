"""The command `sandbox-eval`, also `python -m evaluation`."""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evaluation.measures import Evaluation
    from evaluation.samples import Suite

DATA_DIRECTORY = Path("evaluation-data")
GENERATED = ("synthetic", "reasoning-gym")
PAPER = ("aime25", "ugphysics", "chembench4k", "medxpertqa", "aa-lcr", "ifbench")
DEFAULT_COUNT = 24
"""Default number of problems of a domain, divisible by the number of kinds of each domain."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    0: success. 1: an error, or a self-check whose results are not the known ones. 3: some requests
    have no answer because of infrastructure errors, or the judge gave no verdict on some answers.
    130: Ctrl-C. Wrong arguments raise SystemExit with the code 2.
    """
    parsed = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = parsed.command
    try:
        return command(parsed)
    except KeyboardInterrupt:
        print("Interrupted. The same command continues.", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        message = f"the package {error.name} is not installed: install the extra `evaluation`"
        print(f"sandbox-eval: {message}", file=sys.stderr)
        return 1
    except Exception as error:
        # --help must be quick, so the modules with these errors are imported by the commands.
        from evaluation.journal import ResultsError
        from evaluation.runner import RunError
        from evaluation.samples import SuiteError

        if not isinstance(error, SuiteError | ResultsError | RunError):
            raise
        print(f"sandbox-eval: {error}", file=sys.stderr)
        return 1


def _prepare(arguments: argparse.Namespace) -> int:
    from evaluation.samples import SuiteError

    names = arguments.suites or GENERATED
    if unknown := set(names) - {*GENERATED, *PAPER}:
        known = ", ".join((*GENERATED, *PAPER))
        raise SuiteError(f"no such suite: {', '.join(sorted(unknown))} (use {known})")
    if arguments.origin is not None and (len(names) > 1 or names[0] in GENERATED):
        raise SuiteError(f"--from needs the name of one suite of {', '.join(PAPER)}")
    for name in names:
        suite = _convert(name, arguments) if name in PAPER else _generate(name, arguments)
        print(f"{suite.directory}: {suite.manifest.count} samples", file=sys.stderr)
    return 0


def _generate(name: str, arguments: argparse.Namespace) -> "Suite":
    from evaluation import reasoning_gym_suite, synthetic
    from evaluation.samples import write_suite

    suite = synthetic if name == "synthetic" else reasoning_gym_suite
    return write_suite(
        arguments.data / name,
        name,
        suite.generate(arguments.seed, arguments.count),
        licence=suite.LICENCE,
        source=f"{suite.suite_origin()}, seed {arguments.seed}",
    )


def _convert(name: str, arguments: argparse.Namespace) -> "Suite":
    from evaluation.paper_suites import PAPER_SUITES, convert_suite
    from evaluation.samples import write_suite

    suite = PAPER_SUITES[name]
    converted = convert_suite(name, arguments.origin, arguments.seed)
    for note in converted.notes:
        print(note, file=sys.stderr)
    return write_suite(
        arguments.data / name,
        name,
        converted.drafts,
        licence=suite.licence,
        source=converted.source,
        protocol=suite.protocol,
    )


def _run(arguments: argparse.Namespace) -> int:
    import aiohttp

    from evaluation.http_client import HTTPClient
    from evaluation.progress import ProgressBar
    from evaluation.results import RunInfo, RunSettings, open_results
    from evaluation.runner import Plan, Runner
    from evaluation.samples import load_suites, prepared_suite_names

    suites = load_suites(arguments.data, arguments.suites or prepared_suite_names(arguments.data))
    plan = Plan(
        suites=suites,
        models=arguments.models,
        modes=arguments.modes,
        repeats=arguments.repeats,
        limit=arguments.limit,
        sandbox=arguments.sandbox,
        request=arguments.request,
        seed=arguments.seed,
        max_retries=arguments.max_retries,
        capture_turns=arguments.capture,
    )
    settings = RunSettings(
        suites={suite.manifest.name: suite.manifest.sha256 for suite in suites},
        sandbox=arguments.sandbox,
        request=arguments.request,
        protocols={
            suite.manifest.name: suite.manifest.protocol.changed_settings() for suite in suites
        },
        seed=arguments.seed,
    )
    versions = {"llm-sandbox-proxy": version("llm-sandbox-proxy"), "aiohttp": aiohttp.__version__}
    data = str(arguments.data.resolve())
    info = RunInfo(
        settings=settings, data=data, concurrency=arguments.concurrency, versions=versions
    )

    async def run() -> None:
        key = os.environ.get(arguments.api_key_env) or "none"
        async with HTTPClient(arguments.base_url, key, arguments.timeout_s) as client:
            runner = Runner(client, plan, writer, progress.add, arguments.concurrency)
            await runner.check_models()
            await runner.run()

    with open_results(arguments.output, info) as writer:
        keys = {request.key for request in plan.planned_requests()}
        with ProgressBar(len(keys), len(keys & writer.done_keys), arguments.price) as progress:
            asyncio.run(run())
        left = len(keys - writer.done_keys)
    if left:
        print(
            f"{left} requests have no answer because of infrastructure errors. The same command"
            " sends them again.",
            file=sys.stderr,
        )
    return 3 if left else 0


def _report(arguments: argparse.Namespace) -> int:
    from evaluation.grading import write_grades
    from evaluation.html_report import write_html
    from evaluation.report import render
    from evaluation.results import REPORT_FILE

    evaluation = _load_evaluation(arguments.output, arguments)
    write_grades(arguments.output, evaluation.graded)
    text = render(evaluation)
    (arguments.output / REPORT_FILE).write_text(text, encoding="utf-8")
    print(text)
    written = write_html(evaluation)
    print(f"{written.path}: {written.summary}", file=sys.stderr)
    return _exit_code([evaluation])


def _compare(arguments: argparse.Namespace) -> int:
    from evaluation.compare import check_same_suites, render
    from evaluation.journal import ResultsError

    if len(set(arguments.outputs)) != len(arguments.outputs) or len(arguments.outputs) < 2:
        raise ResultsError("compare needs two or more different directories")
    check_same_suites(arguments.outputs)
    evaluations = [_load_evaluation(output, arguments) for output in arguments.outputs]
    text = render(evaluations)
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")
    print(text)
    return _exit_code(evaluations)


def _exit_code(evaluations: "Sequence[Evaluation]") -> int:
    """Return 3 and print a message if the judge gave no verdict on some answers, else 0."""
    graded = [each for evaluation in evaluations for each in evaluation.graded]
    if failed := sum(each.has_judge_failure for each in graded):
        print(
            f"The judge gave no verdict on {failed} answers. The same command asks again.",
            file=sys.stderr,
        )
    return 3 if failed else 0


def _load_evaluation(output: Path, arguments: argparse.Namespace) -> "Evaluation":
    """Return the evaluation in `output`, graded. The judge's verdicts are written to `output`."""
    from evaluation.grading import ResultGrader
    from evaluation.journal import ResultsError
    from evaluation.judge import Judge
    from evaluation.measures import evaluation_of
    from evaluation.results import read_results, read_run_info
    from evaluation.samples import load_suites

    info = read_run_info(output)
    suites = load_suites(arguments.data or Path(info.data), list(info.settings.suites))
    for suite in suites:
        if suite.manifest.sha256 != info.settings.suites[suite.manifest.name]:
            raise ResultsError(
                f"{suite.directory}: not the suite of {output}, which has the hash"
                f" {info.settings.suites[suite.manifest.name]}."
            )
    judge = arguments.judge_model and Judge(
        model=arguments.judge_model,
        base_url=arguments.judge_base_url,
        api_key=os.environ.get(arguments.judge_api_key_env) or "none",
        votes=arguments.judge_votes,
    )
    grading = ResultGrader(output, arguments.grader, judge)
    graded = grading.grade_results(suites, read_results(output))
    return evaluation_of(output, info, suites, arguments.grader, graded)


def _self_check(arguments: argparse.Namespace) -> int:
    from evaluation.self_check import check

    return check(arguments.output)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sandbox-eval", description="Compare a model with and without a sandbox."
    )
    commands = parser.add_subparsers(required=True, metavar="command")

    sub = commands.add_parser("prepare", help="generate or convert suites of problems")
    sub.set_defaults(command=_prepare)
    sub.add_argument(
        "suites",
        nargs="*",
        metavar="SUITE",
        help=f"generated: {' '.join(GENERATED)} (default); converted: {' '.join(PAPER)}",
    )
    sub.add_argument(
        "--from",
        dest="origin",
        metavar="SOURCE",
        help="the data of a converted suite: a file, a directory, a wheel, or hf:OWNER/NAME;"
        " default: the installed package that contains it",
    )
    sub.add_argument("--data", type=Path, default=DATA_DIRECTORY, help="directory of the suites")
    sub.add_argument("--seed", type=int, default=0, help="seed of the problems and of the draw")
    sub.add_argument(
        "--count",
        type=_positive_int,
        default=DEFAULT_COUNT,
        help="problems of each domain of a generated suite",
    )

    sub = commands.add_parser("run", help="send the problems; the same command continues")
    sub.set_defaults(command=_run)
    sub.add_argument("--output", type=Path, required=True, help="directory of the results")
    sub.add_argument("--models", nargs="+", required=True, metavar="MODEL")
    sub.add_argument("--base-url", default="http://127.0.0.1:8080/v1", help="the proxy, up to /v1")
    sub.add_argument(
        "--api-key-env",
        default="OPENAI_API_KEY",
        metavar="NAME",
        help="environment variable with the proxy's key",
    )
    sub.add_argument("--data", type=Path, default=DATA_DIRECTORY, help="directory of the suites")
    sub.add_argument(
        "--suites", nargs="+", metavar="SUITE", help="default: all prepared suites in --data"
    )
    modes = ["plain", "sandbox"]
    sub.add_argument("--modes", nargs="+", default=modes, choices=modes)
    sub.add_argument(
        "--repeats",
        type=_positive_int,
        help="requests for each problem; default: the suite's protocol",
    )
    sub.add_argument(
        "--limit",
        type=_positive_int,
        help="problems of each domain, its kinds in turn; default: all",
    )
    sub.add_argument("--concurrency", type=_positive_int, default=8, help="requests at a time")
    sub.add_argument("--seed", type=int, help="seed to send; each repeat adds 1; default: none")
    sub.add_argument("--max-retries", type=int, default=3, help="retries of one request")
    sub.add_argument("--timeout-s", type=float, default=3600.0, help="timeout of one attempt")
    sub.add_argument(
        "--sandbox",
        type=_json_object,
        default={},
        metavar="JSON",
        help='fields of the sandbox object, such as \'{"profile": "paper"}\'; they replace those of'
        " the suite's protocol",
    )
    sub.add_argument(
        "--request",
        type=_json_object,
        default={},
        metavar="JSON",
        help="fields of all requests, such as '{\"temperature\": 0.7}'; they replace those of the"
        " suite's protocol",
    )
    sub.add_argument(
        "--capture",
        action="store_true",
        help="keep the turns of each run with a sandbox, for the viewer of report.html",
    )
    sub.add_argument(
        "--price",
        type=_model_price,
        action=_AddPrice,
        default={},
        metavar="MODEL=PROMPT,COMPLETION",
        help="US dollars for a million tokens; may be repeated",
    )

    sub = commands.add_parser("report", help="grade the answers, write report.md and .html")
    sub.set_defaults(command=_report)
    sub.add_argument("output", type=Path, help="directory of the results")
    sub.add_argument("--data", type=Path, help="directory of the suites; default: that of the run")
    _add_grader_options(sub)

    sub = commands.add_parser("compare", help="compare the results of several evaluations")
    sub.set_defaults(command=_compare)
    sub.add_argument(
        "outputs", type=Path, nargs="+", metavar="DIRECTORY", help="directory of the results"
    )
    sub.add_argument(
        "--data", type=Path, help="directory of the suites; default: those of the runs"
    )
    sub.add_argument("--output", type=Path, metavar="FILE", help="also write the comparison there")
    _add_grader_options(sub)

    sub = commands.add_parser(
        "self-check", help="evaluate a scripted model, and compare with its known results"
    )
    sub.set_defaults(command=_self_check)
    sub.add_argument("--output", type=Path, required=True, help="new directory of the results")
    return parser


def _add_grader_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--grader",
        default="strict",
        choices=["strict", "reference", "both"],
        help="strict: ours. reference: those of the package llm-in-sandbox. both: side by side",
    )
    sub.add_argument("--judge-model", metavar="MODEL", help="the judge of physics and long-context")
    sub.add_argument(
        "--judge-base-url",
        default="http://127.0.0.1:8080/v1",
        metavar="URL",
        help="the judge's server, up to /v1",
    )
    sub.add_argument(
        "--judge-api-key-env",
        default="OPENAI_API_KEY",
        metavar="NAME",
        help="environment variable with the key of the judge's server",
    )
    sub.add_argument(
        "--judge-votes", type=_positive_int, default=4, metavar="N", help="verdicts on each answer"
    )


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1 (got {value})")
    return value


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value


def _model_price(text: str) -> tuple[str, tuple[float, float]]:
    model, _, prices = text.rpartition("=")
    try:
        prompt, completion = map(float, prices.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError("not of the form MODEL=PROMPT,COMPLETION") from error
    return model, (prompt, completion)


class _AddPrice(argparse.Action):
    """Collects the prices of all `--price` options in one dictionary."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        model, price = values
        before: Mapping[str, Any] = getattr(namespace, self.dest)
        setattr(namespace, self.dest, {**before, model: price})


if __name__ == "__main__":
    sys.exit(main())
