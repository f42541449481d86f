"""Attempts with kinds of sockets that programs do not need, such as raw and netlink.

A sandbox's own kernel makes these attempts harmless: the system calls never reach the host's
kernel.
"""

from __future__ import annotations

import socket

from sandbox_runtime.escape.inside.attempt import summarize

_ALL_PROTOCOLS = 0x0300
"""ETH_P_ALL, in network order."""
_KINDS = (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET)
_USUAL = frozenset({0, 1, 2, 10})
_TRIED_ALONE = frozenset({16, 17, 38, 40})
_FAMILIES = 46


def raw_socket() -> str | None:
    """Opens a socket for packets of any protocol."""
    socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP).close()
    return "raw packets can be sent"


def packet_socket() -> str | None:
    """Opens a socket at the link layer."""
    socket.socket(17, socket.SOCK_RAW, _ALL_PROTOCOLS).close()
    return "frames can be sent and overheard"


def vsock() -> str | None:
    """Opens a socket to the hypervisor."""
    socket.socket(40, socket.SOCK_STREAM).close()
    return "the hypervisor can be talked to"


def netlink() -> str | None:
    """Opens a socket to the kernel's network settings."""
    socket.socket(16, socket.SOCK_RAW).close()
    return "netlink can be talked to"


def alg_socket() -> str | None:
    """Opens a socket to the kernel's cryptography."""
    socket.socket(38, socket.SOCK_SEQPACKET).close()
    return "the kernel's cryptography can be called"


def rare_sockets() -> str | None:
    """Opens a socket of each family that no other attempt tries and that programs rarely need."""
    return summarize("families", (n for n in range(_FAMILIES) if n not in _USUAL and _opens(n)))


def _opens(family: int) -> bool:
    if family in _TRIED_ALONE:
        return False
    for kind in _KINDS:
        try:
            socket.socket(family, kind).close()
        except OSError:
            continue
        return True
    return False
