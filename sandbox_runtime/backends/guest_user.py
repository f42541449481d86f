"""Who the programs inside a sandbox are."""

from collections.abc import Mapping
from dataclasses import dataclass

from policies.isolation import Isolation


@dataclass(frozen=True, slots=True)
class GuestUser:
    """A user inside; which of the host's it is, the backend decides."""

    uid: int
    name: str
    home: str

    @property
    def env(self) -> Mapping[str, str]:
        """What programs look up about themselves, also where /etc/passwd does not know the user."""
        return {"HOME": self.home, "USER": self.name}


ROOT = GuestUser(0, "root", "/root")
SANDBOX = GuestUser(1000, "sandbox", "/home/sandbox")


def guest_user(isolation: Isolation) -> GuestUser:
    """Root may install packages; at the strict level there is none."""
    return SANDBOX if isolation.level == "strict" else ROOT
