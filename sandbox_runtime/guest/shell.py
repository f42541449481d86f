"""The sandbox's shell: a fresh bash for each command, the state carried over by a snapshot.

A fresh shell survives `exit`, syntax errors, `set -e` and timeouts of the command before it. The
snapshot is taken as the shell ends, and replaces the last one only if the shell ended by itself.
"""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing is slow to import and not needed at run time
    from typing import Any

MAX_ARGUMENT_BYTES = 100_000
"""Linux allows 128 KiB in one argument; a longer command is read from a file."""

# `set --` hides our argument from the command. All is one line, so bash counts the command's
# lines from 1. The save runs twice at most: as EXIT trap, and for commands that replace that trap.
_RESTORE = (
    "builtin source {state} >/dev/null 2>&1; builtin hash -r; [[ $PWD -ef . ]] || "
    '{{ builtin cd -P .; builtin echo "bash: the directory was removed, this is $PWD" >&2; }}'
)
_SAVE = (
    '{{ builtin set -- "$?"; builtin set +eux; builtin trap - DEBUG ERR RETURN; [[ -e {new} ]] || '
    "{{ builtin printf 'builtin cd -- %q\\n' \"$PWD\"; builtin umask -p; builtin shopt -p; "
    "builtin declare -p; builtin echo 'builtin set +o posix'; builtin declare -f; "
    "builtin echo ': whole'; }} >{new}; }} 2>/dev/null"
)


WHOLE = b": whole\n"
"""The last line of every snapshot."""


class Shell:
    """One computer's shell: starts commands and keeps the state they leave."""

    def __init__(self, env: dict[str, str]) -> None:
        self._env = env
        self._bash = which("bash", env)
        self._directory = _private_directory()
        self._state = self._directory + "/state"
        self._count = 0
        self.commits = 0
        """How often the state was replaced."""

    def spawn(self, request: dict[str, Any], fds: list[int]) -> tuple[int, str | None]:
        """Start a command as leader of its own session; returns its pid and its snapshot's path.

        A terminal comes as the fourth of `fds`, for bash would make what it finds as its input the
        session's own, and end with it whatever runs in the background.
        """
        self._count += 1
        if not os.path.isdir(self._directory):  # a command has removed it
            self._directory = _private_directory()
            self._state = self._directory + "/state"
        restore = save = False
        if self._bash and request["shell_state"] == "snapshot":
            restore = os.path.exists(self._state)
            save = not request["cwd"] and not request["env"]
        new = f"{self._directory}/{self._count}" if save else None
        shell = self._bash or "/bin/sh"
        pid = os.posix_spawn(
            shell,
            self._argv(shell, request, restore, new, has_terminal=len(fds) > 3),
            # A snapshot holds the whole environment, and what was unset must stay so.
            {} if restore else self._env,
            file_actions=[(os.POSIX_SPAWN_DUP2, fd, n) for n, fd in enumerate(fds)],
            setsid=True,
            setsigmask=[],
            setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD],
        )
        return pid, new

    def _argv(
        self,
        shell: str,
        request: dict[str, Any],
        restore: bool,
        new: str | None,
        *,
        has_terminal: bool,
    ) -> list[str | bytes]:
        steps = ["exec 0<&3 3<&-"] if has_terminal else []
        steps += ["unset BASH_EXECUTION_STRING; shopt -s expand_aliases"] if self._bash else []
        if restore:
            steps.append(_RESTORE.format(state=self._state))
        if request["cwd"]:
            steps.append(f"cd -- {_quote(request['cwd'])} || exit")
        steps += [f"export {name}={_quote(value)}" for name, value in request["env"].items()]
        if new:
            steps.append(f"trap {_quote(_SAVE.format(new=new))} EXIT")
        command = request["command"].replace("\0", "").encode(errors="replace")
        if len(command) > MAX_ARGUMENT_BYTES:
            path = f"{self._directory}/{self._count}.command"
            if os.path.lexists(path):  # a pipe that a command has put there would hold us up
                os.unlink(path)
            with open(path, "xb") as file:
                file.write(command)
            command = b'builtin eval "$(<%s)"' if self._bash else b". %s"
            command %= path.encode()
        builtin = "builtin " if self._bash else ""
        steps.append(f'{builtin}eval "set -- ; $1"')
        if new:
            steps.append(_SAVE.format(new=new) + '; builtin exit "$1"')
        return [shell, *self._options(), "-c", "; ".join(steps), "bash", command]

    def _options(self) -> list[str]:
        return ["--noprofile", "--norc"] if self._bash else []

    def commit(self, new: str | None, keep: bool) -> None:
        """Make a command's snapshot the state of the next, or drop it."""
        try:
            if new and keep and _is_whole(new):
                os.rename(new, self._state)
                self.commits += 1
            elif new:
                os.unlink(new)
        except OSError:
            pass  # no snapshot was written (`exec`, a full disk): the state stays as it was


def which(program: str, env: dict[str, str]) -> str | None:
    for directory in env.get("PATH", os.defpath).split(":"):
        path = os.path.join(directory, program)
        if os.access(path, os.X_OK) and os.path.isfile(path):
            return path
    return None


def _is_whole(snapshot: str) -> bool:
    """Whether a snapshot was written to its end, which a full disk prevents."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(snapshot, flags), "rb") as file:
        file.seek(-min(len(WHOLE), os.fstat(file.fileno()).st_size), os.SEEK_END)
        return file.read() == WHOLE


def _private_directory() -> str:
    name = "/.shell-" + os.urandom(8).hex()
    for place in ("/run", "/var/tmp", "/tmp"):
        try:
            os.mkdir(place + name, 0o700)
        except OSError:
            continue
        return place + name
    raise OSError("no writable directory in /run, /var/tmp or /tmp")


def _quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
