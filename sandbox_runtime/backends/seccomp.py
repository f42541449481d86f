"""The system calls that a sandbox may make: the policy, and its two encodings.

The policy is an allowlist: system calls that are not in SYSCALL_NUMBERS, such as those that a later
kernel adds, do not exist in a sandbox. Those in the table are allowed unless ARG_FILTERED,
UNIMPLEMENTED or REFUSED names them. `bpf_filter` encodes the policy for the kernel, as
a program of classic BPF, and `docker_seccomp_profile` for Docker, as a profile in JSON.
"""

import errno
import json
import platform
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import count


@dataclass(frozen=True, slots=True)
class MaskClear:
    """Allows a call if the argument with the number `argument` has none of the bits in `mask`."""

    argument: int
    mask: int


@dataclass(frozen=True, slots=True)
class ArgIn:
    """Allows a call if the argument with the number `argument` is one of `values`. Any other call
    fails with `error`."""

    argument: int
    values: tuple[int, ...]
    error: int = errno.EPERM


@dataclass(frozen=True, slots=True)
class ArgNotIn:
    """Allows a call if the argument with the number `argument` is none of `values`."""

    argument: int
    values: tuple[int, ...]


Rule = MaskClear | ArgIn | ArgNotIn

_NEW_NAMESPACES = 0x7E02_0000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""
_NEW_TIME_NAMESPACE = 0x80
"""CLONE_NEWTIME, a flag of unshare(). In the flags of clone() this bit has another meaning."""
_UNIX_AND_INTERNET = (1, 2, 10)
_HARMLESS_PERSONALITIES = (0, 8, 0xFFFF_FFFF)
"""Linux, 32-bit Linux (`setarch`), and the query for the current personality."""
_TERMINAL_ATTACKS = (0x5412, 0x541C, 0x5423)
"""TIOCSTI and TIOCLINUX put input into a terminal; TIOCSETD loads line disciplines."""
_MAP_HUGETLB, _MFD_HUGETLB, _SHM_HUGETLB = 0x4_0000, 0x4, 0x800
"""Flags that request huge pages. The host reserves huge pages for its own programs, and no memory
limit counts them. Programs fall back to ordinary pages."""

ARG_FILTERED: Mapping[str, Rule] = {
    "clone": MaskClear(0, _NEW_NAMESPACES),
    "unshare": MaskClear(0, _NEW_NAMESPACES | _NEW_TIME_NAMESPACE),
    "socket": ArgIn(0, _UNIX_AND_INTERNET, errno.EAFNOSUPPORT),
    "socketpair": ArgIn(0, _UNIX_AND_INTERNET, errno.EAFNOSUPPORT),
    "personality": ArgIn(0, _HARMLESS_PERSONALITIES),
    "ioctl": ArgNotIn(1, _TERMINAL_ATTACKS),
    "mmap": MaskClear(3, _MAP_HUGETLB),
    "memfd_create": MaskClear(1, _MFD_HUGETLB),
    "shmget": MaskClear(2, _SHM_HUGETLB),
}
"""Calls that are allowed only with some values of an argument. The kernel uses only the lower 32
bits of these arguments, so the filters check only those."""

_IO_URING = ("io_uring_setup", "io_uring_enter", "io_uring_register")
_KERNEL_AIO = """
io_setup io_destroy io_submit io_cancel io_getevents io_pgetevents
"""
UNIMPLEMENTED = frozenset(
    ("clone3", *_IO_URING, *_KERNEL_AIO.split(), "inotify_init", "inotify_init1")
)
"""System calls that fail with ENOSYS, as on an older kernel, so that programs use another call. The
flags of clone3 lie in memory, which no filter can read: the C library falls back to clone. A host
user may have only few inotify instances: programs poll files instead. The events of asynchronous
I/O are limited for the whole host (fs.aio-max-nr): databases use threads instead, as aio_read() of
the C library always does."""

_OTHER_PROCESSES = """
ptrace process_vm_readv process_vm_writev process_madvise kcmp pidfd_getfd
"""
_KEYRINGS = "add_key request_key keyctl"
"""System calls for keyrings, which no namespace separates."""
_MOUNTS_AND_NAMESPACES = """
mount umount2 pivot_root chroot open_tree open_tree_attr move_mount fsopen fsconfig fsmount fspick
mount_setattr statmount listmount setns name_to_handle_at open_by_handle_at
"""
_LARGE_ATTACK_SURFACE = """
bpf perf_event_open userfaultfd fanotify_init fanotify_mark vmsplice lookup_dcookie modify_ldt
memfd_secret sysfs mbind set_mempolicy set_mempolicy_home_node migrate_pages move_pages
"""
"""System calls that reach large parts of the kernel and that a sandbox has no use for."""
_MACHINE_CONTROL = """
kexec_load kexec_file_load init_module finit_module delete_module reboot swapon swapoff acct syslog
vhangup quotactl quotactl_fd settimeofday clock_settime clock_adjtime adjtimex iopl ioperm
sethostname setdomainname lsm_set_self_attr
"""
REFUSED = frozenset(
    f"{_OTHER_PROCESSES} {_KEYRINGS} {_MOUNTS_AND_NAMESPACES} {_LARGE_ATTACK_SURFACE}"
    f" {_MACHINE_CONTROL}".split()
)
"""System calls that fail with EPERM, whatever their arguments."""

# Each table lists the names in the order of their numbers; "-" is a number without a call, or of a
# call that the kernel no longer has.
_X86_64 = """
read write open close stat fstat lstat poll lseek mmap mprotect munmap brk rt_sigaction
rt_sigprocmask rt_sigreturn ioctl pread64 pwrite64 readv writev access pipe select sched_yield
mremap msync mincore madvise shmget shmat shmctl dup dup2 pause nanosleep getitimer alarm
setitimer getpid sendfile socket connect accept sendto recvfrom sendmsg recvmsg shutdown bind
listen getsockname getpeername socketpair setsockopt getsockopt clone fork vfork execve exit wait4
kill uname semget semop semctl shmdt msgget msgsnd msgrcv msgctl fcntl flock fsync fdatasync
truncate ftruncate getdents getcwd chdir fchdir rename mkdir rmdir creat link unlink symlink
readlink chmod fchmod chown fchown lchown umask gettimeofday getrlimit getrusage sysinfo times
ptrace getuid syslog getgid setuid setgid geteuid getegid setpgid getppid getpgrp setsid setreuid
setregid getgroups setgroups setresuid getresuid setresgid getresgid getpgid setfsuid setfsgid
getsid capget capset rt_sigpending rt_sigtimedwait rt_sigqueueinfo rt_sigsuspend sigaltstack utime
mknod - personality ustat statfs fstatfs sysfs getpriority setpriority sched_setparam
sched_getparam sched_setscheduler sched_getscheduler sched_get_priority_max sched_get_priority_min
sched_rr_get_interval mlock munlock mlockall munlockall vhangup modify_ldt pivot_root - prctl
arch_prctl adjtimex setrlimit chroot sync acct settimeofday mount umount2 swapon swapoff reboot
sethostname setdomainname iopl ioperm - init_module delete_module - - quotactl - - - - - - gettid
readahead setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr listxattr llistxattr
flistxattr removexattr lremovexattr fremovexattr tkill time futex sched_setaffinity
sched_getaffinity set_thread_area io_setup io_destroy io_getevents io_submit io_cancel
get_thread_area lookup_dcookie epoll_create - - remap_file_pages getdents64 set_tid_address
restart_syscall semtimedop fadvise64 timer_create timer_settime timer_gettime timer_getoverrun
timer_delete clock_settime clock_gettime clock_getres clock_nanosleep exit_group epoll_wait
epoll_ctl tgkill utimes - mbind set_mempolicy get_mempolicy mq_open mq_unlink mq_timedsend
mq_timedreceive mq_notify mq_getsetattr kexec_load waitid add_key request_key keyctl ioprio_set
ioprio_get inotify_init inotify_add_watch inotify_rm_watch migrate_pages openat mkdirat mknodat
fchownat futimesat newfstatat unlinkat renameat linkat symlinkat readlinkat fchmodat faccessat
pselect6 ppoll unshare set_robust_list get_robust_list splice tee sync_file_range vmsplice
move_pages utimensat epoll_pwait signalfd timerfd_create eventfd fallocate timerfd_settime
timerfd_gettime accept4 signalfd4 eventfd2 epoll_create1 dup3 pipe2 inotify_init1 preadv pwritev
rt_tgsigqueueinfo perf_event_open recvmmsg fanotify_init fanotify_mark prlimit64 name_to_handle_at
open_by_handle_at clock_adjtime syncfs sendmmsg setns getcpu process_vm_readv process_vm_writev
kcmp finit_module sched_setattr sched_getattr renameat2 seccomp getrandom memfd_create
kexec_file_load bpf execveat userfaultfd membarrier mlock2 copy_file_range preadv2 pwritev2
pkey_mprotect pkey_alloc pkey_free statx io_pgetevents rseq
"""
_AARCH64 = """
io_setup io_destroy io_submit io_cancel io_getevents setxattr lsetxattr fsetxattr getxattr
lgetxattr fgetxattr listxattr llistxattr flistxattr removexattr lremovexattr fremovexattr getcwd
lookup_dcookie eventfd2 epoll_create1 epoll_ctl epoll_pwait dup dup3 fcntl inotify_init1
inotify_add_watch inotify_rm_watch ioctl ioprio_set ioprio_get flock mknodat mkdirat unlinkat
symlinkat linkat renameat umount2 mount pivot_root - statfs fstatfs truncate ftruncate fallocate
faccessat chdir fchdir chroot fchmod fchmodat fchownat fchown openat close vhangup pipe2 quotactl
getdents64 lseek read write readv writev pread64 pwrite64 preadv pwritev sendfile pselect6 ppoll
signalfd4 vmsplice splice tee readlinkat newfstatat fstat sync fsync fdatasync sync_file_range
timerfd_create timerfd_settime timerfd_gettime utimensat acct capget capset personality exit
exit_group waitid set_tid_address unshare futex set_robust_list get_robust_list nanosleep
getitimer setitimer kexec_load init_module delete_module timer_create timer_gettime
timer_getoverrun timer_settime timer_delete clock_settime clock_gettime clock_getres
clock_nanosleep syslog ptrace sched_setparam sched_setscheduler sched_getscheduler sched_getparam
sched_setaffinity sched_getaffinity sched_yield sched_get_priority_max sched_get_priority_min
sched_rr_get_interval restart_syscall kill tkill tgkill sigaltstack rt_sigsuspend rt_sigaction
rt_sigprocmask rt_sigpending rt_sigtimedwait rt_sigqueueinfo rt_sigreturn setpriority getpriority
reboot setregid setgid setreuid setuid setresuid getresuid setresgid getresgid setfsuid setfsgid
times setpgid getpgid getsid setsid getgroups setgroups uname sethostname setdomainname getrlimit
setrlimit getrusage umask prctl getcpu gettimeofday settimeofday adjtimex getpid getppid getuid
geteuid getgid getegid gettid sysinfo mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify
mq_getsetattr msgget msgctl msgrcv msgsnd semget semctl semtimedop semop shmget shmctl shmat shmdt
socket socketpair bind listen accept connect getsockname getpeername sendto recvfrom setsockopt
getsockopt shutdown sendmsg recvmsg readahead brk munmap mremap add_key request_key keyctl clone
execve mmap fadvise64 swapon swapoff mprotect msync mlock munlock mlockall munlockall mincore
madvise remap_file_pages mbind get_mempolicy set_mempolicy migrate_pages move_pages
rt_tgsigqueueinfo perf_event_open accept4 recvmmsg - - - - - - - - - - - - - - - - wait4 prlimit64
fanotify_init fanotify_mark name_to_handle_at open_by_handle_at clock_adjtime syncfs setns
sendmmsg process_vm_readv process_vm_writev kcmp finit_module sched_setattr sched_getattr
renameat2 seccomp getrandom memfd_create bpf execveat userfaultfd membarrier mlock2
copy_file_range preadv2 pwritev2 pkey_mprotect pkey_alloc pkey_free statx io_pgetevents rseq
kexec_file_load
"""
_FIRST_COMMON_NUMBER = 424
"""From this number on, all machines have the same calls."""
_COMMON_SYSCALLS = """
pidfd_send_signal io_uring_setup io_uring_enter io_uring_register open_tree move_mount fsopen
fsconfig fsmount fspick pidfd_open clone3 close_range openat2 pidfd_getfd faccessat2
process_madvise epoll_pwait2 mount_setattr quotactl_fd landlock_create_ruleset landlock_add_rule
landlock_restrict_self memfd_secret process_mrelease futex_waitv set_mempolicy_home_node cachestat
fchmodat2 map_shadow_stack futex_wake futex_wait futex_requeue statmount listmount
lsm_get_self_attr lsm_set_self_attr lsm_list_modules mseal setxattrat getxattrat listxattrat
removexattrat open_tree_attr file_getattr file_setattr
"""


def _syscall_numbers(*tables: tuple[int, str]) -> Mapping[str, int]:
    numbers = {
        name: number
        for first, names in tables
        for name, number in zip(names.split(), count(first), strict=False)
    }
    del numbers["-"]
    return numbers


SYSCALL_NUMBERS: Mapping[str, Mapping[str, int]] = {
    "x86_64": _syscall_numbers((0, _X86_64), (_FIRST_COMMON_NUMBER, _COMMON_SYSCALLS)),
    "aarch64": _syscall_numbers((0, _AARCH64), (_FIRST_COMMON_NUMBER, _COMMON_SYSCALLS)),
}
"""The numbers of Linux's system calls by machine, as `uname -m` calls it, and by name."""

ALLOWED = (
    frozenset().union(*SYSCALL_NUMBERS.values()) - REFUSED - UNIMPLEMENTED - ARG_FILTERED.keys()
)
"""System calls that are allowed, whatever their arguments."""

# For the kernel: classic BPF.
#
# Programs of another architecture (i386, x32) are killed, because their system calls have other
# numbers. The rest is a binary search over the numbers. Recent kernels cache which numbers are
# always allowed, and do not run the filter for them.

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_KILL, _REFUSE, _ALLOW = 0x8000_0000, 0x0005_0000, 0x7FFF_0000
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET, _ARGUMENTS_OFFSET = 0, 4, 16
_AUDIT_NUMBERS = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
_X32_BIT = 0x4000_0000

_Code = list[bytes]


@cache  # all sandboxes have the same filter
def bpf_filter(machine: str | None = None) -> bytes:
    """Return the filter for a machine, by default this one. Raises ValueError for a machine that is
    not in SYSCALL_NUMBERS."""
    machine = machine or platform.machine()
    if machine not in SYSCALL_NUMBERS:
        raise ValueError(f"there is no system call filter for {machine!r}")
    code = [
        *_load(_ARCHITECTURE_OFFSET),
        *_jump(_EQUAL, _AUDIT_NUMBERS[machine], 1, 0),
        *_return(_KILL),
        *_load(_NUMBER_OFFSET),
        *_search(_number_ranges(SYSCALL_NUMBERS[machine])),
    ]
    return b"".join(code)


def _number_ranges(numbers: Mapping[str, int]) -> list[tuple[int, _Code]]:
    """Return ranges of system call numbers with the same verdict. A range is its first number and
    the verdict; it ends where the next range begins."""
    verdicts = {number: _verdict(name) for name, number in numbers.items()}
    unknown = _return(_REFUSE | errno.ENOSYS)
    ranges: list[tuple[int, _Code]] = []
    for number in range(max(verdicts) + 2):
        verdict = verdicts.get(number, unknown)
        if not ranges or ranges[-1][1] != verdict:
            ranges.append((number, verdict))
    return [*ranges, (_X32_BIT, _return(_KILL))]


def _verdict(name: str) -> _Code:
    if name in ARG_FILTERED:
        return _check_argument(ARG_FILTERED[name])
    if name in ALLOWED:
        return _return(_ALLOW)
    assert name in REFUSED | UNIMPLEMENTED
    return _return(_REFUSE | (errno.EPERM if name in REFUSED else errno.ENOSYS))


def _check_argument(rule: Rule) -> _Code:
    refuse = _REFUSE | errno.EPERM
    match rule:
        case MaskClear(argument, mask):
            test = _jump(_ANY_BIT, mask, 0, 1)
            return [*_load_argument(argument), *test, *_return(refuse), *_return(_ALLOW)]
        case ArgIn(argument, values, error):
            return _branch(argument, values, _ALLOW, _REFUSE | error)
        case ArgNotIn(argument, values):
            return _branch(argument, values, refuse, _ALLOW)


def _branch(argument: int, values: tuple[int, ...], then: int, otherwise: int) -> _Code:
    code = _load_argument(argument)
    for position, value in enumerate(values):
        code += _jump(_EQUAL, value, len(values) - position, 0)
    return [*code, *_return(otherwise), *_return(then)]


def _search(ranges: list[tuple[int, _Code]]) -> _Code:
    """Return code that finds the range of the loaded number by binary search."""
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    below, above = _search(ranges[:middle]), _search(ranges[middle:])
    return [*_jump(_AT_LEAST, ranges[middle][0], len(below), 0), *below, *above]


def _load_argument(index: int) -> _Code:
    return _load(_ARGUMENTS_OFFSET + 8 * index)


def _load(offset: int) -> _Code:
    return [struct.pack("<HBBI", _LOAD, 0, 0, offset)]


def _jump(test: int, value: int, if_true: int, if_false: int) -> _Code:
    return [struct.pack("<HBBI", test, if_true, if_false, value)]


def _return(verdict: int) -> _Code:
    return [struct.pack("<HBBI", _RETURN, 0, 0, verdict)]


# For Docker: a profile in JSON.
#
# Docker passes it to the runtime, whose library knows the numbers of each machine and skips unknown
# names. Programs of other architectures are killed, because the profile does not list them. runsc
# ignores the profile: its system calls never reach the host's kernel.

_ARCHITECTURES = ("SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64")
"""The architectures that the profile lists. A Docker engine uses the entry of its own architecture.
If an architecture has an entry, a number beyond the last known system call fails with ENOSYS."""
_ARGUMENT_BITS = 32


@cache  # all containers have the same profile
def docker_seccomp_profile() -> str:
    """Return the profile that `security_opt` takes after `seccomp=`."""
    architectures = {"archMap": [{"architecture": name} for name in _ARCHITECTURES]}
    return json.dumps({**architectures, **_profile()}, separators=(",", ":"))


def oci_seccomp_profile() -> str:
    """Return the profile in the format of the OCI runtime specification, which the nodes of a
    Kubernetes cluster read from a file."""
    return json.dumps({"architectures": list(_ARCHITECTURES), **_profile()}, indent=1)


def _profile() -> dict[str, object]:
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "syscalls": [
            {"names": sorted(ALLOWED), "action": "SCMP_ACT_ALLOW"},
            _errno_entry(sorted(UNIMPLEMENTED), errno.ENOSYS),
            *(
                entry
                for name, rule in ARG_FILTERED.items()
                for entry in _profile_entries(name, rule)
            ),
        ],
    }


def _profile_entries(name: str, rule: Rule) -> Iterator[dict[str, object]]:
    """Yield the entries of the profile for a rule. Their sets of arguments do not overlap, so that
    their order has no effect."""
    match rule:
        case MaskClear(argument, mask):
            yield _allow_entry(name, argument, mask, 0)
        case ArgIn(argument, values, error):
            for value in values:
                yield _allow_entry(name, argument, (1 << _ARGUMENT_BITS) - 1, value)
            for mask, value in _complement(values):
                if error != errno.EPERM:
                    yield _errno_entry([name], error) | {"args": [_compare(argument, mask, value)]}
        case ArgNotIn(argument, values):
            for mask, value in _complement(values):
                yield _allow_entry(name, argument, mask, value)


def _complement(
    values: tuple[int, ...], bits: int = 0, prefix: int = 0
) -> Iterator[tuple[int, int]]:
    """Yield pairs of a mask and masked bits that together match all numbers except `values`.

    libseccomp can only compare masked bits, and combines comparisons of one argument with "or".
    """
    below = _ARGUMENT_BITS - bits
    if not any(value >> below == prefix for value in values):
        yield (1 << _ARGUMENT_BITS) - (1 << below), prefix << below
    elif below:
        yield from _complement(values, bits + 1, prefix << 1)
        yield from _complement(values, bits + 1, prefix << 1 | 1)


def _allow_entry(name: str, argument: int, mask: int, value: int) -> dict[str, object]:
    args = [_compare(argument, mask, value)]
    return {"names": [name], "action": "SCMP_ACT_ALLOW", "args": args}


def _errno_entry(names: list[str], error: int) -> dict[str, object]:
    return {"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": error}


def _compare(argument: int, mask: int, value: int) -> dict[str, object]:
    return {"index": argument, "value": mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}
