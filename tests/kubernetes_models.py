"""Validates Kubernetes objects against the models of kubernetes_asyncio, which are generated from
the API of a current version of Kubernetes."""

from collections.abc import Mapping
from typing import Any

from kubernetes_asyncio import client

_PLAIN: Mapping[str, type | tuple[type, ...]] = {
    "str": str,
    "int": int,
    "bool": bool,
    "float": (int, float),
    "object": object,
    "datetime": str,
}


def validate(document: Mapping[str, Any]) -> None:
    """Raise ValueError for a field that the API does not have, that has another type, or that is
    required and missing."""
    _parse(document, f"V1{document['kind']}", document["kind"])


def _parse(value: Any, kind: str, path: str) -> Any:
    if kind.startswith("list["):
        _require(value, list, path)
        inner = kind.removeprefix("list[").removesuffix("]")
        return [_parse(each, inner, f"{path}[{n}]") for n, each in enumerate(value)]
    if kind.startswith("dict("):
        _require(value, dict, path)
        inner = kind.removeprefix("dict(str, ").removesuffix(")")
        return {key: _parse(each, inner, f"{path}.{key}") for key, each in value.items()}
    if plain := _PLAIN.get(kind):
        _require(value, plain, path)
        return value
    _require(value, dict, path)
    model = getattr(client, kind)
    attributes = {json_name: name for name, json_name in model.attribute_map.items()}
    if unknown := set(value) - set(attributes):
        raise ValueError(f"{path} has no field {', '.join(sorted(unknown))}")
    fields = {
        attributes[name]: _parse(each, model.openapi_types[attributes[name]], f"{path}.{name}")
        for name, each in value.items()
    }
    return model(**fields)


def _require(value: Any, kind: type | tuple[type, ...], path: str) -> None:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{path} is {value!r}, and should be {kind}")
