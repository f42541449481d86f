"""What a JSON value must be; a value that is not is refused in OpenAI's words."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from proxy.errors import BadRequestError

Check = Callable[[Any, str], None]
"""Raises BadRequestError for a value, which is named as the client would write its place."""

_NAMES: tuple[tuple[type, str], ...] = (
    (bool, "a boolean"),
    (int, "an integer"),
    (float, "a decimal"),
    (str, "a string"),
    (list, "an array"),
    (dict, "an object"),
)


def anything(value: Any, param: str) -> None:
    """Carried as it is: whoever reads it checks it."""


def boolean(value: Any, param: str) -> None:
    """true or false."""
    if not isinstance(value, bool):
        raise wrong_type(param, "a boolean", value)


def text(value: Any, param: str) -> None:
    """A string."""
    if not isinstance(value, str):
        raise wrong_type(param, "a string", value)


def mapping(value: Any, param: str) -> None:
    """Any object."""
    if not isinstance(value, dict):
        raise wrong_type(param, "an object", value)


def integer(minimum: int | None = None, maximum: int | None = None) -> Check:
    """A whole number within bounds."""

    def check(value: Any, param: str) -> None:
        if not isinstance(value, int) or isinstance(value, bool):
            raise wrong_type(param, "an integer", value)
        _within(value, param, minimum, maximum, "integer")

    return check


def number(minimum: float | None = None, maximum: float | None = None) -> Check:
    """A finite number within bounds."""

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
    """One of a few words."""

    def check(value: Any, param: str) -> None:
        text(value, param)
        if value not in values:
            raise not_among(value, values, param)

    return check


def either(words: str, *kinds: type, checks: Mapping[type, Check] | None = None) -> Check:
    """A value of one of several types; `checks` look at it further."""

    def check(value: Any, param: str) -> None:
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise wrong_type(param, f"one of {words}", value)
        if further := (checks or {}).get(type(value)):
            further(value, param)

    return check


def array(of: Check, *, minimum: int = 0) -> Check:
    """A list, each of its items checked."""

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
    """A string, or a list of what it may consist of."""
    parts = array(of, minimum=minimum)
    return either("a string or array of objects", str, list, checks={list: parts})


def text_or_object(of: Check, words: Check = anything) -> Check:
    """An object, or a string in its stead."""
    return either("a string or an object", str, dict, checks={str: words, dict: of})


def fields(known: Mapping[str, Check], *, required: Collection[str] = ()) -> Check:
    """An object; fields that are not named are carried, and null stands for none where one need not
    be there."""

    def check(value: Any, param: str) -> None:
        mapping(value, param)
        for name in required:
            require(value, name, f"{param}.{name}")
        for name, of in known.items():
            if name in required or value.get(name) is not None:
                of(value[name], f"{param}.{name}")

    return check


def having(required: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    """The same, said in two parts."""
    return fields({**required, **(optional or {})}, required=required)


def tagged(kinds: Mapping[str, Check], others: Check | None = None) -> Check:
    """An object whose `type` says what else it must have; `others` is for such as are not named,
    which are else refused."""

    def check(value: Any, param: str) -> None:
        mapping(value, param)
        require(value, "type", f"{param}.type")
        text(value["type"], f"{param}.type")
        of = kinds.get(value["type"], others)
        if of is None:
            raise not_among(value["type"], kinds, f"{param}.type")
        of(value, param)

    return check


def values(of: Check) -> Check:
    """An object with values of one kind."""

    def check(value: Any, param: str) -> None:
        mapping(value, param)
        for name, item in value.items():
            of(item, f"{param}.{name}")

    return check


def require(value: Mapping[str, Any], name: str, param: str) -> None:
    """Raise BadRequestError unless a field is there."""
    if name not in value:
        raise missing(param)


def missing(param: str) -> BadRequestError:
    """The error for a field that is not there."""
    return BadRequestError(
        f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
    )


def wrong_type(param: str, expected: str, value: Any) -> BadRequestError:
    """The error for a value of another type."""
    names = (name for kind, name in _NAMES if isinstance(value, kind))
    got = next(names, "null")
    return BadRequestError(
        f"Invalid type for '{param}': expected {expected}, but got {got} instead.",
        param=param,
        code="invalid_type",
    )


def not_among(value: str, supported: Iterable[str], param: str) -> BadRequestError:
    """The error for a word that means nothing here."""
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
    """The error for what OpenAI has and this server has not."""
    return BadRequestError(
        f"Unsupported parameter: '{param}'. {words}", param=param, code="unsupported_parameter"
    )


def not_together(words: str, param: str) -> BadRequestError:
    """The error for a field that another one rules out."""
    return BadRequestError(words, param=param, code="invalid_parameter_combination")


def too_much(param: str, code: str, most: str) -> BadRequestError:
    """The error for what is longer than it may be."""
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
    """The body, if it is an object with these fields. Raises BadRequestError."""
    if not isinstance(body, dict):
        raise BadRequestError("The request body must be a JSON object.")
    for name, check in required.items():
        require(body, name, name)
        check(body[name], name)
    return body
