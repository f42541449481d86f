"""The policy on system calls as Docker takes it: a profile in JSON.

Docker hands it to the runtime, whose library knows each machine's numbers and passes names by that
it does not know. Programs of another architecture are killed, as none is named. (runsc, whose
system calls never reach the host's kernel, does without.)
"""

import errno
import json
from collections.abc import Iterator
from functools import cache

from sandbox_runtime.backends.seccomp import ABSENT, ALLOWED, EXAMINED, NoBitOf, NoneOf, OneOf, Rule

_ARCHITECTURES = ("SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64")
"""Docker takes the engine's own. What is beyond the last number known is then ENOSYS, not EPERM."""
_ARGUMENT_BITS = 32


@cache  # every container has the same
def docker_seccomp_profile() -> str:
    """What `security_opt` takes after `seccomp=`."""
    profile = {
        "archMap": [{"architecture": name} for name in _ARCHITECTURES],
        "defaultAction": "SCMP_ACT_ERRNO",
        "syscalls": [
            {"names": sorted(ALLOWED), "action": "SCMP_ACT_ALLOW"},
            _refuse(sorted(ABSENT), errno.ENOSYS),
            *(entry for name, rule in EXAMINED.items() for entry in _examine(name, rule)),
        ],
    }
    return json.dumps(profile, separators=(",", ":"))


def _examine(name: str, rule: Rule) -> Iterator[dict[str, object]]:
    """Entries for arguments of which none is another's: their order is not to matter."""
    match rule:
        case NoBitOf(argument, mask):
            yield _allow(name, argument, mask, 0)
        case OneOf(argument, values, error):
            for value in values:
                yield _allow(name, argument, (1 << _ARGUMENT_BITS) - 1, value)
            for mask, value in _others(values):
                if error != errno.EPERM:
                    yield _refuse([name], error) | {"args": [_compare(argument, mask, value)]}
        case NoneOf(argument, values):
            for mask, value in _others(values):
                yield _allow(name, argument, mask, value)


def _others(values: tuple[int, ...], bits: int = 0, prefix: int = 0) -> Iterator[tuple[int, int]]:
    """All numbers but these, as masks and what is left of a number under the mask.

    The library can only ask which bits are set, and joins what it is asked of one argument by "or".
    """
    below = _ARGUMENT_BITS - bits
    if not any(value >> below == prefix for value in values):
        yield (1 << _ARGUMENT_BITS) - (1 << below), prefix << below
    elif below:
        yield from _others(values, bits + 1, prefix << 1)
        yield from _others(values, bits + 1, prefix << 1 | 1)


def _allow(name: str, argument: int, mask: int, value: int) -> dict[str, object]:
    args = [_compare(argument, mask, value)]
    return {"names": [name], "action": "SCMP_ACT_ALLOW", "args": args}


def _refuse(names: list[str], error: int) -> dict[str, object]:
    return {"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": error}


def _compare(argument: int, mask: int, value: int) -> dict[str, object]:
    return {"index": argument, "value": mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}
