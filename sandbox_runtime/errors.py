"""The exceptions of the sandbox runtime.

SandboxError
├ SandboxStartError        the sandbox could not be started
│ ├ EngineMissingError     no Docker engine answers, or the engine does not have the image
│ ├ NoCapacityError        the cluster or the engines have no room now; try again later
│ └ SandboxGoneError       a sandbox cannot be adopted: it is gone, or another process has it
├ NoFreeSandboxError       no sandbox is free now; try again later
├ SandboxLostError         a started sandbox cannot be used any more
├ JobMissingError          the sandbox has no job with that id
└ SandboxFileError         a file operation was refused or failed
  ├ FileMissingError       nothing exists at the path
  ├ PathExistsError        something exists at the path already
  ├ NotARegularFileError   the path is a directory, link, FIFO, socket or device
  ├ FileSizeLimitError     the file is larger than the caller allows
  └ FileTimeoutError       the operation exceeded its timeout

A command that fails or times out raises none of these: its ExecResult has the exit code.
"""


class SandboxError(Exception):
    """Base class of all errors of the sandbox runtime."""


class SandboxStartError(SandboxError):
    """The sandbox could not be started, or its limits could not be changed."""


class EngineMissingError(SandboxStartError):
    """No Docker engine answers, or the engine does not have the image."""


class NoCapacityError(SandboxStartError):
    """The cluster or the engines have no room for the sandbox now; they may have room after
    `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SandboxGoneError(SandboxStartError):
    """The sandbox of another process cannot be adopted: it has ended, or a third process has
    adopted it."""


class NoFreeSandboxError(SandboxError):
    """No sandbox is free now; a sandbox may be free after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SandboxLostError(SandboxError):
    """The sandbox cannot be used any more: it has ended, broke the protocol or does not answer, or
    its lease is over. The effect of its last command is unknown."""


class JobMissingError(SandboxError):
    """The sandbox has no job with that id, or the result of the job has been returned already."""


class SandboxFileError(SandboxError):
    """A file operation was refused or failed; the sandbox can still be used."""


class FileMissingError(SandboxFileError):
    """Nothing exists at the path."""


class PathExistsError(SandboxFileError):
    """Something exists at the path already."""


class NotARegularFileError(SandboxFileError):
    """The path is a directory, link, FIFO, socket or device."""


class FileSizeLimitError(SandboxFileError):
    """The file is larger than the caller allows."""


class FileTimeoutError(SandboxFileError):
    """The operation exceeded its timeout and was stopped."""
