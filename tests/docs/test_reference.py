"""The reference pages are generated from the code, and name everything that the code declares."""

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest

import proxy
from docs.generate import HERE, generate
from docs.generate.declarations import leaves, members, section_type
from policies.headers import RequestHeader, ResponseHeader
from policies.limits import StopReason
from policies.profile import Profile
from policies.routing import ROUTE_REASONS
from proxy import errors
from proxy.agent.result import Compaction, RunStats, RunWarning
from proxy.api.description import describe
from proxy.app import _routes as all_routes
from proxy.config import Config
from proxy.metrics import Metrics
from proxy.schemas import answer_objects, messages_request, responses_parameters
from proxy.schemas.answer_objects import StepEvent, StepStreamEvent
from proxy.schemas.chat_parameters import PARAMETERS
from proxy.schemas.request_options import PolicyOptions, SandboxOptions
from proxy.schemas.result_objects import CONVERTED_STATS


def page(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def missing(name: str, words: Iterator[str]) -> list[str]:
    """Return the words that a page does not have in code quotes."""
    text = page(name)
    return [word for word in words if f"`{word}`" not in text]


@pytest.mark.parametrize("path", generate(), ids=lambda path: path.name)
def test_reference_page_equals_the_page_generated_from_the_code(path: Any) -> None:
    assert path.read_text(encoding="utf-8") == generate()[path], "run `make reference`"


def test_reference_folder_has_exactly_the_generated_pages() -> None:
    assert set(HERE.glob("*.md")) == set(generate())


def test_every_setting_is_in_the_reference() -> None:
    assert not missing("settings.md", settings())


def settings() -> Iterator[str]:
    for name, kind, default, _ in members(Config):
        section = section_type(kind)
        if section is not None:
            yield from (path for path, *_ in leaves(section, name, default))
    yield from (path for path, *_ in leaves(Profile, "", Profile()) if "." not in path)


def test_every_top_level_setting_has_a_heading_on_the_settings_page() -> None:
    lines = page("settings.md").splitlines()
    assert not [name for name in Config.model_fields if f"## {name}" not in lines]


def test_every_field_of_the_sandbox_object_of_a_request_is_in_the_reference() -> None:
    assert not missing("request-fields.md", sandbox_options())


def sandbox_options() -> Iterator[str]:
    profile = Profile()
    for name, kind, _, _ in members(SandboxOptions):
        section = section_type(kind) if name in PolicyOptions.__annotations__ else None
        if section is None:
            yield f"sandbox.{name}"
        else:
            inner = leaves(section, name, getattr(profile, name))
            yield from (f"sandbox.{path}" for path, *_ in inner)


def test_openapi_schema_of_the_sandbox_object_has_the_fields_of_sandbox_options() -> None:
    schemas = describe(list(all_routes()))["components"]["schemas"]
    assert schemas["SandboxOptions"]["properties"].keys() == SandboxOptions.__annotations__.keys()


def test_every_checked_request_field_is_in_the_reference() -> None:
    known = [*PARAMETERS, *responses_parameters.FIELDS, *messages_request.FIELDS]
    dropped = messages_request.DROPPED_FIELDS
    assert not missing("request-fields.md", iter([*known, *dropped]))


def test_every_answer_field_is_in_the_reference() -> None:
    assert not missing("answer.md", answer_fields())


def answer_fields() -> Iterator[str]:
    objects = answer_objects
    yield from (f"sandbox.{name}" for name in objects.SandboxObject.__annotations__)
    yield from (f"sandbox.files[].{name}" for name in objects.FileObject.__annotations__)
    yield from (f"sandbox.compactions[].{field.name}" for field in fields(Compaction))
    yield from (f"sandbox.warnings[].{field.name}" for field in fields(RunWarning))
    stats = {field.name for field in fields(RunStats)} - set(CONVERTED_STATS)
    names = [*stats, *objects.SandboxUsage.__annotations__]
    yield from (f"usage.sandbox.{name}" for name in names)
    yield from objects.MessageExtension.__annotations__
    yield from objects.CardFields.__annotations__
    yield from (f"sandbox.{name}" for name in objects.StepExtension.__annotations__)
    for event in get_args(StepEvent):
        yield from event.__annotations__.keys() - {"kind"}
        yield get_args(event.__annotations__["kind"])[0]
    yield from StepStreamEvent


def test_module_answer_objects_declares_only_documented_typed_dicts() -> None:
    """A new object in `answer_objects` needs a section of the page."""
    documented = {
        *("SandboxObject", "FileObject", "SandboxUsage", "MessageExtension"),
        *("ChoiceExtension", "CardFields", "StepExtension"),
        *(event.__name__ for event in get_args(StepEvent)),
    }
    tree = ast.parse(inspect.getsource(answer_objects))
    declared = {
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef) and ast.unparse(node.bases[0]) == "TypedDict"
    }
    assert declared == documented


def test_every_field_and_header_in_the_reference_has_a_description() -> None:
    for name in ("request-fields.md", "answer.md", "headers.md"):
        for line in page(name).splitlines():
            if line.startswith("| `sandbox.") or ("headers" in name and line.startswith("| `")):
                assert not line.endswith("|  |"), line


def test_every_header_is_in_the_reference() -> None:
    shown = (f"{each}*" if each.endswith("-") else each.lower() for each in every_header())
    assert not missing("headers.md", shown)


def every_header() -> Iterator[str]:
    yield from RequestHeader
    yield from ResponseHeader


def test_every_route_reason_is_in_the_reference() -> None:
    assert not missing("headers.md", iter(ROUTE_REASONS))


def test_every_error_code_is_in_the_reference() -> None:
    assert not missing("errors.md", error_codes())


def error_codes() -> Iterator[str]:
    """Yield each constant `code=` in the source of the proxy."""
    for path in Path(proxy.__path__[0]).rglob("*.py"):
        yield from re.findall(r'\bcode="(\w+)"', path.read_text(encoding="utf-8"))
    yield errors.LOST_THREAD


def test_every_stop_reason_is_in_the_reference() -> None:
    assert not missing("stop-reasons.md", iter(StopReason))


def test_every_metric_is_in_the_reference() -> None:
    assert not missing("metrics.md", metrics())


def metrics() -> Iterator[str]:
    for family in Metrics().collect():
        if not family.documentation.startswith("Deprecated"):
            yield f"{family.name}_total" if family.type == "counter" else family.name
