"""A system call filter for bubblewrap: everything is allowed but what only attacks and admins need.

The output is classic BPF as the kernel takes it. Programs for another architecture than the
machine's own (i386, x32) are killed, for their system calls have other numbers.
"""

import errno
import platform
import struct
from dataclasses import dataclass

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_KILL, _REFUSE, _ALLOW = 0x8000_0000, 0x0005_0000, 0x7FFF_0000
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_X32_BIT = 0x4000_0000

_NEW_NAMESPACES = 0x7E02_0000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""
_NEW_TIME_NAMESPACE = 0x80
"""CLONE_NEWTIME; to clone() that bit means something else."""

_UNIX_AND_INTERNET = (1, 2, 10)
_HARMLESS_PERSONALITIES = (0, 8, 0xFFFF_FFFF)
"""Linux, 32-bit Linux (`setarch`) and the question which one is in force."""
_TERMINAL_ATTACKS = (0x5412, 0x541C, 0x5423)
"""TIOCSTI and TIOCLINUX type on somebody's terminal; TIOCSETD loads line disciplines."""

_X86_64, _AARCH64 = 0, 1
_Numbers = dict[str, tuple[int | None, int | None]]

REFUSED: _Numbers = {
    # other processes' memory and descriptors
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    # keyrings are not divided by namespaces
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # large attack surface in the kernel, no use in a sandbox
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "fanotify_init": (300, 262),
    "vmsplice": (278, 75),
    "lookup_dcookie": (212, 18),
    "nfsservctl": (180, 42),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    "sysfs": (139, None),
    "_sysctl": (156, None),
    # mounts and other namespaces
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "setns": (308, 268),
    # files by handle escape from a mount
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # the machine itself
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "iopl": (172, None),
    "ioperm": (173, None),
}
ABSENT: _Numbers = {
    # programs have a second way when the kernel says that it does not know these
    "clone3": (435, 435),  # its flags lie in memory, where no filter can look: glibc takes clone
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
}
EXAMINED: dict[str, tuple[int, int]] = {
    "clone": (56, 220),
    "unshare": (272, 97),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "personality": (135, 92),
    "ioctl": (16, 29),
}


@dataclass(frozen=True, slots=True)
class _Architecture:
    audit: int
    column: int
    has_x32: bool


_ARCHITECTURES = {
    "x86_64": _Architecture(0xC000_003E, _X86_64, has_x32=True),
    "aarch64": _Architecture(0xC000_00B7, _AARCH64, has_x32=False),
}


def seccomp_filter(machine: str | None = None) -> bytes:
    """The filter for a machine (this one); ValueError where its system calls are not known."""
    machine = machine or platform.machine()
    architecture = _ARCHITECTURES.get(machine)
    if architecture is None:
        raise ValueError(f"there is no system call filter for {machine!r}")
    column = architecture.column
    code = [
        *_load(_ARCHITECTURE_AT),
        *_jump(_EQUAL, architecture.audit, 1, 0),
        *_return(_KILL),
        *_load(_NUMBER_AT),
    ]
    if architecture.has_x32:
        code += [*_jump(_AT_LEAST, _X32_BIT, 0, 1), *_return(_KILL)]
    code += _refuse_all(REFUSED, column, errno.EPERM) + _refuse_all(ABSENT, column, errno.ENOSYS)
    code += _examine({name: numbers[column] for name, numbers in EXAMINED.items()})
    return b"".join([*code, *_return(_ALLOW)])


def _refuse_all(calls: _Numbers, column: int, error: int) -> list[bytes]:
    code: list[bytes] = []
    for numbers in calls.values():
        number = numbers[column]
        if number is not None:
            code += _when(number, _return(_REFUSE | error))
    return code


def _examine(number: dict[str, int]) -> list[bytes]:
    """The calls that an argument makes good or bad."""
    refuse, no_family = _REFUSE | errno.EPERM, _REFUSE | errno.EAFNOSUPPORT
    families = _one_of(0, _UNIX_AND_INTERNET, _ALLOW, no_family)
    personalities = _one_of(0, _HARMLESS_PERSONALITIES, _ALLOW, refuse)
    return [
        *_when(number["clone"], _any_bit(0, _NEW_NAMESPACES, refuse)),
        *_when(number["unshare"], _any_bit(0, _NEW_NAMESPACES | _NEW_TIME_NAMESPACE, refuse)),
        *_when(number["socket"], families),
        *_when(number["socketpair"], families),
        *_when(number["personality"], personalities),
        *_when(number["ioctl"], _one_of(1, _TERMINAL_ATTACKS, refuse, _ALLOW)),
    ]


def _when(number: int, body: list[bytes]) -> list[bytes]:
    """Do `body`, which ends in a return, for this system call only."""
    return [*_jump(_EQUAL, number, 0, len(body)), *body]


def _any_bit(argument: int, mask: int, then: int) -> list[bytes]:
    return [
        *_load_argument(argument),
        *_jump(_ANY_BIT, mask, 0, 1),
        *_return(then),
        *_return(_ALLOW),
    ]


def _one_of(argument: int, values: tuple[int, ...], then: int, otherwise: int) -> list[bytes]:
    code = _load_argument(argument)
    for position, value in enumerate(values):
        code += _jump(_EQUAL, value, len(values) - position, 0)
    return [*code, *_return(otherwise), *_return(then)]


def _load_argument(index: int) -> list[bytes]:
    # The lower half: the kernel takes all arguments examined here as 32-bit numbers.
    return _load(_ARGUMENTS_AT + 8 * index)


def _load(offset: int) -> list[bytes]:
    return [struct.pack("<HBBI", _LOAD, 0, 0, offset)]


def _jump(test: int, value: int, if_true: int, if_false: int) -> list[bytes]:
    return [struct.pack("<HBBI", test, if_true, if_false, value)]


def _return(verdict: int) -> list[bytes]:
    return [struct.pack("<HBBI", _RETURN, 0, 0, verdict)]
