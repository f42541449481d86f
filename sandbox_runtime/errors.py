"""What can go wrong with a sandbox.

SandboxError
├ SandboxStartError        it could not be made
│ └ EngineMissingError     no engine answers, or the one that does has not the image
├ SandboxUnavailableError  none is free now: later there may be one
├ SandboxLostError         it was there and cannot be used any more
│ ├ SandboxGoneError       it has ended, and all in it: no command goes on
│ └ SandboxUnreachableError  nothing is heard of it: what a command did in the end is unknown
├ JobMissingError          no job of the sandbox has that id
└ SandboxFileError         a file operation was refused (missing, too large, …) or late
  ├ FileMissingError       nothing has that path
  ├ NotARegularFileError   a directory, link, FIFO, socket or device has that path
  ├ FileTooLargeError      the file is larger than the caller allows
  └ FileTimeoutError       it took too long and was given up

A command that fails or runs too long is no error: its ExecResult says so.
"""


class SandboxError(Exception):
    """Anything the sandbox runtime raises."""


class SandboxStartError(SandboxError):
    """The sandbox could not be made."""


class EngineMissingError(SandboxStartError):
    """No engine answers, or the one that does has not the image."""


class SandboxUnavailableError(SandboxError):
    """None is free now; after `retry_after_s` seconds there may be one."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SandboxLostError(SandboxError):
    """The sandbox was there and cannot be used any more."""


class SandboxGoneError(SandboxLostError):
    """The sandbox has ended, or broke the protocol and was killed for it: no command goes on."""


class SandboxUnreachableError(SandboxLostError):
    """Nothing is heard of the sandbox: what a command did in the end is unknown."""


class JobMissingError(SandboxError):
    """No job of the sandbox has that id, or it has ended and was told of."""


class SandboxFileError(SandboxError):
    """A file operation was refused; the sandbox is unharmed."""


class FileMissingError(SandboxFileError):
    """Nothing has that path."""


class FileThereError(SandboxFileError):
    """Something has that path already."""


class NotARegularFileError(SandboxFileError):
    """A directory, link, FIFO, socket or device has that path."""


class FileTooLargeError(SandboxFileError):
    """The file is larger than the caller allows."""


class FileTimeoutError(SandboxFileError):
    """The operation took longer than its caller allows and was given up."""
