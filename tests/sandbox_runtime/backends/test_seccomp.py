"""The policy on system calls, run by an interpreter of classic BPF and one of Docker's profiles.

The kernel itself runs it in test_bubblewrap.py and test_docker_isolation.py.
"""

import errno
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_runtime.backends.seccomp import (
    ALLOWED,
    ARG_FILTERED,
    REFUSED,
    SYSCALL_NUMBERS,
    UNIMPLEMENTED,
    bpf_filter,
    docker_seccomp_profile,
)

ALLOW, KILL = "allow", "kill"
X86_64, AARCH64, I386 = 0xC000_003E, 0xC000_00B7, 0x4000_0003
LINUX_HEADERS = {
    "x86_64": (Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), r"__NR_(\w+)\s+(\d+)"),
    "aarch64": (Path("/usr/include/asm-generic/unistd.h"), r"__NR(?:3264)?_(\w+)\s+(\d+)"),
}
every_machine = pytest.mark.parametrize(
    ("machine", "audit"), [("x86_64", X86_64), ("aarch64", AARCH64)]
)
UNIX, IPV4, IPV6, NETLINK, PACKET, ALG, VSOCK = 1, 2, 10, 16, 17, 38, 40


def verdict(code: bytes, audit: int, number: int | None, *arguments: int) -> str | int:
    """Return the verdict of the kernel: allow, kill, or an errno."""
    data = struct.pack("<IIQ6Q", number, audit, 0, *arguments, *[0] * (6 - len(arguments)))
    program: list[tuple[int, int, int, int]] = list(struct.iter_unpack("<HBBI", code))
    accumulator = at = 0
    while True:
        operation, if_true, if_false, value = program[at]
        at += 1
        match operation:
            case 0x20:
                (accumulator,) = struct.unpack_from("<I", data, value)
            case 0x15:
                at += if_true if accumulator == value else if_false
            case 0x35:
                at += if_true if accumulator >= value else if_false
            case 0x45:
                at += if_true if accumulator & value else if_false
            case 0x06:
                break
    verdicts: dict[int, str | int] = {0x7FFF_0000: ALLOW, 0x8000_0000: KILL}
    return verdicts.get(value, value & 0xFFFF)


@every_machine
def test_bpf_filter_gives_each_system_call_the_verdict_of_the_policy(
    machine: str, audit: int
) -> None:
    code, numbers = bpf_filter(machine), SYSCALL_NUMBERS[machine]
    verdicts = {name: verdict(code, audit, number) for name, number in numbers.items()}
    assert {verdicts[name] for name in ALLOWED & numbers.keys()} == {ALLOW}
    assert {verdicts[name] for name in REFUSED & numbers.keys()} == {errno.EPERM}
    assert {verdicts[name] for name in UNIMPLEMENTED & numbers.keys()} == {errno.ENOSYS}


def test_ordinary_calls_are_allowed_and_dangerous_calls_are_denied() -> None:
    assert {"read", "openat", "munmap", "execve", "wait4", "futex", "mknod", "seccomp"} <= ALLOWED
    dangerous = ("ptrace", "bpf", "keyctl", "mount", "setns", "kexec_load", "init_module", "syslog")
    assert not ALLOWED & {*dangerous, "io_uring_setup", "userfaultfd", "open_by_handle_at"}
    assert not ALLOWED & {"io_setup", "io_submit"}


@every_machine
def test_unknown_system_call_numbers_fail_with_enosys(machine: str, audit: int) -> None:
    code = bpf_filter(machine)
    unknown = set(range(1000)) - set(SYSCALL_NUMBERS[machine].values())
    assert len(unknown) > 500
    assert {verdict(code, audit, number) for number in unknown} == {errno.ENOSYS}


@every_machine
def test_system_call_of_another_architecture_kills_the_process(machine: str, audit: int) -> None:
    foreign = {X86_64, AARCH64, I386} - {audit}
    assert {verdict(bpf_filter(machine), each, 0) for each in foreign} == {KILL}
    x32 = 0x4000_0000
    assert {verdict(bpf_filter(machine), audit, x32 + n) for n in (0, 1, 500)} == {KILL}


@every_machine
def test_clone_is_allowed_without_namespace_flags(machine: str, audit: int) -> None:
    code = bpf_filter(machine)
    clone, unshare = SYSCALL_NUMBERS[machine]["clone"], SYSCALL_NUMBERS[machine]["unshare"]
    fork, thread, new_time = 0x0120_0011, 0x003D_0F00, 0x80
    assert verdict(code, audit, clone, fork) == ALLOW
    assert verdict(code, audit, clone, thread) == ALLOW
    for namespace in (0x2_0000, *(1 << bit for bit in range(25, 31))):
        assert verdict(code, audit, clone, fork | namespace) == errno.EPERM
        assert verdict(code, audit, unshare, namespace) == errno.EPERM
    assert verdict(code, audit, unshare, new_time) == errno.EPERM
    assert verdict(code, audit, unshare, 0x400) == ALLOW


@every_machine
@pytest.mark.parametrize("call", ["socket", "socketpair"])
def test_only_unix_and_internet_sockets_can_be_created(machine: str, audit: int, call: str) -> None:
    code, number = bpf_filter(machine), SYSCALL_NUMBERS[machine][call]
    allowed = {family for family in range(64) if verdict(code, audit, number, family) == ALLOW}
    assert allowed == {UNIX, IPV4, IPV6}
    for family in (NETLINK, PACKET, ALG, VSOCK):
        assert verdict(code, audit, number, family) == errno.EAFNOSUPPORT


@every_machine
def test_address_randomisation_cannot_be_switched_off(machine: str, audit: int) -> None:
    code, number = bpf_filter(machine), SYSCALL_NUMBERS[machine]["personality"]
    assert verdict(code, audit, number, 0xFFFF_FFFF) == ALLOW
    assert verdict(code, audit, number, 0) == ALLOW
    assert verdict(code, audit, number, 0x0004_0000) == errno.EPERM


@every_machine
def test_ioctl_that_writes_terminal_input_is_refused(machine: str, audit: int) -> None:
    code, number = bpf_filter(machine), SYSCALL_NUMBERS[machine]["ioctl"]
    window_size, type_a_letter = 0x5413, 0x5412
    assert verdict(code, audit, number, 0, window_size) == ALLOW
    assert verdict(code, audit, number, 0, type_a_letter) == errno.EPERM
    # The kernel looks at the lower half of that argument only.
    assert verdict(code, audit, number, 0, 1 << 32 | type_a_letter) == errno.EPERM


@every_machine
@pytest.mark.parametrize(
    ("call", "position", "usual", "huge"),
    [
        ("mmap", 3, 0x22, 0x4_0000),
        ("memfd_create", 1, 0x3, 0x4),
        ("shmget", 2, 0o1600, 0x800),
    ],
)
def test_huge_pages_are_refused(
    machine: str, audit: int, call: str, position: int, usual: int, huge: int
) -> None:
    code, number = bpf_filter(machine), SYSCALL_NUMBERS[machine][call]
    before = [0] * position
    assert verdict(code, audit, number, *before, usual) == ALLOW
    assert verdict(code, audit, number, *before, usual | huge) == errno.EPERM
    one_gigabyte_pages = 30 << 26
    assert verdict(code, audit, number, *before, huge | one_gigabyte_pages) == errno.EPERM


def profile_verdict(profile: dict[str, Any], name: str, *arguments: int) -> str | int:
    """Return the verdict of libseccomp for a Docker profile; at most one entry may match."""
    matching = [
        entry
        for entry in profile["syscalls"]
        if name in entry["names"]
        and all(arguments[a["index"]] & a["value"] == a["valueTwo"] for a in entry.get("args", ()))
    ]
    assert len(matching) < 2
    if not matching:
        return errno.EPERM
    (entry,) = matching
    return ALLOW if entry["action"] == "SCMP_ACT_ALLOW" else int(entry["errnoRet"])


def interesting_arguments() -> Iterator[tuple[int, ...]]:
    """Yield values for the arguments of filtered calls: all values in the rules, and adjacent
    ones."""
    named = {0, 1, 2, 8, 10, 16, 38, 0xFFFF_FFFF, 0x5412, 0x541C, 0x5423, 0x0120_0011}
    named |= {1 << bit for bit in range(32)}
    for value in {each + near for each in named for near in (-1, 0, 1)}:
        if 0 <= value < 1 << 32:
            yield (value,) * 4


@every_machine
def test_docker_seccomp_profile_gives_the_verdicts_of_the_bpf_filter(
    machine: str, audit: int
) -> None:
    code, profile = bpf_filter(machine), json.loads(docker_seccomp_profile())
    for name, number in SYSCALL_NUMBERS[machine].items():
        tries = list(interesting_arguments()) if name in ARG_FILTERED else [(0,) * 4]
        for arguments in tries:
            ours = verdict(code, audit, number, *arguments)
            assert (name, arguments, profile_verdict(profile, name, *arguments)) == (
                name,
                arguments,
                ours,
            )


@every_machine
def test_system_call_numbers_match_the_kernel_headers(machine: str, audit: int) -> None:
    header, pattern = LINUX_HEADERS[machine]
    if not header.is_file():
        pytest.skip(f"{header} is not installed (linux-libc-dev)")
    theirs = {name: int(number) for name, number in re.findall(pattern, header.read_text())}
    # The one table for all architectures calls two of them by what they were in their youth.
    theirs |= {"newfstatat": theirs["fstatat"]} if "fstatat" in theirs else {}
    theirs |= {"sync_file_range": 84} if machine == "aarch64" else {}
    newest = max(number for name, number in theirs.items() if name != "syscalls")
    ours = {name: number for name, number in SYSCALL_NUMBERS[machine].items() if number <= newest}
    assert ours == {name: theirs.get(name) for name in ours}
    assert len(ours) > 300


def test_seccomp_filter_for_an_unknown_architecture_raises_value_error() -> None:
    with pytest.raises(ValueError, match="'riscv64'"):
        bpf_filter("riscv64")
