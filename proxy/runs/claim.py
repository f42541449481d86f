"""What makes two requests one."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """Who asks for a run, for which work, and whether it was asked for before."""

    owner: str
    fingerprint: str
    """Of the work: with a key, of what the body means; without, of its bytes."""
    key: str | None = None
    """The client's own name for the request: an Idempotency-Key."""
    retry_count: int | None = None
    """Which repetition this is, from 0, where the client's library tells."""
    stream: bool = False
    detach: bool = False
    """Whether the run goes on when nobody listens."""

    @property
    def has_name(self) -> bool:
        """Whether the run can be asked for by name: by the client's key, or, where it goes on
        alone, by its id."""
        return self.key is not None or self.detach

    @property
    def may_come_back(self) -> bool:
        """Whether the client, when it leaves, may ask again for the same. OpenAI's SDKs do, but not
        for a stream whose head they have seen, and that is sent within seconds."""
        return self.key is not None or (self.retry_count is not None and not self.stream)

    def same_request(self, other: "Claim") -> bool:
        """Whether a retry of one could be a retry of the other."""
        return (self.owner, self.fingerprint) == (other.owner, other.fingerprint)
