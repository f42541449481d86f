"""The parts that the responses of all APIs share: usage, the `sandbox` object, files, links."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import reduce
from typing import Any, Literal

from policies.capabilities import Capability
from policies.file_names import display_name
from proxy.agent.result import Artifact, Result, add_usage
from proxy.schemas.answer_objects import FileObject, SandboxObject, SandboxUsage

MAX_SKIPPED_FILES = 100
"""Maximum number of skipped files that the `sandbox` object lists."""
CONVERTED_STATS = ("capability_turns", "cost_usd")
"""Statistics that `usage.sandbox` has in another form."""
_MAXIMUM_COUNTS = ("context_tokens", "documents_tokens", "wall_ms", "peak_mem_bytes")
"""Counts of which the maximum over parallel runs is reported, not the sum."""


def usage(result: Result) -> dict[str, Any]:
    """Return OpenAI's usage summed over the choices. Its field `sandbox` has the statistics of the
    runs."""
    choices = (result, *result.others)
    counted: dict[str, Any] = dict.fromkeys(
        ("prompt_tokens", "completion_tokens", "total_tokens"), 0
    )
    for choice in choices:
        counted = add_usage(counted, choice.usage)
    counts = [choice.stats.counts() for choice in choices]
    stats = reduce(add_usage, counts)
    stats |= {key: max(each[key] for each in counts) for key in _MAXIMUM_COUNTS}
    if any(choice.stats.cost_usd is None for choice in choices):
        stats["cost_usd"] = None
    known = {key: value for key, value in stats.items() if value is not None}
    return {**counted, "sandbox": _sandbox_usage(known)}


def token_details(
    usage_fields: Mapping[str, Any], tokens: Literal["prompt", "completion"]
) -> dict[str, Any]:
    """Return the details of a usage's prompt or completion tokens, or an empty dict."""
    found = usage_fields.get(f"{tokens}_tokens_details")
    return dict(found) if isinstance(found, Mapping) else {}


def sandbox_object(result: Result) -> SandboxObject:
    """Return the `sandbox` object of a response: the end of the run, and the produced files."""
    sandbox: SandboxObject = {
        "v": 1,
        "run_id": result.run_id,
        "container_id": result.container_id,
        "stop_reason": str(result.stop_reason),
        "route": result.route,
        "steps": result.steps,
        "files": [_file_object(artifact) for artifact in result.artifacts],
    }
    if result.origin == "restored":
        sandbox["restored"] = True
    if result.segments > 1:
        sandbox["segments"] = result.segments
        sandbox["compactions"] = [asdict(each) for each in result.compactions]
    if result.warnings:
        sandbox["warnings"] = [asdict(warning) for warning in result.warnings]
    if result.skipped_files:
        sandbox["files_left_out_count"] = len(result.skipped_files)
        sandbox["files_left_out"] = [
            {**asdict(file), "path": _printable_path(file.path)}
            for file in result.skipped_files[:MAX_SKIPPED_FILES]
        ]
    return sandbox


def _file_object(artifact: Artifact) -> FileObject:
    return {
        "id": artifact.file_id,
        "filename": filename(artifact),
        "path": _printable_path(artifact.path),
        "bytes": artifact.bytes,
        "mime_type": artifact.mime_type,
        "sha256": artifact.sha256,
        "url": artifact.url,
    }


def url_citations(result: Result, offset: int = 0) -> list[dict[str, Any]]:
    """Return a `url_citation` of each produced file, at the file's link in the answer, or at the
    end of the answer if it has no such link.

    `offset` is the number of characters of the message's content before the answer.
    """
    found = []
    for artifact, start, end in linked_artifacts(result):
        citation = {
            "url": artifact.url,
            "title": filename(artifact),
            "start_index": offset + start,
            "end_index": offset + end,
        }
        found.append({"type": "url_citation", "url_citation": citation})
    return found


def images(result: Result) -> list[dict[str, Any]]:
    """Return the produced images that are small enough to be part of the message."""
    urls = [artifact.data_url for artifact in result.artifacts if artifact.data_url]
    return [
        {"type": "image_url", "index": index, "image_url": {"url": url}}
        for index, url in enumerate(urls)
    ]


def linked_artifacts(result: Result) -> Iterator[tuple[Artifact, int, int]]:
    """Yield each produced file with the start and the end of its link in the answer."""
    for artifact in result.artifacts:
        yield artifact, *_link_span(result.answer, artifact.url)


def _link_span(answer: str, url: str) -> tuple[int, int]:
    """Return the start and the end of the link's text in the answer. Without a Markdown link,
    return the start and the end of the bare URL; without the URL, return the end of the answer
    twice."""
    at = answer.find(url)
    if at < 0:
        return len(answer), len(answer)
    label = answer.rfind("[", 0, at)
    if label >= 0 and answer[label:at].endswith("]("):
        return label + 1, at - 2
    return at, at + len(url)


def filename(artifact: Artifact) -> str:
    """Return the file name that users see."""
    return _printable_path(artifact.filename or display_name(artifact.path))


def _printable_path(path: str) -> str:
    return path.encode(errors="replace").decode()


def _sandbox_usage(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Return `usage.sandbox`: the statistics of the runs in integers, and ratios of the statistics.

    All numbers are integers, because LangChain sums the numbers of usages and warns of other types.
    """
    shown = {name: value for name, value in stats.items() if name not in CONVERTED_STATS}
    turns = {str(each): stats["capability_turns"].get(each, 0) for each in Capability}
    capabilities = {
        name: {"turns": count, "permille": _permille(count, stats["turns"])}
        for name, count in turns.items()
    }
    computed = SandboxUsage(
        env_permille=_permille(stats["env_tokens"], stats["trajectory_tokens"]),
        capabilities=capabilities,
    )
    if (cost := stats.get("cost_usd")) is not None:
        computed["cost_microusd"] = round(1_000_000 * cost)
    return {**shown, **computed}


def _permille(part: int, whole: int) -> int:
    return round(1000 * part / whole) if whole else 0


def json_text(value: Any) -> str:
    """Return ASCII JSON on one line. Lone surrogates, which some parsers refuse, are replaced."""
    return json.dumps(json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace")))
