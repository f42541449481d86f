"""The policy on system calls as the kernel takes it: a program of classic BPF.

Programs for another architecture than the machine's own (i386, x32) are killed, for their system
calls have other numbers. The rest is a search tree over the numbers; a recent kernel works out
beforehand which numbers are always allowed and runs nothing for them.
"""

import errno
import platform
import struct
from collections.abc import Mapping
from functools import cache

from sandbox_runtime.backends.seccomp import (
    ABSENT,
    ALLOWED,
    EXAMINED,
    REFUSED,
    NoBitOf,
    NoneOf,
    OneOf,
    Rule,
)
from sandbox_runtime.backends.system_calls import NUMBERS

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_KILL, _REFUSE, _ALLOW = 0x8000_0000, 0x0005_0000, 0x7FFF_0000
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_AUDIT_NUMBERS = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
_X32_BIT = 0x4000_0000

_Code = list[bytes]


@cache  # every sandbox has the same
def seccomp_filter(machine: str | None = None) -> bytes:
    """The filter for a machine (this one); ValueError where its system calls are not known."""
    machine = machine or platform.machine()
    if machine not in NUMBERS:
        raise ValueError(f"there is no system call filter for {machine!r}")
    code = [
        *_load(_ARCHITECTURE_AT),
        *_jump(_EQUAL, _AUDIT_NUMBERS[machine], 1, 0),
        *_return(_KILL),
        *_load(_NUMBER_AT),
        *_search(_ranges(NUMBERS[machine])),
    ]
    return b"".join(code)


def _ranges(numbers: Mapping[str, int]) -> list[tuple[int, _Code]]:
    """What to do with a system call, from each number on to the next in the list."""
    verdicts = {number: _verdict(name) for name, number in numbers.items()}
    unknown = _return(_REFUSE | errno.ENOSYS)
    ranges: list[tuple[int, _Code]] = []
    for number in range(max(verdicts) + 2):
        verdict = verdicts.get(number, unknown)
        if not ranges or ranges[-1][1] != verdict:
            ranges.append((number, verdict))
    return [*ranges, (_X32_BIT, _return(_KILL))]


def _verdict(name: str) -> _Code:
    if name in EXAMINED:
        return _examine(EXAMINED[name])
    if name in ALLOWED:
        return _return(_ALLOW)
    assert name in REFUSED | ABSENT
    return _return(_REFUSE | (errno.EPERM if name in REFUSED else errno.ENOSYS))


def _examine(rule: Rule) -> _Code:
    refuse = _REFUSE | errno.EPERM
    match rule:
        case NoBitOf(argument, mask):
            test = _jump(_ANY_BIT, mask, 0, 1)
            return [*_load_argument(argument), *test, *_return(refuse), *_return(_ALLOW)]
        case OneOf(argument, values, error):
            return _when_one_of(argument, values, _ALLOW, _REFUSE | error)
        case NoneOf(argument, values):
            return _when_one_of(argument, values, refuse, _ALLOW)


def _when_one_of(argument: int, values: tuple[int, ...], then: int, otherwise: int) -> _Code:
    code = _load_argument(argument)
    for position, value in enumerate(values):
        code += _jump(_EQUAL, value, len(values) - position, 0)
    return [*code, *_return(otherwise), *_return(then)]


def _search(ranges: list[tuple[int, _Code]]) -> _Code:
    """Find the range of the number that is loaded, by halves."""
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    below, above = _search(ranges[:middle]), _search(ranges[middle:])
    return [*_jump(_AT_LEAST, ranges[middle][0], len(below), 0), *below, *above]


def _load_argument(index: int) -> _Code:
    return _load(_ARGUMENTS_AT + 8 * index)


def _load(offset: int) -> _Code:
    return [struct.pack("<HBBI", _LOAD, 0, 0, offset)]


def _jump(test: int, value: int, if_true: int, if_false: int) -> _Code:
    return [struct.pack("<HBBI", test, if_true, if_false, value)]


def _return(verdict: int) -> _Code:
    return [struct.pack("<HBBI", _RETURN, 0, 0, verdict)]
