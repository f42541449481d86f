"""What can go wrong with a sandbox.

SandboxError
├ SandboxStartError        it could not be made
├ SandboxLostError         it was there and is gone, or broke the protocol
└ SandboxFileError         a file operation was refused (missing, not a regular file, too large)
  ├ FileMissingError       nothing has that path
  ├ NotARegularFileError   a directory, link, FIFO, socket or device has that path
  └ FileTooLargeError      the file is larger than the caller allows

A command that fails or runs too long is no error: its ExecResult says so.
"""


class SandboxError(Exception):
    """Anything the sandbox runtime raises."""


class SandboxStartError(SandboxError):
    """The sandbox could not be made."""


class SandboxLostError(SandboxError):
    """The sandbox was there and is gone, or broke the protocol and was killed for it."""


class SandboxFileError(SandboxError):
    """A file operation was refused; the sandbox is unharmed."""


class FileMissingError(SandboxFileError):
    """Nothing has that path."""


class NotARegularFileError(SandboxFileError):
    """A directory, link, FIFO, socket or device has that path."""


class FileTooLargeError(SandboxFileError):
    """The file is larger than the caller allows."""
