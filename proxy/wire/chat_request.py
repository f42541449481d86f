"""POST /v1/chat/completions: what we read of a request; every other field travels on untouched."""

from collections.abc import Mapping
from typing import Any

from policies.answer_form import form_of
from policies.sessions import states
from proxy.agent.task import Outbox, Task
from proxy.wire import custom_tools
from proxy.wire.legacy_functions import as_tools, is_legacy
from proxy.wire.chat_parameters import GRAMMARS, check_parameters, placed, shapes
from proxy.wire.validation import array, integer, mapping, not_together, require
from proxy.wire.tool_choice import chosen

TOKEN_LIMITS = ("max_completion_tokens", "max_tokens", "n_predict")
"""The last is llama.cpp's name for it, where a number below 1 is no limit."""
GUIDED = {
    "guided_json": "json",
    "guided_json_object": "json_object",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_whitespace_pattern": "whitespace_pattern",
}
"""vLLM's former names, which it ignores today → the members of `structured_outputs`."""
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""vLLM takes one of them."""


def check_messages(body: Mapping[str, Any]) -> None:
    """Without any no request can be sent on. Raises BadRequestError."""
    require(body, "messages", "messages")
    array(mapping, minimum=1)(body["messages"], "messages")


def choice_count(body: Mapping[str, Any], limit: int) -> int:
    """How many answers are asked for. Raises BadRequestError."""
    count = body.get("n")
    if count is None:
        return 1
    integer(1, limit)(count, "n")
    return int(count)


def to_task(
    body: Mapping[str, Any], *, model: str, run_id: str, outbox: Outbox, owner: str = ""
) -> Task:
    """A request as the agent's task. Raises BadRequestError."""
    check_parameters(body)
    legacy_state = None
    if is_legacy(body):
        legacy_state, _ = states(body["messages"])
        body = as_tools(body)
    free_text = custom_tools.names(body.get("tools") or [])
    body = custom_tools.as_functions(body)
    choice = chosen(body.get("tools") or [], body.get("tool_choice"))
    given = {key: value for key, value in body.items() if value is not None}
    final_only = _structured(placed(given, "visible answer"))
    final_only = {key: value for key, value in final_only.items() if shapes(key, value)}
    return Task(
        run_id=run_id,
        outbox=outbox,
        model=model,
        owner=owner,
        messages=body["messages"],
        plain_messages=body["messages"],
        client_tools=choice.tools,
        free_text=free_text,
        tool_choice=choice.first,
        must_call=choice.must_call,
        parallel_tool_calls=body.get("parallel_tool_calls") if choice.tools else None,
        legacy_state=legacy_state,
        every_turn=placed(body, "every call", "straight"),
        final_only=final_only,
        final_budget={key: given[key] for key in TOKEN_LIMITS if given.get(key, 0) > 0},
        form=form_of(
            final_only.get("response_format"),
            final_only.get("structured_outputs"),
            final_only.get("json_schema"),
        ),
        stream=bool(body.get("stream")),
        rewrite_links=_is_text(body.get("response_format")) and not GRAMMARS & given.keys(),
    )


def wants_usage(body: Mapping[str, Any]) -> bool:
    """Whether a streaming client asked for the usage chunk."""
    options = body.get("stream_options") or {}
    mapping(options, "stream_options")
    return bool(options.get("include_usage"))


def _structured(final_only: Mapping[str, Any]) -> dict[str, Any]:
    """The same with vLLM's former names translated; an older server still reads those. Raises
    BadRequestError."""
    guided = {now: final_only[old] for old, now in GUIDED.items() if final_only.get(old)}
    asked = final_only.get("structured_outputs") or guided
    if sum(asked.get(kind) not in (None, False) for kind in KINDS) > 1:
        raise not_together(
            f"Only one kind of grammar can hold for an answer: one of {', '.join(KINDS)}.",
            "structured_outputs",
        )
    return {**final_only, "structured_outputs": asked} if asked else dict(final_only)


def _is_text(response_format: object) -> bool:
    return not isinstance(response_format, dict) or response_format.get("type") == "text"
