"""The pages of the errors, the stop reasons, the metrics, the command line and the routes."""

import argparse
import ast
import inspect
import os
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

import proxy
from docs.generate.declarations import field_docs, row, table
from policies.limits import StopReason
from proxy import errors
from proxy.__main__ import _parser as command_parser
from proxy.api.description import describe
from proxy.app import _routes as all_routes
from proxy.available_memory import AvailableMemory
from proxy.config import parse
from proxy.metrics import Metrics
from proxy.profiles import build_profiles, profile_table
from sandbox_runtime.backends.docker_hosts import HostStats
from sandbox_runtime.pool.pool import PoolStats


def error_codes() -> str:
    """Return the page of the errors that clients receive."""
    lines = [
        "# Errors",
        "",
        "Errors have OpenAI's body, `error` with `message`, `type`, `param` and `code`, and"
        " Anthropic's on `/v1/messages`. An error of the backend keeps the backend's status, type"
        " and code.",
        "",
        "```text",
        (inspect.getdoc(errors) or "").split("\n\n")[1],
        "```",
        "",
        "| error | code | meaning |",
        "|---|---|---|",
    ]
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, errors.ProxyError) and kind is not errors.ProxyError:
            words = " ".join((inspect.getdoc(kind) or "").split())
            lines.append(f"| {name} | {_codes(kind)} | {words} |")
    lines += [
        "",
        "## All codes",
        "",
        "Each `code`, with an example of a message. `…` stands for the details.",
        "",
        *table("code", "message"),
        *(row(f"`{code}`", message) for code, message in sorted(messages_by_code().items())),
    ]
    return "\n".join([*lines, ""])


def messages_by_code() -> dict[str, str]:
    """Return a message for each `code` that the proxy's source gives to an error."""
    found: dict[str, str] = {}
    for path in sorted(Path(proxy.__path__[0]).rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and (code := _code_of(call)):
                message = next(map(_message, call.args), "")
                found[code] = found.get(code) or (message if message.strip("… ") else "")
    return found


def _code_of(call: ast.Call) -> str | None:
    """Return the constant `code` of a call, which may be the name of a constant of `errors`."""
    for word in call.keywords:
        if word.arg == "code":
            name = word.value.id if isinstance(word.value, ast.Name) else ""
            value = getattr(errors, name, getattr(word.value, "value", None))
            return value if isinstance(value, str) else None
    return None


def _message(node: ast.expr) -> str:
    """Return a string in the source with `…` in place of its values."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_message, node.values))
    return str(node.value) if isinstance(node, ast.Constant) else "…"


def _codes(kind: type) -> str:
    """Return the values of `code=` in the source of an error class."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    codes = {
        word.value.value
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        for word in call.keywords
        if word.arg == "code" and isinstance(word.value, ast.Constant)
    }
    return ", ".join(f"`{code}`" for code in sorted(map(str, codes))) or "the caller's"


def stop_reasons() -> str:
    """Return the page of the reasons for which a run ends."""
    words = field_docs(StopReason)
    lines = [
        "# Stop reasons",
        "",
        "`sandbox.stop_reason` of an answer tells why its run ended. A limit is not an error: the"
        " run still ends in the best answer that it has.",
        "",
        "| stop reason | meaning |",
        "|---|---|",
    ]
    for each in StopReason:
        default = f"The run reached its {each.value.replace('_', ' ')}."
        lines.append(f"| `{each.value}` | {words.get(each.name, default)} |")
    return "\n".join([*lines, ""])


def metrics() -> str:
    """Return the page of the Prometheus metrics."""
    lines = [
        "# Metrics",
        "",
        "`GET /metrics` answers in Prometheus's text format or OpenMetrics. Metrics of the last"
        " release are served under their old names as well for one release.",
        "",
        "| metric | type | labels | meaning |",
        "|---|---|---|---|",
    ]
    shown = Metrics()
    shown.register_pool_stats(lambda: PoolStats(*[0] * len(fields(PoolStats))))
    shown.register_memory(AvailableMemory())
    shown.register_host_stats(lambda: [HostStats("", True, 0)])
    labels_of = _label_names(shown)
    for family in shown.collect():
        if family.documentation.startswith("Deprecated"):
            continue
        labels = {name for sample in family.samples for name in sample.labels} - {"le"}
        labels |= set(labels_of.get(family.name, ()))
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels_text = ", ".join(f"`{label}`" for label in sorted(labels))
        lines.append(f"| `{name}` | {family.type} | {labels_text} | {family.documentation} |")
    return "\n".join([*lines, ""])


def _label_names(metrics: Metrics) -> dict[str, Sequence[str]]:
    """Return the label names of each histogram and counter, by the metric's name."""
    found = [*metrics.durations.histograms, *vars(metrics.counts).values()]
    return {each.describe()[0].name: each._labelnames for each in found}  # noqa: SLF001 - no public list


def profiles() -> str:
    """Return the page of the shipped profiles."""
    built = build_profiles(parse({}, "none"))
    lines = [
        "# Profiles",
        "",
        "The shipped profiles. A setting that is not listed for a profile has the value of the"
        " profile that it extends: `paper` for `paper-math` and its siblings, else `default`.",
        "`sandbox-proxy profiles --config config.yaml` prints this table with your own profiles.",
        "",
    ]
    return "\n".join([*lines, *profile_table(built.by_name, built.default), ""])


def commands() -> str:
    """Return the page of the command line."""
    parser = command_parser()
    os.environ["COLUMNS"] = "100"  # the width of argparse's help
    lines = ["# Command line", "", "```text", parser.format_help().rstrip(), "```", ""]
    return "\n".join([*lines, *_subcommands(parser, "")])


def _subcommands(parser: argparse.ArgumentParser, above: str) -> Iterator[str]:
    """Yield the lines of each command of a parser, followed by those of the command's actions."""
    for action in parser._actions:  # noqa: SLF001 - argparse has no public list of its commands
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - as above
            for name, sub in action.choices.items():
                title = f"{above} {name}".lstrip()
                yield from (f"## {title}", "", "```text", sub.format_help().rstrip(), "```", "")
                yield from _subcommands(sub, title)


def http_api() -> str:
    """Return the page of the HTTP routes."""
    tree = describe(list(all_routes()))
    lines = [
        "# HTTP API",
        "",
        "The running server shows the whole description at `/docs` and `/openapi.json`. Paths that"
        " are not listed are passed on to the backend, as far as `backend.passthrough` allows."
        " [Request fields](request-fields.md), [The answer](answer.md) and [Headers](headers.md)"
        " list what the proxy adds to the APIs.",
        "",
        "| route | answer | statuses |",
        "|---|---|---|",
    ]
    for path, operations in tree["paths"].items():
        for method, operation in operations.items():
            statuses = " ".join(sorted(operation["responses"]))
            summary = operation.get("summary", "")
            lines.append(f"| `{method.upper()} {path}` | {summary} | {statuses} |")
    return "\n".join([*lines, ""])
