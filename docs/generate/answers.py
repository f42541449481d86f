"""The page of what the proxy adds to answers."""

from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Annotated, Any, get_args, get_origin

from docs.generate.declarations import doc, field_docs, members, row, table, type_words
from proxy.agent.result import RunStats
from proxy.api import messages, run_response
from proxy.schemas.answer_objects import (
    CardFields,
    ChoiceExtension,
    FileObject,
    MessageExtension,
    SandboxObject,
    SandboxUsage,
    StepEvent,
    StepExtension,
    StepStreamEvent,
)
from proxy.schemas.result_objects import CONVERTED_STATS

_HEAD = table("field", "type", "present", "meaning")


def answer() -> str:
    """Return the page of the fields and events that the proxy adds to answers."""
    return "\n".join(
        [
            "# The answer",
            "",
            "An answer has the fields of its API, and those on this page.",
            "",
            "## The `sandbox` object",
            "",
            f"{doc(SandboxObject)} A chat completion, a response and a message have it at the top"
            " level. In a stream it is in the chunk with the finish reason, in `response` of the"
            " last event of a response, and in `message_delta` of a message.",
            "",
            *_HEAD,
            *_rows(SandboxObject, "sandbox."),
            *_rows(FileObject, "sandbox.files[]."),
            *_item_rows(),
            "",
            "## `usage.sandbox`",
            "",
            "The statistics of the run. With several choices they are sums over the runs, or maxima"
            " for times, sizes and contexts. All numbers are whole.",
            "",
            *_HEAD,
            *_usage_rows(),
            "",
            "## Messages and chunks of chat completions",
            "",
            f"{doc(MessageExtension)}",
            "",
            *_HEAD,
            *_rows(MessageExtension, ""),
            "",
            doc(ChoiceExtension),
            "",
            *_HEAD,
            *_rows(ChoiceExtension, "choices[]."),
            "",
            doc(StepExtension),
            "",
            *_HEAD,
            *_rows(StepExtension, "sandbox."),
            "",
            doc(CardFields),
            "",
            *_HEAD,
            *_rows(CardFields, ""),
            "",
            "## Step events",
            "",
            "A stream has step events if `sandbox.steps` of the request is `events`. Each API"
            " carries them in another event, in the field `sandbox`:",
            "",
            *table("API", "event", "meaning"),
            *_event_name_rows(),
            "",
            "Each step event has `v`, the version 1, `run_id`, and the fields of its `kind`:",
            "",
            *table("kind", "field", "type", "meaning"),
            *_event_rows(),
            "",
            "## Keep-alives",
            "",
            *table("API", "sent", "meaning"),
            *_keep_alive_rows(),
            "",
        ]
    )


def _rows(section: Any, prefix: str) -> Iterator[str]:
    for name, kind, _, words in members(section):
        is_optional = name in section.__optional_keys__
        meaning, _, condition = words.partition(" Present ")
        present = condition.rstrip(".") or ("see the meaning" if is_optional else "always")
        yield row(f"`{prefix}{name}`", type_words(kind), present, meaning)


def _item_rows() -> Iterator[str]:
    """Yield the rows of the objects in a list, whose fields a dataclass names."""
    for name, kind, _, _ in members(SandboxObject):
        if get_origin(kind) is not Annotated:
            continue
        item = get_args(kind)[1]
        assert is_dataclass(item)
        for field, field_kind, _, words in members(item):  # type: ignore[arg-type]  # a class
            yield row(f"`sandbox.{name}[].{field}`", type_words(field_kind), "always", words)


def _usage_rows() -> Iterator[str]:
    for name, kind, _, words in members(RunStats):
        if name not in CONVERTED_STATS:
            yield row(f"`usage.sandbox.{name}`", type_words(kind), "always", words)
    yield from _rows(SandboxUsage, "usage.sandbox.")


def _event_name_rows() -> Iterator[str]:
    words = field_docs(StepStreamEvent)
    for each in StepStreamEvent:
        yield row(each.name.lower().replace("_", " "), f"`{each}`", words[each.name])


def _event_rows() -> Iterator[str]:
    for section in get_args(StepEvent):
        kind, *fields = members(section)
        yield row(f"`{get_args(kind[1])[0]}`", "", "", doc(section))
        for name, field_kind, _, words in fields:
            yield row("", f"`{name}`", type_words(field_kind), words)


def _keep_alive_rows() -> Iterator[str]:
    words, of_messages = field_docs(run_response), field_docs(messages)
    comment = run_response.KEEP_ALIVE.encode().decode().strip()
    ping = messages.PING.encode().decode().strip().replace("\n", "` and `")
    yield row("chat completions, responses", f"`{comment}`", words["KEEP_ALIVE"])
    yield row("messages", f"`{ping}`", of_messages["PING"])
    yield row("all, not streamed", "space and line feed", words["BLANK"])
