"""The checks from which the request schemas of every API are built, and the errors they raise.

A check is a function that raises BadRequestError, with OpenAI's error text and code, for a value of
the wrong type or out of bounds. chat_parameters, responses_parameters and messages_request combine
checks into tables of fields.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from proxy.errors import BadRequestError

Check = Callable[[Any, str], None]
"""Raises BadRequestError for an invalid value. The arguments are the value and its path in the
request, such as `messages[0].role`."""

MAX_MESSAGES = 10_000
"""Maximum number of messages or input items in one request. Their preparation takes about 0.1 s, in
which the event loop answers no other request."""

_TYPE_NAMES: tuple[tuple[type, str], ...] = (
    (bool, "a boolean"),
    (int, "an integer"),
    (float, "a decimal"),
    (str, "a string"),
    (list, "an array"),
    (dict, "an object"),
)


def accept_anything(value: Any, param: str) -> None:
    """Accept any value. The backend checks the field, or nothing reads it."""


def check_boolean(value: Any, param: str) -> None:
    if not isinstance(value, bool):
        raise wrong_type_error(param, "a boolean", value)


def check_text(value: Any, param: str) -> None:
    if not isinstance(value, str):
        raise wrong_type_error(param, "a string", value)


def check_mapping(value: Any, param: str) -> None:
    if not isinstance(value, dict):
        raise wrong_type_error(param, "an object", value)


def integer(minimum: int | None = None, maximum: int | None = None) -> Check:
    """Return a check for a whole number within bounds."""

    def check(value: Any, param: str) -> None:
        if not isinstance(value, int) or isinstance(value, bool):
            raise wrong_type_error(param, "an integer", value)
        _check_bounds(value, param, minimum, maximum, "integer")

    return check


def number(minimum: float | None = None, maximum: float | None = None) -> Check:
    """Return a check for a finite number within bounds."""

    def check(value: Any, param: str) -> None:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise wrong_type_error(param, "a decimal", value)
        _check_bounds(value, param, minimum, maximum, "decimal")
        if not math.isfinite(value):
            raise BadRequestError(
                f"Invalid '{param}': expected a finite decimal.", param=param, code="invalid_value"
            )

    return check


def one_of(*values: str) -> Check:
    """Return a check for a string that is one of `values`."""

    def check(value: Any, param: str) -> None:
        check_text(value, param)
        if value not in values:
            raise unsupported_value_error(value, values, param)

    return check


def union(expected: str, *types: type, checks: Mapping[type, Check] | None = None) -> Check:
    """Return a check for a value of one of several types. `expected` describes the types in the
    error; `checks` has a further check for values of some types, by type."""

    def check(value: Any, param: str) -> None:
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise wrong_type_error(param, f"one of {expected}", value)
        if further := (checks or {}).get(type(value)):
            further(value, param)

    return check


def array(check_item: Check, *, minimum: int = 0, maximum: int | None = None) -> Check:
    """Return a check for a list of `minimum` to `maximum` items."""

    def check(value: Any, param: str) -> None:
        if not isinstance(value, list):
            raise wrong_type_error(param, "an array", value)
        if len(value) < minimum:
            raise BadRequestError(
                f"Invalid '{param}': empty array. Expected an array with minimum length {minimum},"
                " but got an empty array instead.",
                param=param,
                code="empty_array",
            )
        if maximum is not None and len(value) > maximum:
            raise BadRequestError(
                f"Invalid '{param}': array too long. Expected an array with maximum length"
                f" {maximum}, but got an array with length {len(value)} instead.",
                param=param,
                code="array_above_max_length",
            )
        for index, item in enumerate(value):
            check_item(item, f"{param}[{index}]")

    return check


def text_or_parts(check_part: Check, *, minimum: int = 0) -> Check:
    """Return a check for a message's content: a string, or a list of at least `minimum` parts."""
    parts = array(check_part, minimum=minimum)
    return union("a string or array of objects", str, list, checks={list: parts})


def text_or_object(check_object: Check, check_text: Check = accept_anything) -> Check:
    """Return a check for an object, or for a string in its place."""
    checks: Mapping[type, Check] = {str: check_text, dict: check_object}
    return union("a string or an object", str, dict, checks=checks)


def object_with(
    required: Mapping[str, Check] | None = None, optional: Mapping[str, Check] | None = None
) -> Check:
    """Return a check for an object with these fields. Other fields are not checked. Null is
    accepted for an optional field."""
    needed = required or {}
    known = {**needed, **(optional or {})}

    def check(value: Any, param: str) -> None:
        check_mapping(value, param)
        for name in needed:
            require_field(value, name, f"{param}.{name}")
        for name, check_field in known.items():
            if name in needed or value.get(name) is not None:
                check_field(value[name], f"{param}.{name}")

    return check


def discriminated(
    kinds: Mapping[str, Check], check_other: Check | None = None, *, tag: str = "type"
) -> Check:
    """Return a check for an object whose field `tag` selects a check from `kinds`. `check_other`
    checks an object of another kind; without `check_other` such an object is refused."""

    def check(value: Any, param: str) -> None:
        check_mapping(value, param)
        require_field(value, tag, f"{param}.{tag}")
        kind = value[tag]
        check_text(kind, f"{param}.{tag}")
        check_kind = kinds.get(kind, check_other)
        if check_kind is None:
            raise unsupported_value_error(kind, kinds, f"{param}.{tag}")
        check_kind(value, param)

    return check


def object_of(check_value: Check) -> Check:
    """Return a check for an object whose values all pass `check_value`."""

    def check(value: Any, param: str) -> None:
        check_mapping(value, param)
        for name, item in value.items():
            check_value(item, f"{param}.{name}")

    return check


def require_field(value: Mapping[str, Any], name: str, param: str) -> None:
    """Raise BadRequestError if an object lacks a field. `param` is the path of the field."""
    if name not in value:
        raise missing_error(param)


def missing_error(param: str) -> BadRequestError:
    """Return the error for a required field that is missing."""
    return BadRequestError(
        f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
    )


def wrong_type_error(param: str, expected: str, value: Any) -> BadRequestError:
    """Return the error for a value of the wrong type."""
    names = (name for kind, name in _TYPE_NAMES if isinstance(value, kind))
    got = next(names, "null")
    return BadRequestError(
        f"Invalid type for '{param}': expected {expected}, but got {got} instead.",
        param=param,
        code="invalid_type",
    )


def unsupported_value_error(
    value: str, supported_values: Iterable[str], param: str
) -> BadRequestError:
    """Return the error for a string that is not among the supported values."""
    quoted = [f"'{each}'" for each in supported_values]
    listed = " and ".join(quoted)
    if len(quoted) > 2:
        listed = f"{', '.join(quoted[:-1])}, and {quoted[-1]}"
    return BadRequestError(
        f"Invalid value: '{value}'. Supported values are: {listed}.",
        param=param,
        code="invalid_value",
    )


def unsupported_error(param: str, hint: str) -> BadRequestError:
    """Return the error for a parameter that this server does not support."""
    return BadRequestError(
        f"Unsupported parameter: '{param}'. {hint}", param=param, code="unsupported_parameter"
    )


def combination_error(message: str, param: str) -> BadRequestError:
    """Return the error for a field that is not allowed together with another field."""
    return BadRequestError(message, param=param, code="invalid_parameter_combination")


def too_long_error(param: str, code: str, limit: str) -> BadRequestError:
    """Return the error for a value that exceeds `limit`, a text such as "16 pairs"."""
    return BadRequestError(f"Invalid '{param}': more than {limit}.", param=param, code=code)


def _check_bounds(
    value: float, param: str, minimum: float | None, maximum: float | None, kind: str
) -> None:
    if minimum is not None and value < minimum:
        bound, code, side = f">= {minimum}", f"{kind}_below_min_value", "below minimum"
    elif maximum is not None and value > maximum:
        bound, code, side = f"<= {maximum}", f"{kind}_above_max_value", "above maximum"
    else:
        return
    raise BadRequestError(
        f"Invalid '{param}': {kind} {side} value. Expected a value {bound}, but got {value}"
        " instead.",
        param=param,
        code=code,
    )


def check_request_body(body: object, **required: Check) -> dict[str, Any]:
    """Return the body if it is an object with the required fields, which must pass their checks.
    Raises BadRequestError."""
    if not isinstance(body, dict):
        raise BadRequestError("The request body must be a JSON object.")
    for name, check in required.items():
        require_field(body, name, name)
        check(body[name], name)
    return body
