"""A program for a container without isolation: it fakes everything that no sandbox may reach. Its
network is a tunnel that nothing reads, and the services that seem to be the host's are its own.

It writes /tmp/stand-ins when everything is ready, and keeps running. Tests send it as text to a
container and run it there with python3.
"""

import ctypes
import fcntl
import os
import signal
import socket
import struct
from pathlib import Path

TUN, NO_HEADER = 0x0001, 0x1000
MAKE_INTERFACE, SET_ADDRESS, SET_MASK, SET_FLAGS = 0x400454CA, 0x8916, 0x891C, 0x8914
UP = 0x1
WRAPPER = """#!/usr/bin/python3
import fcntl, os, sys, termios
master, terminal = os.openpty()
if os.getsid(0) != os.getpid():
    os.setsid()
fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
os.set_inheritable(master, True)
os.set_inheritable(terminal, True)
os.execv("/usr/bin/python3", ["python3", *sys.argv[1:]])
"""
"""A wrapper that starts Python with a controlling terminal and two inherited open files."""


def main() -> None:
    kept = [
        half_of_the_internet(),
        listener(socket.AF_INET, ("127.0.0.1", 8000)),
        listener(socket.AF_UNIX, "\0stand-in"),
        listener(socket.AF_UNIX, "/run/docker.sock"),
        name_server(),
    ]
    mount("debugfs", "/sys/kernel/debug")
    mount("binfmt_misc", "/proc/sys/fs/binfmt_misc")
    Path("/etc/resolv.conf").write_text("nameserver 192.0.2.53\n", encoding="ascii")
    wrapper = Path("/usr/local/sbin/python3")
    wrapper.write_text(WRAPPER, encoding="ascii")
    wrapper.chmod(0o755)
    if os.fork() == 0:
        os.chroot("/usr")
        signal.pause()
    Path("/tmp/stand-ins").write_text(f"{len(kept)}\n", encoding="ascii")
    signal.pause()


def half_of_the_internet() -> int:
    """Make an interface that has a route to all addresses from 128.0.0.0, including the metadata
    service."""
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, MAKE_INTERFACE, struct.pack("16sH22x", b"eth0", TUN | NO_HEADER))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as anything:
        for request, address in ((SET_ADDRESS, "192.0.2.2"), (SET_MASK, "128.0.0.0")):
            where = struct.pack("=HH4s8x", socket.AF_INET, 0, socket.inet_aton(address))
            fcntl.ioctl(anything, request, struct.pack("16s16s8x", b"eth0", where))
        fcntl.ioctl(anything, SET_FLAGS, struct.pack("16sH22x", b"eth0", UP))
    return device


def listener(family: int, name: str | tuple[str, int]) -> socket.socket:
    listening = socket.socket(family)
    listening.bind(name)
    listening.listen()
    return listening


def name_server() -> int:
    """Run a name server that returns each question as its answer."""
    asked = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    asked.bind(("127.0.0.1", 53))
    child = os.fork()
    while child == 0:
        question, who = asked.recvfrom(512)
        asked.sendto(question, who)
    return child


def mount(kind: str, where: str) -> None:
    made = ctypes.CDLL(None, use_errno=True).mount(b"none", where.encode(), kind.encode(), 0, None)
    if made != 0:
        raise OSError(ctypes.get_errno(), f"{kind} cannot be mounted")


if __name__ == "__main__":
    main()
