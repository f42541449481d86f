"""The filter, run by an interpreter of classic BPF; test_bubblewrap.py has the kernel run it."""

import errno
import re
import struct
from pathlib import Path

import pytest

from sandbox_runtime.backends.seccomp import ABSENT, EXAMINED, REFUSED, seccomp_filter

ALLOW, KILL = "allow", "kill"
X86_64, AARCH64, I386 = 0xC000_003E, 0xC000_00B7, 0x4000_0003
MACHINES = [("x86_64", X86_64, 0), ("aarch64", AARCH64, 1)]
LINUX_HEADERS = {
    0: (Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), r"__NR_(\w+)\s+(\d+)"),
    1: (Path("/usr/include/asm-generic/unistd.h"), r"__NR(?:3264)?_(\w+)\s+(\d+)"),
}
every_machine = pytest.mark.parametrize(("machine", "audit", "column"), MACHINES)


def verdict(code: bytes, audit: int, number: int | None, *arguments: int) -> str | int:
    """What the kernel would do: allow, kill, or fail with an errno."""
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
def test_ordinary_calls_are_allowed(machine: str, audit: int, column: int) -> None:
    code = seccomp_filter(machine)
    listed = {
        numbers[column] for table in (REFUSED, ABSENT, EXAMINED) for numbers in table.values()
    }
    others = [number for number in range(500) if number not in listed]
    assert {verdict(code, audit, number) for number in others} == {ALLOW}


@every_machine
def test_listed_calls_are_refused_or_unknown(machine: str, audit: int, column: int) -> None:
    code = seccomp_filter(machine)
    refused = [numbers[column] for numbers in REFUSED.values() if numbers[column] is not None]
    absent = [numbers[column] for numbers in ABSENT.values() if numbers[column] is not None]
    assert {verdict(code, audit, number) for number in refused} == {errno.EPERM}
    assert {verdict(code, audit, number) for number in absent} == {errno.ENOSYS}


@every_machine
def test_another_architecture_is_killed(machine: str, audit: int, column: int) -> None:
    foreign = {X86_64, AARCH64, I386} - {audit}
    assert {verdict(seccomp_filter(machine), each, 0) for each in foreign} == {KILL}


def test_x32_is_killed_on_x86_64() -> None:
    assert verdict(seccomp_filter("x86_64"), X86_64, 0x4000_0000) == KILL


@every_machine
def test_processes_and_threads_can_be_made_but_no_namespaces(
    machine: str, audit: int, column: int
) -> None:
    code = seccomp_filter(machine)
    clone, unshare = EXAMINED["clone"][column], EXAMINED["unshare"][column]
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
def test_only_unix_and_internet_sockets_exist(
    machine: str, audit: int, column: int, call: str
) -> None:
    code, number = seccomp_filter(machine), EXAMINED[call][column]
    allowed = {family for family in range(64) if verdict(code, audit, number, family) == ALLOW}
    assert allowed == {1, 2, 10}
    assert verdict(code, audit, number, 16) == errno.EAFNOSUPPORT


@every_machine
def test_address_randomisation_cannot_be_switched_off(
    machine: str, audit: int, column: int
) -> None:
    code, number = seccomp_filter(machine), EXAMINED["personality"][column]
    assert verdict(code, audit, number, 0xFFFF_FFFF) == ALLOW
    assert verdict(code, audit, number, 0) == ALLOW
    assert verdict(code, audit, number, 0x0004_0000) == errno.EPERM


@every_machine
def test_nothing_can_be_typed_on_a_terminal(machine: str, audit: int, column: int) -> None:
    code, number = seccomp_filter(machine), EXAMINED["ioctl"][column]
    window_size, type_a_letter = 0x5413, 0x5412
    assert verdict(code, audit, number, 0, window_size) == ALLOW
    assert verdict(code, audit, number, 0, type_a_letter) == errno.EPERM
    # The kernel looks at the lower half of that argument only.
    assert verdict(code, audit, number, 0, 1 << 32 | type_a_letter) == errno.EPERM


@every_machine
def test_numbers_are_those_of_the_kernel_headers(machine: str, audit: int, column: int) -> None:
    header, pattern = LINUX_HEADERS[column]
    if not header.is_file():
        pytest.skip(f"{header} is not installed (linux-libc-dev)")
    numbers = {name: int(number) for name, number in re.findall(pattern, header.read_text())}
    ours = {name: row[column] for name, row in {**REFUSED, **ABSENT, **EXAMINED}.items()}
    newer_than_headers = {"open_tree_attr"}
    assert {name: number for name, number in ours.items() if name not in newer_than_headers} == {
        name: numbers.get(name) for name in ours if name not in newer_than_headers
    }


def test_an_unknown_machine_is_refused() -> None:
    with pytest.raises(ValueError, match="'riscv64'"):
        seccomp_filter("riscv64")
