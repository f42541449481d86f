"""Attempts on the host kernel's settings and secrets in /proc and /sys; files are never written.

A sandbox's own kernel makes these attempts harmless: its settings are not the host's.
"""

from __future__ import annotations

import os
from pathlib import Path

from sandbox_runtime.escape.inside.attempt import opens, summarize, writable_files_below

_SYSCTL = Path("/proc/sys")
_OWN_SYSCTLS = (
    *("/proc/sys/net/", "/proc/sys/user/", "/proc/sys/fs/mqueue/"),
    *("/proc/sys/kernel/hostname", "/proc/sys/kernel/domainname", "/proc/sys/kernel/pid_max"),
    *("/proc/sys/kernel/sem", "/proc/sys/kernel/msg", "/proc/sys/kernel/shm"),
    *("/proc/sys/kernel/auto_msgmni", "/proc/sys/kernel/ns_last_pid"),
)
"""Settings of the sandbox's own namespaces."""
_TRIED_ALONE = ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe")
_CGROUPS = Path("/sys/fs/cgroup")
_SECRETS = (
    *("/proc/kcore", "/proc/kmsg", "/proc/kpagecount", "/proc/kpageflags", "/proc/vmallocinfo"),
    *("/proc/slabinfo", "/proc/sched_debug", "/proc/timer_list"),
)


def core_pattern() -> str | None:
    """Opens the setting that names the program which the host runs as root when a process
    crashes."""
    return _open_setting("/proc/sys/kernel/core_pattern")


def modprobe() -> str | None:
    """Opens the setting that names the program which the host runs as root to load modules."""
    return _open_setting("/proc/sys/kernel/modprobe")


def uevent_helper() -> str | None:
    """Opens the setting that names the program which the host runs as root when a device
    appears."""
    return _open_setting("/sys/kernel/uevent_helper")


def sysrq() -> str | None:
    """Opens the switch that reboots or halts the machine."""
    return _open_setting("/proc/sysrq-trigger")


def binfmt_misc() -> str | None:
    """Opens the file that registers interpreters with which the host starts programs."""
    return _open_setting("/proc/sys/fs/binfmt_misc/register")


def kernel_settings() -> str | None:
    """Opens the other settings in /proc/sys, except those of the sandbox's own namespaces."""
    return summarize("open", writable_files_below(_SYSCTL, _OWN_SYSCTLS + _TRIED_ALONE))


def other_switches() -> str | None:
    """Opens settings in /proc outside of /proc/sys: interrupts, devices, file systems, memory
    types."""
    found = [Path("/proc/mtrr")] if opens(Path("/proc/mtrr")) else []
    for name in ("irq", "bus", "fs", "acpi", "scsi", "driver"):
        found += writable_files_below(Path("/proc", name))
    return summarize("open", found)


def device_settings() -> str | None:
    """Opens each setting of devices, modules and the kernel in /sys, except control groups."""
    excluded = (f"{_CGROUPS}/", "/sys/kernel/uevent_helper", "/sys/kernel/debug", "/sys/devices")
    tops = (
        "kernel",
        "module",
        "power",
        "firmware",
        "bus",
        "fs",
        "devices/system",
        "devices/virtual",
    )
    found: list[Path] = []
    for top in tops:
        found += writable_files_below(Path("/sys", top), excluded[: 3 if "devices" in top else 4])
    return summarize("open", found)


def debug_files() -> str | None:
    """Lists the kernel's files for debugging and tracing."""
    debug = (Path("/sys/kernel/debug"), Path("/sys/kernel/tracing"))
    return summarize("can be listed", (top for top in debug if top.is_dir() and any(top.iterdir())))


def release_agent() -> str | None:
    """Opens the setting that names the program which the host runs as root when a cgroup gets
    empty."""
    return summarize(
        "open", (p for p in writable_files_below(_CGROUPS) if p.name == "release_agent")
    )


def own_limits() -> str | None:
    """Opens the files of control groups, which set the limits of the sandbox."""
    return summarize(
        "open", (p for p in writable_files_below(_CGROUPS) if p.name != "release_agent")
    )


def kernel_secrets() -> str | None:
    """Opens for reading the files that hold the kernel's memory and internal lists."""
    # An engine masks a file with a null device, which is not a regular file.
    there = (path for path in map(Path, _SECRETS) if path.is_file())
    return summarize("open", (path for path in there if opens(path, os.O_RDONLY)))


def kernel_addresses() -> str | None:
    """Reads the addresses of the kernel's functions."""
    with Path("/proc/kallsyms").open(encoding="ascii") as file:
        address = int(file.readline().split()[0], 16)
    return f"the first is at {address:#x}" if address else None


def _open_setting(path: str) -> str | None:
    return f"{path} opens for writing" if opens(Path(path)) else None
