"""The block device below a Docker engine, for which the kernel limits what containers do."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from sandbox_runtime.backends.docker_api import Facts

_BLOCK_DEVICES, _DEVICES = Path("/sys/dev/block"), Path("/dev")


@dataclass(frozen=True, slots=True)
class BlockDevice:
    """The disk on which an engine keeps its containers."""

    path: str | None
    """The device's file, such as /dev/sda; None if the engine cannot limit reads and writes."""
    why_not: str = ""


def block_device(
    engine: Facts,
    directory: Path | None,
    *,
    numbers: Path = _BLOCK_DEVICES,
    devices: Path = _DEVICES,
) -> BlockDevice:
    """Return the whole disk below an engine's directory, for the kernel limits no partition.

    `engine` is what the engine says of itself. `numbers` has a link for each device of this host,
    `devices` its files.
    """
    if directory is None:
        return BlockDevice(None, "the engine's directory cannot be seen from this host")
    if any("bps" in warning for warning in engine.get("Warnings") or ()):
        return BlockDevice(None, "the engine or its kernel cannot limit block I/O")
    number = directory.stat().st_dev
    found = (numbers / f"{os.major(number)}:{os.minor(number)}").resolve()
    if (found / "partition").exists():
        found = found.parent
    try:
        named = re.search(r"^DEVNAME=(.+)$", (found / "uevent").read_text("utf-8"), re.MULTILINE)
    except FileNotFoundError:
        named = None
    if named is None:  # btrfs, zfs, overlay and tmpfs count as devices that are none
        return BlockDevice(None, f"the file system at {directory} names no block device")
    device = devices / named[1]
    if not device.exists():
        return BlockDevice(None, f"{device} is missing")
    return BlockDevice(str(device))
