"""Checks that request bodies of every API are made of, and the errors that they raise.

A check is a function that raises BadRequestError, in OpenAI's words, for a value of the wrong type
or outside its bounds. The tables of chat_parameters, responses_shapes and messages_request combine
them.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from proxy.errors import BadRequestError

Check = Callable[[Any, str], None]
"""Takes a value and its path in the request, such as `messages[0].role`, for the error."""

_NAMES: tuple[tuple[type, str], ...] = (
    (bool, "a boolean"),
    (int, "an integer"),
    (float, "a decimal"),
    (str, "a string"),
    (list, "an array"),
    (dict, "an object"),
)


def anything(value: Any, param: str) -> None:
    """Accept any value: the code that reads it checks it, or the backend does."""


def boolean(value: Any, param: str) -> None:
    """Accept true and false."""
    if not isinstance(value, bool):
        raise wrong_type(param, "a boolean", value)


def text(value: Any, param: str) -> None:
    """Accept a string."""
    if not isinstance(value, str):
        raise wrong_type(param, "a string", value)


def mapping(value: Any, param: str) -> None:
    """Accept any object."""
    if not isinstance(value, dict):
        raise wrong_type(param, "an object", value)


def integer(minimum: int | None = None, maximum: int | None = None) -> Check:
    """Return a check for a whole number within bounds."""

    def check(value: Any, param: str) -> None:
        if not isinstance(value, int) or isinstance(value, bool):
            raise wrong_type(param, "an integer", value)
        _within(value, param, minimum, maximum, "integer")

    return check


def number(minimum: float | None = None, maximum: float | None = None) -> Check:
    """Return a check for a finite number within bounds."""

    def check(value: Any, param: str) -> None:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise wrong_type(param, "a decimal", value)
        _within(value, param, minimum, maximum, "decimal")
        if not math.isfinite(value):
            raise BadRequestError(
                f"Invalid '{param}': expected a finite decimal.", param=param, code="invalid_value"
            )

    return check


def one_of(*values: str) -> Check:
    """Return a check for one of a few words."""

    def check(value: Any, param: str) -> None:
        text(value, param)
        if value not in values:
            raise unsupported_value(value, values, param)

    return check


def union(words: str, *kinds: type, checks: Mapping[type, Check] | None = None) -> Check:
    """Return a check for a value of one of several types, and for the value by its type."""

    def check(value: Any, param: str) -> None:
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise wrong_type(param, f"one of {words}", value)
        if further := (checks or {}).get(type(value)):
            further(value, param)

    return check


def array(of: Check, *, minimum: int = 0) -> Check:
    """Return a check for a list and each of its items."""

    def check(value: Any, param: str) -> None:
        if not isinstance(value, list):
            raise wrong_type(param, "an array", value)
        if len(value) < minimum:
            raise BadRequestError(
                f"Invalid '{param}': empty array. Expected an array with minimum length {minimum},"
                " but got an empty array instead.",
                param=param,
                code="empty_array",
            )
        for index, item in enumerate(value):
            of(item, f"{param}[{index}]")

    return check


def text_or_parts(of: Check, *, minimum: int = 0) -> Check:
    """Return a check for content: a string, or a list of parts."""
    parts = array(of, minimum=minimum)
    return union("a string or array of objects", str, list, checks={list: parts})


def text_or_object(of: Check, words: Check = anything) -> Check:
    """Return a check for an object, or a string that stands for one."""
    return union("a string or an object", str, dict, checks={str: words, dict: of})


def fields(known: Mapping[str, Check], *, required: Collection[str] = ()) -> Check:
    """Return a check for an object with these fields. Other fields are accepted unread; null is a
    value for a required field only."""

    def check(value: Any, param: str) -> None:
        mapping(value, param)
        for name in required:
            require(value, name, f"{param}.{name}")
        for name, of in known.items():
            if name in required or value.get(name) is not None:
                of(value[name], f"{param}.{name}")

    return check


def object_with(
    required: Mapping[str, Check], optional: Mapping[str, Check] | None = None
) -> Check:
    """Return a check for an object, as `fields` does, from its required and its optional fields."""
    return fields({**required, **(optional or {})}, required=required)


def discriminated(kinds: Mapping[str, Check], others: Check | None = None) -> Check:
    """Return a check that picks the check for an object by its `type`. A type that is not among
    `kinds` is refused unless `others` is given."""

    def check(value: Any, param: str) -> None:
        mapping(value, param)
        require(value, "type", f"{param}.type")
        text(value["type"], f"{param}.type")
        of = kinds.get(value["type"], others)
        if of is None:
            raise unsupported_value(value["type"], kinds, f"{param}.type")
        of(value, param)

    return check


def values(of: Check) -> Check:
    """Return a check for an object whose values all pass one check."""

    def check(value: Any, param: str) -> None:
        mapping(value, param)
        for name, item in value.items():
            of(item, f"{param}.{name}")

    return check


def require(value: Mapping[str, Any], name: str, param: str) -> None:
    """Raise BadRequestError if an object lacks a field; `param` is the path of the field."""
    if name not in value:
        raise missing(param)


def missing(param: str) -> BadRequestError:
    """Return the error for a required field that is missing."""
    return BadRequestError(
        f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
    )


def wrong_type(param: str, expected: str, value: Any) -> BadRequestError:
    """Return the error for a value of the wrong type."""
    names = (name for kind, name in _NAMES if isinstance(value, kind))
    got = next(names, "null")
    return BadRequestError(
        f"Invalid type for '{param}': expected {expected}, but got {got} instead.",
        param=param,
        code="invalid_type",
    )


def unsupported_value(value: str, supported: Iterable[str], param: str) -> BadRequestError:
    """Return the error for a word that is not supported."""
    words = [f"'{word}'" for word in supported]
    listed = " and ".join(words)
    if len(words) > 2:
        listed = f"{', '.join(words[:-1])}, and {words[-1]}"
    return BadRequestError(
        f"Invalid value: '{value}'. Supported values are: {listed}.",
        param=param,
        code="invalid_value",
    )


def unsupported(param: str, words: str) -> BadRequestError:
    """Return the error for a parameter of OpenAI's that this server does not have."""
    return BadRequestError(
        f"Unsupported parameter: '{param}'. {words}", param=param, code="unsupported_parameter"
    )


def invalid_combination(words: str, param: str) -> BadRequestError:
    """Return the error for a field that another field rules out."""
    return BadRequestError(words, param=param, code="invalid_parameter_combination")


def too_long(param: str, code: str, most: str) -> BadRequestError:
    """Return the error for a value that is too long; `most` names the bound."""
    return BadRequestError(f"Invalid '{param}': more than {most}.", param=param, code=code)


def _within(
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


def request_body(body: object, **required: Check) -> dict[str, Any]:
    """Return a request body that is an object with these fields. Raises BadRequestError."""
    if not isinstance(body, dict):
        raise BadRequestError("The request body must be a JSON object.")
    for name, check in required.items():
        require(body, name, name)
        check(body[name], name)
    return body
