"""Commands that use up a resource of their sandbox until they are stopped.

The benchmark measures their effect on another sandbox and on the server. The commands in
`sandbox_runtime.escape.bombs` test instead whether a limit exists, and stop by themselves.
"""

from collections.abc import Mapping

from sandbox_runtime.guest.agent import EGRESS_PORT


def _python_command(program: str) -> str:
    return f"exec python3 -I -S - <<'END'\n{program}\nEND"


def _endless_loop(command: str) -> str:
    """Return a shell loop that restarts a command whenever it has ended."""
    return f"while :; do {command}; done"


_HOLD_LOOP = """
import ctypes, time
libc = ctypes.CDLL(None, use_errno=True)
while True:
    held = []
    while len(held) < 100_000:
        one = take()
        if one is None:
            break
        held.append(one)
    time.sleep(0.01)
    for one in held:
        give_back(one)
"""
"""The second part of a program, an endless loop. It takes a resource until it gets no more, at most
100,000 times, and then releases everything. The first part of the program defines the functions
`take` and `give_back`."""
_TERMINALS = """
import os
def take():
    try:
        return os.openpty()
    except OSError:
        return None
def give_back(pair):
    for end in pair:
        os.close(end)
"""
_AIO_CONTEXTS = """
import ctypes, os
SETUP, DESTROY = (206, 207) if os.uname().machine == "x86_64" else (0, 1)
def take():
    context = ctypes.c_ulong(0)
    return None if libc.syscall(SETUP, 1024, ctypes.byref(context)) else context
def give_back(context):
    libc.syscall(DESTROY, context)
"""
_TIMERS = """
import ctypes
def take():
    timer = ctypes.c_void_p()
    return None if libc.timer_create(1, None, ctypes.byref(timer)) else timer
def give_back(timer):
    libc.timer_delete(timer)
"""
_SIGNALS = """
import os, signal
own, kind = os.getpid(), signal.SIGRTMIN
signal.pthread_sigmask(signal.SIG_BLOCK, [kind])
def take():
    return None if libc.sigqueue(own, int(kind), None) else kind
def give_back(kind):
    signal.sigtimedwait([kind], 0)
"""
_FILES_IN_FLIGHT = """
import socket
def take():
    try:
        near, far = socket.socketpair()
        socket.send_fds(near, [b"x"], [0] * 64)
    except OSError:
        return None
    return near, far
def give_back(pair):
    for end in pair:
        end.close()
"""
_HUGE_PAGES = """
import mmap
MAP_HUGETLB = 0x40000
def take():
    try:
        return mmap.mmap(-1, 1 << 21, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_HUGETLB)
    except OSError:
        return None
def give_back(page):
    page.close()
"""
_QUEUES = """
import os
made = 0
def take():
    global made
    made += 1
    name = b"/bomb%d" % made
    queue = libc.mq_open(name, os.O_CREAT | os.O_RDWR, 0o600, None)
    return None if queue < 0 else (queue, name)
def give_back(queue):
    libc.mq_close(queue[0])
    libc.mq_unlink(queue[1])
"""
_CONNECTIONS = f"""
import socket, threading
def ask():
    while True:
        try:
            with socket.create_connection(("127.0.0.1", {EGRESS_PORT}), 5) as way_out:
                way_out.sendall(b"CONNECT refused.example:443 HTTP/1.1\\r\\n\\r\\n")
                way_out.recv(65536)
        except OSError:
            pass
for _ in range(16):
    threading.Thread(target=ask).start()
"""

BOMBS: Mapping[str, str] = {
    "processes": "bomb() { bomb | bomb & }; bomb 2>/dev/null; sleep 600",
    "memory": _endless_loop(
        """python3 -I -S -c 'held = [b"x" * (1 << 20) for _ in range(1 << 20)]'"""
    ),
    "disk": _endless_loop(
        "dd if=/dev/zero of=/testbed/bomb bs=1M 2>/dev/null; rm -f /testbed/bomb"
    ),
    "processor": "for each in 1 2 3 4 5 6 7 8; do while :; do :; done & done; wait",
    "terminals": _python_command(_TERMINALS + _HOLD_LOOP),
    "AIO contexts": _python_command(_AIO_CONTEXTS + _HOLD_LOOP),
    "timers": _python_command(_TIMERS + _HOLD_LOOP),
    "queued signals": _python_command(_SIGNALS + _HOLD_LOOP),
    "files in flight": _python_command(_FILES_IN_FLIGHT + _HOLD_LOOP),
    "huge pages": _python_command(_HUGE_PAGES + _HOLD_LOOP),
    "message queues": _python_command(_QUEUES + _HOLD_LOOP),
    "output": "yes",
    "refused connections": _python_command(_CONNECTIONS),
}
"""The commands by the resource that they use up."""
