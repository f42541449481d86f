"""Which system calls a sandbox may make.

An allowlist: what is not in the table of system calls does not exist in a sandbox, and neither does
what a later kernel adds. Of the table everything is allowed but what is named here. `system_calls`
has the numbers, `seccomp_filter` makes of this what the kernel takes, `docker_seccomp` what Docker
takes: there is one policy for both.
"""

import errno
from collections.abc import Mapping
from dataclasses import dataclass

from sandbox_runtime.backends.system_calls import NUMBERS


@dataclass(frozen=True, slots=True)
class NoBitOf:
    """Allowed while the argument has none of these bits."""

    argument: int
    mask: int


@dataclass(frozen=True, slots=True)
class OneOf:
    """Allowed with one of these values of the argument."""

    argument: int
    values: tuple[int, ...]
    error: int = errno.EPERM


@dataclass(frozen=True, slots=True)
class NoneOf:
    """Allowed but with one of these values of the argument."""

    argument: int
    values: tuple[int, ...]


Rule = NoBitOf | OneOf | NoneOf

_NEW_NAMESPACES = 0x7E02_0000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""
_NEW_TIME_NAMESPACE = 0x80
"""CLONE_NEWTIME; to clone() that bit means something else."""
_UNIX_AND_INTERNET = (1, 2, 10)
_HARMLESS_PERSONALITIES = (0, 8, 0xFFFF_FFFF)
"""Linux, 32-bit Linux (`setarch`) and the question which one is in force."""
_TERMINAL_ATTACKS = (0x5412, 0x541C, 0x5423)
"""TIOCSTI and TIOCLINUX type on somebody's terminal; TIOCSETD loads line disciplines."""
_MAP_HUGETLB, _MFD_HUGETLB, _SHM_HUGETLB = 0x4_0000, 0x4, 0x800
"""The host reserves huge pages for its own programs, and no memory limit counts them. Programs that
would like some take ordinary pages when they get none."""

EXAMINED: Mapping[str, Rule] = {
    "clone": NoBitOf(0, _NEW_NAMESPACES),
    "unshare": NoBitOf(0, _NEW_NAMESPACES | _NEW_TIME_NAMESPACE),
    "socket": OneOf(0, _UNIX_AND_INTERNET, errno.EAFNOSUPPORT),
    "socketpair": OneOf(0, _UNIX_AND_INTERNET, errno.EAFNOSUPPORT),
    "personality": OneOf(0, _HARMLESS_PERSONALITIES),
    "ioctl": NoneOf(1, _TERMINAL_ATTACKS),
    "mmap": NoBitOf(3, _MAP_HUGETLB),
    "memfd_create": NoBitOf(1, _MFD_HUGETLB),
    "shmget": NoBitOf(2, _SHM_HUGETLB),
}
"""Calls that an argument makes good or bad. All that the kernel looks at is in the lower halves of
these arguments, so only those are examined."""

_IO_URING = ("io_uring_setup", "io_uring_enter", "io_uring_register")
_KERNEL_AIO = """
io_setup io_destroy io_submit io_cancel io_getevents io_pgetevents
"""
ABSENT = frozenset(("clone3", *_IO_URING, *_KERNEL_AIO.split(), "inotify_init", "inotify_init1"))
"""Programs have a second way when the kernel says that it does not know these. clone3's flags lie
in memory, where no filter can look: the C library takes clone instead. Who cannot watch files looks
again and again: inotify's instances are counted by the host's user, who has few. The events of
asynchronous I/O are counted once for the whole host (fs.aio-max-nr): databases use threads instead,
as the C library's aio_read() always does."""

_OTHER_PROCESSES = """
ptrace process_vm_readv process_vm_writev process_madvise kcmp pidfd_getfd
"""
_KEYRINGS = "add_key request_key keyctl"
"""They are not divided by namespaces."""
_MOUNTS_AND_NAMESPACES = """
mount umount2 pivot_root chroot open_tree open_tree_attr move_mount fsopen fsconfig fsmount fspick
mount_setattr statmount listmount setns name_to_handle_at open_by_handle_at
"""
_LARGE_ATTACK_SURFACE = """
bpf perf_event_open userfaultfd fanotify_init fanotify_mark vmsplice lookup_dcookie modify_ldt
memfd_secret sysfs mbind set_mempolicy set_mempolicy_home_node migrate_pages move_pages
"""
"""In the kernel, and without use in a sandbox."""
_THE_MACHINE = """
kexec_load kexec_file_load init_module finit_module delete_module reboot swapon swapoff acct syslog
vhangup quotactl quotactl_fd settimeofday clock_settime clock_adjtime adjtimex iopl ioperm
sethostname setdomainname lsm_set_self_attr
"""
REFUSED = frozenset(
    f"{_OTHER_PROCESSES} {_KEYRINGS} {_MOUNTS_AND_NAMESPACES} {_LARGE_ATTACK_SURFACE}"
    f" {_THE_MACHINE}".split()
)
"""Not permitted, with any arguments."""

ALLOWED = frozenset().union(*NUMBERS.values()) - REFUSED - ABSENT - EXAMINED.keys()
"""With any arguments."""
