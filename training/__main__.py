"""The command `sandbox-train`, also `python -m training`."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from training.rewards import Attempt
    from training.rows import TaskRow, TaskSet

KINDS = ("squad", "race", "directory", "synthetic", "generic")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return the exit code: 0, 1 after an error, and 130 after Ctrl-C."""
    parsed = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], None] = parsed.command
    try:
        command(parsed)
    except KeyboardInterrupt:
        return 130
    except ModuleNotFoundError as error:
        message = f"the package {error.name} is not installed: install the extra `training`"
        print(f"sandbox-train: {message}", file=sys.stderr)
        return 1
    except ValueError as error:
        # --help must be quick, so the modules with these errors are imported by the commands.
        from evaluation.samples import SuiteError
        from training.rows import TaskError

        if not isinstance(error, SuiteError | TaskError):
            raise
        print(f"sandbox-train: {error}", file=sys.stderr)
        return 1
    return 0


def _build(arguments: argparse.Namespace) -> None:
    from training.leaks import DecontaminationFilter
    from training.rows import TaskError, write_tasks
    from training.sources import read_source
    from training.tasks import BuildOptions, build

    source = read_source(arguments.kind, arguments.source, arguments.licence, arguments.seed)
    options = BuildOptions(
        seed=arguments.seed,
        examples=arguments.examples,
        distractors=arguments.distractors,
        distractor_mode=arguments.distractor_mode,
        names=arguments.names,
        tasks_per_context=arguments.tasks_per_context,
        val_fraction=arguments.val_fraction,
        limit=arguments.limit,
    )
    path = arguments.decontaminate
    built = build(source, options, DecontaminationFilter.read(path) if path else None)
    if not any(built.rows.values()):
        reasons = ", ".join(f"{name} ({n})" for name, n in built.manifest.dropped.items())
        raise TaskError(f"{arguments.source}: every question was left out: {reasons}")
    written = write_tasks(arguments.out, built.manifest, built.rows)
    print(f"{arguments.out}: {len(written.all_rows)} tasks", file=sys.stderr)


def _stats(arguments: argparse.Namespace) -> None:
    from training.convert import describe
    from training.rows import read_tasks

    print(describe(read_tasks(arguments.tasks)), end="")


def _convert(arguments: argparse.Namespace) -> None:
    from training.convert import convert
    from training.rows import read_tasks

    tasks = read_tasks(arguments.tasks)
    count = convert(tasks, arguments.to, arguments.out, arguments.context, arguments.split)
    print(f"{arguments.out}: {count} tasks", file=sys.stderr)


def _reward(arguments: argparse.Namespace) -> None:
    from training.rewards import reward_all
    from training.rows import read_tasks

    work = list(_attempts(read_tasks(arguments.tasks), arguments.attempts))
    rewards = reward_all(
        work,
        function=arguments.function,
        needs_submit=not arguments.without_submit,
        timeout_s=arguments.timeout_s,
    )
    for (row, _), found in zip(work, rewards, strict=True):
        line = {"id": row.id, "reward": found.value, "reason": found.reason}
        line |= {"hardcoded": found.is_hardcoded, "detail": found.detail}
        print(json.dumps(line))


def _report(arguments: argparse.Namespace) -> None:
    from training.curves import bar_chart
    from training.report import chart_panels, measure, report
    from training.rows import TaskError

    before, after = measure(arguments.before), measure(arguments.after)
    if arguments.chart:
        picture = bar_chart(
            chart_panels(before, after), ("before", "after"), "Before and after training"
        )
        try:
            arguments.chart.write_text(picture, encoding="utf-8")
        except OSError as error:
            raise TaskError(f"{error.filename}: {error.strerror}") from error
    print(report(before, after), end="")


def _attempts(tasks: "TaskSet", path: Path) -> Iterator[tuple["TaskRow", "Attempt"]]:
    """Yield the attempts of a file of JSON lines, with their tasks."""
    from pydantic import ValidationError

    from evaluation.journal import first_fault
    from evaluation.row_sources import read_files
    from training.rewards import Attempt
    from training.rows import TaskError

    rows = {row.id: row for row in tasks.all_rows}
    for line in read_files(path, ()).rows:
        try:
            attempt = Attempt.model_validate(line.fields)
        except ValidationError as error:
            raise TaskError(f"{line.location}: {first_fault(error)}") from error
        if attempt.id not in rows:
            raise TaskError(f"{line.location}: id: {attempt.id} is no task of {tasks.directory}")
        yield rows[attempt.id], attempt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sandbox-train", description="Make training tasks from contexts, and reward answers."
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    tasks = commands.add_parser("tasks", help="build, describe and convert tasks")
    _add_task_commands(tasks.add_subparsers(required=True, metavar="command"))

    _add_report_command(commands)
    sub = commands.add_parser("reward", help="print the rewards of attempts as JSON lines")
    sub.set_defaults(command=_reward)
    sub.add_argument("tasks", type=Path, help="directory of the tasks")
    sub.add_argument(
        "attempts",
        type=Path,
        help="JSON lines with id, answer, submitted, sandbox_lost and commands",
    )
    sub.add_argument(
        "--function",
        metavar="package.module:function",
        help="a Python function that returns the reward of a row and an answer",
    )
    sub.add_argument(
        "--without-submit",
        action="store_true",
        help="also reward answers that were not submitted, as an evaluation does",
    )
    sub.add_argument("--timeout-s", type=_seconds, default=30.0, help="timeout of one reward")
    return parser


def _add_task_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    sub = commands.add_parser("build", help="build tasks from contexts with questions")
    sub.set_defaults(command=_build)
    sub.add_argument(
        "source",
        metavar="SOURCE",
        help="a file, a directory, a wheel or hf:OWNER/NAME; with --kind synthetic the number of"
        " contexts",
    )
    sub.add_argument("--kind", required=True, choices=KINDS, help="the format of the source")
    sub.add_argument("--out", type=Path, required=True, help="directory of the tasks")
    sub.add_argument("--seed", type=int, required=True, help="seed of all draws")
    sub.add_argument("--licence", help="licence of the source; default: that of the kind")
    sub.add_argument("--examples", type=_count, default=3, help="examples in a prompt at most")
    sub.add_argument("--distractors", type=_count, default=4, help="files of other contexts")
    sub.add_argument(
        "--distractor-mode",
        default="random",
        choices=["random", "same-domain", "bm25"],
        help="how the distractors are drawn; bm25: those most similar to the question",
    )
    sub.add_argument(
        "--names", default="neutral", choices=["neutral", "titles"], help="names of the files"
    )
    sub.add_argument(
        "--tasks-per-context", type=_positive_int, default=1, help="questions of a context at most"
    )
    sub.add_argument(
        "--val-fraction", type=_fraction, default=0.0, help="part of the contexts to hold out"
    )
    sub.add_argument(
        "--decontaminate",
        type=Path,
        metavar="FILE",
        help="rows with prompts of benchmarks, such as samples.jsonl of a suite",
    )
    sub.add_argument("--limit", type=_positive_int, help="tasks at most; default: all")

    sub = commands.add_parser("stats", help="print the counts of tasks")
    sub.set_defaults(command=_stats)
    sub.add_argument("tasks", type=Path, help="directory of the tasks")

    sub = commands.add_parser("convert", help="convert tasks for a trainer or the evaluation")
    sub.set_defaults(command=_convert)
    sub.add_argument("tasks", type=Path, help="directory of the tasks")
    sub.add_argument(
        "--to",
        required=True,
        choices=["trl", "verl", "bench"],
        help="rows of TRL or verl, or a suite of sandbox-eval",
    )
    sub.add_argument(
        "--out", type=Path, required=True, help="a .jsonl file; with bench the suite's directory"
    )
    sub.add_argument(
        "--context",
        default="files",
        choices=["files", "prompt"],
        help="where the documents are",
    )
    sub.add_argument("--split", default="train", choices=["train", "val"])


def _add_report_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    sub = commands.add_parser(
        "report", help="compare the trajectories before and after training, as Markdown"
    )
    sub.set_defaults(command=_report)
    help = "trajectories that the proxy exported with format=native"
    sub.add_argument("before", type=Path, help=help)
    sub.add_argument("after", type=Path, help="the same after training")
    sub.add_argument("--chart", type=Path, metavar="FILE.svg", help="also draw a chart")


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1 (got {value})")
    return value


def _count(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"must be from 0 to 100 (got {value})")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError(f"must be over 0 and at most 3600 (got {value:g})")
    return value


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be from 0 to less than 1 (got {value})")
    return value


if __name__ == "__main__":
    sys.exit(main())
