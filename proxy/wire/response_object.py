"""The `response` object of /v1/responses: what was asked, and what has come of it."""

from collections.abc import Mapping, Sequence
from typing import Any

from proxy.agent.result import Result
from proxy.errors import ProxyError, RunCancelledError
from proxy.wire.chat_response import filename, place, sandbox_object, usage

_ECHOED: Mapping[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt": None,
    "prompt_cache_key": None,
    "prompt_cache_retention": None,
    "safety_identifier": None,
    "service_tier": "auto",
    "store": True,
    "temperature": None,
    "tool_choice": "auto",
    "top_logprobs": 0,
    "top_p": None,
    "truncation": "disabled",
}
"""What is said back as it was asked, and what stands for it where it was not. What the backend
then does by itself is its own affair: null."""
_INPUT_DETAILS = {"cache_write_tokens": 0, "cached_tokens": 0}
_OUTPUT_DETAILS = {"reasoning_tokens": 0}
"""OpenAI's types require these, so they are there where the backend does not count them."""
_PREFIX = "resp_"
_ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


def response_id(run_id: str) -> str:
    """The name of the response that a run makes."""
    return f"{_PREFIX}{run_id}"


def run_id(response_id: str) -> str:
    """The name of the run that makes a response."""
    return response_id.removeprefix(_PREFIX)


def begun(body: Mapping[str, Any], run_id: str, created: int) -> dict[str, Any]:
    """The response to a request, of which nothing is known yet."""
    asked = {name: body.get(name) for name in _ECHOED}
    settings, thinking = body.get("text") or {}, body.get("reasoning") or {}
    return {
        "id": response_id(run_id),
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": bool(body.get("background")),
        "completed_at": None,
        "conversation": _conversation(body.get("conversation")),
        "error": None,
        "incomplete_details": None,
        "model": body["model"],
        "output": [],
        **{name: _ECHOED[name] if asked[name] is None else asked[name] for name in _ECHOED},
        "reasoning": {"effort": None, "summary": None, **thinking},
        "text": {**settings, "format": settings.get("format") or {"type": "text"}},
        "tools": [_tool(tool) for tool in body.get("tools") or []],
        **({"user": body["user"]} if body.get("user") else {}),
    }


def ended(
    response: Mapping[str, Any], result: Result, output: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The same when it is over."""
    reason = _INCOMPLETE.get(result.finish_reason)
    # Not by the clock: it is told more than once, and is kept besides.
    over = response["created_at"] + result.tally.wall_ms // 1000
    tier = result.response.get("service_tier")
    return {
        **response,
        "status": "incomplete" if reason else "completed",
        "completed_at": None if reason else over,
        "incomplete_details": {"reason": reason} if reason else None,
        "output": list(output),
        "service_tier": tier if isinstance(tier, str) else response["service_tier"],
        "usage": _usage(result),
        "sandbox": sandbox_object(result),
    }


def failed(
    response: Mapping[str, Any], error: ProxyError, output: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The same where it came to nothing."""
    if isinstance(error, RunCancelledError):
        return {**response, "status": "cancelled", "output": list(output)}
    code = _ERROR_CODES.get(error.status, "server_error")
    told = {"code": code, "message": error.message}
    return {**response, "status": "failed", "error": told, "output": list(output)}


def citations(result: Result) -> list[dict[str, Any]]:
    """One for each produced file, where the answer links to it, else at its end."""
    found = []
    for artifact in result.artifacts:
        start, end = place(result.answer, artifact.url)
        found.append(
            {
                "type": "container_file_citation",
                "container_id": artifact.container_id,
                "file_id": artifact.file_id,
                "filename": filename(artifact),
                "start_index": start,
                "end_index": end,
            }
        )
    return found


def log_probabilities(logprobs: Any) -> list[dict[str, Any]]:
    """Those of a chat's choice, as a part of text has them."""
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    return [
        {
            "token": token["token"],
            "bytes": token.get("bytes") or [],
            "logprob": token["logprob"],
            "top_logprobs": [
                {**other, "bytes": other.get("bytes") or []}
                for other in token.get("top_logprobs") or []
            ],
        }
        for token in content or []
    ]


def _conversation(asked: Any) -> dict[str, Any] | None:
    """As an object, however it was named."""
    return {"id": asked} if isinstance(asked, str) else asked


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """With the fields that clients read without asking whether they are there."""
    if tool["type"] == "function":
        return {"parameters": None, "strict": None, **tool}
    return dict(tool)


def _details(counted: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    details = counted.get(name)
    return details if isinstance(details, Mapping) else {}


def _usage(result: Result) -> dict[str, Any]:
    counted = usage(result)
    return {
        "input_tokens": counted["prompt_tokens"],
        "input_tokens_details": {**_INPUT_DETAILS, **_details(counted, "prompt_tokens_details")},
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": {
            **_OUTPUT_DETAILS,
            **_details(counted, "completion_tokens_details"),
        },
        "total_tokens": counted["total_tokens"],
        "sandbox": counted["sandbox"],
    }
