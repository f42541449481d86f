"""Why a program's connection comes to nothing.

EgressError         its text is what the program is told
├ DeniedError       by the rules, by a cap, or because it cannot be understood
│ └ HelloError      its TLS ClientHello shows a wrong server, or none
└ UnreachableError  allowed, but the host did not answer
"""


class EgressError(Exception):
    """A connection came to nothing; `status` says why in HTTP's numbers."""

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason)
        self.status = status


class DeniedError(EgressError):
    """The rules forbid it (403), it is malformed (400), late (408), or too much (503)."""

    def __init__(self, reason: str, status: int = 403) -> None:
        super().__init__(reason, status)


class HelloError(DeniedError):
    """A TLS ClientHello shows another server than the connection's, or none, or is malformed."""


class UnreachableError(EgressError):
    """It is allowed, but the host cannot be found, reached, understood (502), or is late (504)."""

    def __init__(self, reason: str, status: int = 502) -> None:
        super().__init__(reason, status)
