"""Reads declarations of the code: the fields of classes with their types, defaults and docstrings.
Writes them as cells of Markdown tables."""

import ast
import enum
import inspect
import textwrap
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

UNITS = {
    "_mib_per_s": "MiB a second",
    "_s": "seconds",
    "_ms": "milliseconds",
    "_mib": "MiB",
    "_kib": "KiB",
    "_hours": "hours",
    "_days": "days",
    "_tokens": "tokens",
    "_chars": "characters",
    "_usd": "US dollars",
    "_bytes": "bytes",
}


_NAMES: dict[Any, str] = {
    str: "text",
    bool: "true or false",
    int: "whole number",
    float: "number",
    Any: "any",
}


def members(section: type) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield name, type, default and docstring of each field of a section."""
    words = field_docs(section)
    kinds = get_type_hints(section, include_extras=True)
    if issubclass(section, BaseModel):
        for name, field in section.model_fields.items():
            default = None if field.default is PydanticUndefined else field.default
            yield name, kinds[name], default, words.get(name, "")
        return
    if is_typeddict(section):
        for name in section.__annotations__:
            yield name, kinds[name], None, words.get(name, "")
        return
    assert is_dataclass(section)
    for each in fields(section):
        default = None if each.default is MISSING else each.default
        yield each.name, kinds[each.name], default, words.get(each.name, "")


def leaves(section: type, path: str, value: Any) -> Iterator[tuple[str, str, Any, str]]:
    """Yield path, type in words, default and docstring of each single setting below a section.
    `value` is the section's default."""
    for name, kind, default, words in members(section):
        default = getattr(value, name, default)
        inner = section_type(kind)
        full_name = f"{path}.{name}".lstrip(".")
        if inner is not None and not isinstance(default, Mapping):
            yield from leaves(inner, full_name, default)
            continue
        unit = next((unit for end, unit in UNITS.items() if name.endswith(end)), "")
        yield full_name, f"{type_words(kind)}, {unit}" if unit else type_words(kind), default, words


def field_docs(section: type | types.ModuleType) -> dict[str, str]:
    """Return the docstring under each field of a class, or under each constant of a module."""
    body = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    docs = {}
    if isinstance(section, type):
        body = body[0].body  # type: ignore[attr-defined]  # the body of the class
    for statement, following in pairwise(body):
        target = getattr(statement, "target", None) or next(
            iter(getattr(statement, "targets", ())), None
        )
        text = following.value if isinstance(following, ast.Expr) else None
        if isinstance(target, ast.Name) and isinstance(text, ast.Constant):
            docs[target.id] = " ".join(str(text.value).split())
    return docs


def section_type(kind: Any) -> type | None:
    """Return the class of a nested section, or None for a single setting."""
    kind = _bare(kind)
    is_section = (
        isinstance(kind, type)
        and not is_typeddict(kind)
        and (is_dataclass(kind) or issubclass(kind, BaseModel))
    )
    return kind if is_section else None


def item_section(kind: Any) -> type | None:
    """Return the class of the sections in a list or a map, or None."""
    arguments = get_args(_bare(kind))
    if not arguments:
        return None
    return section_type(arguments[-1] if get_origin(_bare(kind)) is dict else arguments[0])


def _bare(kind: Any) -> Any:
    while get_origin(kind) in (Annotated, Required):
        kind = get_args(kind)[0]
    return kind


def type_words(kind: Any) -> str:
    """Return a type in words."""
    kind = _bare(kind)
    arguments = get_args(kind)
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(
            "null" if each is types.NoneType else type_words(each) for each in arguments
        )
    if get_origin(kind) is Literal:
        return " | ".join(f"`{each}`" for each in arguments)
    if isinstance(get_origin(kind), type):
        return _container_words(get_origin(kind), arguments)
    return _NAMES.get(kind) or _class_words(kind)


def _container_words(origin: type, arguments: tuple[Any, ...]) -> str:
    if not issubclass(origin, Mapping):
        return f"list of {type_words(arguments[0])}".replace("list of object", "list of objects")
    return "object" if arguments[1] is Any else f"map of {type_words(arguments[1])}"


def _class_words(kind: Any) -> str:
    if is_typeddict(kind):
        return "object"
    if isinstance(kind, type) and issubclass(kind, Path):
        return "path"
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return " | ".join(f"`{each.value}`" for each in kind)
    return f"`{kind.__name__}`" if hasattr(kind, "__name__") else "any"


def value_words(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"{value:,.12g}"
    if isinstance(value, tuple | list):
        return ", ".join(f"`{each}`" for each in value) or "empty"
    if isinstance(value, str) and "\n" in value:
        return f"{value.count(chr(10))} lines"
    return f"`{value}`" if value not in ("", {}) else "empty"


def schema_words(schema: Mapping[str, Any]) -> str:
    """Return the type of a JSON Schema in words, with its bounds."""
    if "anyOf" in schema:
        kinds = [schema_words(each) for each in schema["anyOf"] if each.get("type") != "null"]
        return " or ".join(kinds)
    if "enum" in schema:
        return " | ".join(f"`{each}`" for each in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {schema_words(schema['items'])}".replace("object", "objects")
    names = {"string": "text", "boolean": "true or false", "integer": "whole number"}
    kind = str(schema.get("type", "object" if "$ref" in schema else "any"))
    bounds = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most"}
    shown = [f"{word} {schema[name]:,}" for name, word in bounds.items() if name in schema]
    return ", ".join([names.get(kind, kind), *shown])


def table(*head: str) -> list[str]:
    """Return the head of a Markdown table."""
    return [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]


def row(*cells: str) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def doc(section: Any) -> str:
    """Return the docstring of a class, as one line."""
    return " ".join((inspect.getdoc(section) or "").split())
