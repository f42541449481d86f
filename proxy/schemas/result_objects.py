"""What the answers of every API contain: usage, the `sandbox` object, files, links, JSON text."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from policies.capabilities import Capability
from policies.file_names import display_name
from proxy.agent.result import Artifact, Result, add

MAX_LEFT_OUT = 100
"""How many produced files are named of those that the answer does not contain."""
_LARGEST = ("context_tokens", "documents_tokens", "wall_ms", "peak_mem_bytes")
"""Counts of which parallel runs share the largest instead of their sum."""


def usage(result: Result) -> dict[str, Any]:
    """Return OpenAI's usage summed over the choices, with the proxy's own in `sandbox`."""
    counted: dict[str, Any] = {
        "prompt_tokens": 0,
        "completion_tokens": 0,
        "total_tokens": 0,
    }
    stats = result.stats.counts()
    largest = {key: stats[key] for key in _LARGEST}
    for each in (result, *result.others):
        counted = add(counted, each.usage)
    for other in result.others:
        more = other.stats.counts()
        stats = add(stats, more)
        largest = {key: max(largest[key], more[key]) for key in _LARGEST}
    if any(each.stats.cost_usd is None for each in (result, *result.others)):
        stats["cost_usd"] = None
    known = {key: value for key, value in {**stats, **largest}.items() if value is not None}
    return {**counted, "sandbox": _sandbox_usage(known)}


def sandbox_object(result: Result) -> dict[str, Any]:
    """Return the `sandbox` object of an answer: how the run ended, and the files it produced."""
    shown: dict[str, Any] = {
        "v": 1,
        "run_id": result.run_id,
        "container_id": result.container_id,
        "stop_reason": str(result.stop_reason),
        "route": result.route,
        "steps": result.steps,
        "files": [_file_object(artifact) for artifact in result.artifacts],
    }
    if result.origin == "restored":
        shown["restored"] = True
    if result.segments > 1:
        shown["segments"] = result.segments
        shown["compactions"] = [asdict(each) for each in result.compactions]
    if result.warnings:
        shown["warnings"] = [asdict(warning) for warning in result.warnings]
    if result.skipped_files:
        shown["files_left_out_count"] = len(result.skipped_files)
        shown["files_left_out"] = [
            {**asdict(file), "path": _printable(file.path)}
            for file in result.skipped_files[:MAX_LEFT_OUT]
        ]
    return shown


def _file_object(artifact: Artifact) -> dict[str, Any]:
    return {
        "id": artifact.file_id,
        "filename": filename(artifact),
        "path": _printable(artifact.path),
        "bytes": artifact.bytes,
        "mime_type": artifact.mime_type,
        "sha256": artifact.sha256,
        "url": artifact.url,
    }


def annotations(result: Result, before: int = 0) -> list[dict[str, Any]]:
    """Return a `url_citation` for each file, at its link in the answer, else at the answer's end.

    `before` is the number of characters that the content has before the answer.
    """
    found = []
    for artifact in result.artifacts:
        start, end = place(result.answer, artifact.url)
        citation = {
            "url": artifact.url,
            "title": filename(artifact),
            "start_index": before + start,
            "end_index": before + end,
        }
        found.append({"type": "url_citation", "url_citation": citation})
    return found


def images(result: Result) -> list[dict[str, Any]]:
    """Return the pictures that are small enough to be inside the message."""
    urls = [artifact.data_url for artifact in result.artifacts if artifact.data_url]
    return [
        {"type": "image_url", "index": index, "image_url": {"url": url}}
        for index, url in enumerate(urls)
    ]


def place(answer: str, url: str) -> tuple[int, int]:
    """Return where a link's text stands in an answer, else the bare URL, else the answer's end."""
    at = answer.find(url)
    if at < 0:
        return len(answer), len(answer)
    label = answer.rfind("[", 0, at)
    if label >= 0 and answer[label:at].endswith("]("):
        return label + 1, at - 2
    return at, at + len(url)


def filename(artifact: Artifact) -> str:
    """Return the name under which the user sees a file."""
    return _printable(artifact.filename or display_name(artifact.path))


def _printable(path: str) -> str:
    return path.encode(errors="replace").decode()


def _sandbox_usage(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Return `usage.sandbox`: the fields of a Tally, or of several added up, and ratios of them.

    All are whole numbers, because LangChain adds up the numbers in usages and warns of other types.
    """
    renamed = ("capability_turns", "cost_usd")
    told = {name: value for name, value in stats.items() if name not in renamed}
    if (cost := stats.get("cost_usd")) is not None:
        told["cost_microusd"] = round(1_000_000 * cost)
    turns = {str(each): stats["capability_turns"].get(each, 0) for each in Capability}
    capabilities = {
        name: {"turns": count, "permille": _permille(count, stats["turns"])}
        for name, count in turns.items()
    }
    env_permille = _permille(stats["env_tokens"], stats["trajectory_tokens"])
    return {**told, "env_permille": env_permille, "capabilities": capabilities}


def _permille(part: int, whole: int) -> int:
    return round(1000 * part / whole) if whole else 0


def json_text(value: Any) -> str:
    """Return ASCII JSON on one line, without lone surrogates, which some parsers refuse."""
    return json.dumps(json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace")))
