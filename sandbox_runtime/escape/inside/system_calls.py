"""Attempts with system calls that few programs need and that expose code of the host's kernel.

A sandbox's own kernel (gVisor) makes these attempts harmless: they never reach the host's kernel.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import struct
from pathlib import Path

from sandbox_runtime.escape.inside.attempt import call, call_by_number, survives, syscall_number

_BAD = (errno.EFAULT, errno.EINVAL)
_NEW_USER_NAMESPACE = 0x1000_0000
_X32 = 0x4000_0000
_HUGE_PAGE_BYTES = 2 << 20
_MAP_HUGETLB, _MFD_HUGETLB, _SHM_HUGETLB = 0x4_0000, 0x4, 0x800


def io_uring() -> str | None:
    """Sets up an io_uring, whose requests no system call filter sees."""
    os.close(call("io_uring_setup", 1, ctypes.create_string_buffer(120)))
    return "an io_uring was made"


def asynchronous_io() -> str | None:
    """Makes a context of asynchronous I/O, whose events are limited for the whole host."""
    context = ctypes.c_ulong()
    call("io_setup", 1, ctypes.byref(context))
    call("io_destroy", ctypes.c_ulong(context.value))
    return "contexts of asynchronous I/O can be made"


def huge_pages() -> str | None:
    """Maps one of the huge pages that the host has reserved for its own programs."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_HUGETLB
    call("mmap", None, _HUGE_PAGE_BYTES, mmap.PROT_READ, flags, -1, 0, reached=(errno.ENOMEM,))
    return "huge pages can be mapped"


def huge_memory_file() -> str | None:
    """Makes an empty file in memory that would use huge pages."""
    os.close(call("memfd_create", b"huge", _MFD_HUGETLB))
    return "files of huge pages can be made"


def huge_shared_memory() -> str | None:
    """Looks up shared memory of huge pages, by a key that does not exist."""
    call("shmget", 1, _HUGE_PAGE_BYTES, _SHM_HUGETLB, reached=(errno.ENOENT,))
    return "shared memory of huge pages can be named"


def keyctl() -> str | None:
    """Asks for the session's keyring; keyrings have no namespaces."""
    call("keyctl", 0, -3, 0, reached=(errno.ENOKEY,))
    return "keyrings can be named"


def add_key() -> str | None:
    """Adds a key to a keyring, with a null pointer as its type."""
    call("add_key", None, None, None, 0, -2, reached=_BAD)
    return "keys can be added"


def request_key() -> str | None:
    """Requests a key, with a null pointer as its type; a valid request would start a program on the
    host."""
    call("request_key", None, None, None, 0, reached=_BAD)
    return "keys can be requested"


def kcmp() -> str | None:
    """Compares kernel addresses of two open files."""
    call("kcmp", os.getpid(), os.getpid(), 0, 0, 0)
    return "kernel objects can be compared"


def process_vm_readv() -> str | None:
    """Reads a byte of another process's memory."""
    return _access_parent_memory("process_vm_readv")


def process_vm_writev() -> str | None:
    """Overwrites a byte of another process's memory with the same value."""
    return _access_parent_memory("process_vm_writev")


def ptrace() -> str | None:
    """Permits the parent process to trace this process, as every debugger's child does."""
    call("ptrace", 0, 0, 0, 0)
    return "processes can be traced"


def personality() -> str | None:
    """Turns off the randomisation of the process's own addresses."""
    call("personality", 0x0004_0000)
    return "addresses can be made predictable"


def open_by_handle_at() -> str | None:
    """Opens a file by a handle, which ignores mounts; the handle is a null pointer."""
    call("open_by_handle_at", -100, None, 0, reached=_BAD)
    return "files open by handle"


def bpf() -> str | None:
    """Makes a BPF map of one entry."""
    os.close(call("bpf", 0, struct.pack("=4I112x", 2, 4, 4, 1), 128))
    return "a BPF map was made"


def perf_event_open() -> str | None:
    """Opens a counter of the process's processor time, with kernel and hypervisor left out."""
    attributes = struct.pack("=2I5Q16x", 1, 64, 0, 0, 0, 0, 1 << 5 | 1 << 6)
    os.close(call("perf_event_open", attributes, 0, -1, -1, 0))
    return "a performance counter was opened"


def userfaultfd() -> str | None:
    """Requests to handle page faults, which helps to win races in the kernel."""
    os.close(call("userfaultfd", 1))
    return "page faults can be handled"


def kexec_load() -> str | None:
    """Loads another kernel, with invalid flags."""
    call("kexec_load", 0, 0, None, 0xFF, reached=_BAD)
    return "a kernel could be loaded"


def kexec_file_load() -> str | None:
    """Loads another kernel from an invalid file descriptor, with invalid flags."""
    call("kexec_file_load", -1, -1, 0, None, 0xFF, reached=(*_BAD, errno.EBADF))
    return "a kernel could be loaded from a file"


def init_module() -> str | None:
    """Loads an empty kernel module."""
    call("init_module", None, 0, None, reached=(*_BAD, errno.ENOEXEC))
    return "kernel modules can be loaded"


def finit_module() -> str | None:
    """Loads a kernel module from an invalid file descriptor."""
    call("finit_module", -1, b"", 0, reached=(*_BAD, errno.EBADF))
    return "kernel modules can be loaded from files"


def delete_module() -> str | None:
    """Calls delete_module with a null pointer for the name, which names no module to unload."""
    call("delete_module", None, 0, reached=_BAD)
    return "kernel modules can be unloaded"


def reboot() -> str | None:
    """Calls reboot without the magic numbers that the call needs to take effect."""
    call("reboot", 0, 0, 0, None, reached=_BAD)
    return "the machine could be rebooted"


def swapon() -> str | None:
    """Calls swapon with a null pointer for the path, so that no swap space is added."""
    call("swapon", None, 0, reached=_BAD)
    return "swap space can be added"


def swapoff() -> str | None:
    """Calls swapoff with a null pointer for the path, so that no swap space is removed."""
    call("swapoff", None, reached=_BAD)
    return "swap space can be taken away"


def clock() -> str | None:
    """Sets the length of the host clock's tick to its current value."""
    timex = ctypes.create_string_buffer(208)
    call("clock_adjtime", 0, timex)
    tick = timex.raw[88:96]
    call("clock_adjtime", 0, struct.pack("=I84x8s112x", 0x4000, tick))
    return "the host's clock can be set"


def kernel_log() -> str | None:
    """Asks for the size of the kernel's log. The log reveals addresses and events of the host."""
    call("syslog", 10, None, 0)
    return "the kernel's log can be read"


def accounting() -> str | None:
    """Turns on process accounting, to a file that does not exist."""
    call("acct", b"/nonexistent/acct", reached=(errno.ENOENT,))
    return "process accounting can be set"


def io_ports() -> str | None:
    """Requests an I/O port of the machine, one that no device uses."""
    call("ioperm", 0x80, 1, 1)
    return "the machine's ports can be used"


def io_privilege() -> str | None:
    """Requests access to all I/O ports of the machine, for a process that ends at once."""
    call("iopl", 3)
    return "all of the machine's ports can be used"


def filtered() -> str | None:
    """Checks whether a system call filter is in force."""
    mode = _status()["Seccomp"]
    return None if mode == "2" else f"seccomp mode {mode}"


def x32_calls() -> str | None:
    """Makes a forbidden system call by its x32 number, which filters often forget."""
    _require_x86_64("x32")
    forbidden = _X32 | syscall_number("unshare")
    through = survives(lambda: call_by_number(forbidden, _NEW_USER_NAMESPACE))
    return "x32 system calls are not filtered" if through else None


def i386_calls() -> str | None:
    """Makes a forbidden system call as a 32-bit program does, by its 32-bit number."""
    _require_x86_64("i386")
    through = survives(_unshare_as_i386)
    return "i386 system calls are not filtered" if through else None


def _require_x86_64(kind: str) -> None:
    """Raise OSError on a machine other than x86_64, which has no system calls of this `kind`. A
    NotApplicableError would make a server refuse the backend."""
    if platform.machine() != "x86_64":
        raise OSError(errno.ENOSYS, f"{kind} system calls do not exist on {platform.machine()}")


def _access_parent_memory(name: str) -> str | None:
    """Copy a byte between this process and its parent, which has the same byte at the same address,
    with the system call `name`."""
    byte = ctypes.create_string_buffer(b"x")
    vector = struct.pack("=2Q", ctypes.addressof(byte), 1)
    call(name, os.getppid(), vector, 1, vector, 1, 0)
    return "another process's memory is open"


def _unshare_as_i386() -> None:
    # push rbx; mov eax, 310; mov ebx, edi; int 0x80; pop rbx; ret
    code = b"\x53\xb8\x36\x01\x00\x00\x89\xfb\xcd\x80\x5b\xc3"
    page = mmap.mmap(-1, len(code), prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    function = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_uint32)
    result = function(ctypes.addressof(ctypes.c_char.from_buffer(page)))(_NEW_USER_NAMESPACE)
    if result < 0:
        raise OSError(-result, os.strerror(-result))


def _status() -> dict[str, str]:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
