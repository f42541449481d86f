"""The redaction of secrets in what a run says."""

from dataclasses import dataclass

from policies.rules import Span, compile_pattern

HELD_CHARS = 256
"""So much of an unfinished text is held back: a secret must be recognisable within it."""
MAX_HELD_CHARS = 65_536
"""So much is held back of a secret that does not end."""
_KEY_TEXT = r"[\sA-Za-z0-9+/=:,.\\-]*"
_KEY_TAIL = (
    r"[A-Za-z0-9+/=\\]+(?:\s*\n\s*(?:\d+:?[ \t]+)?[A-Za-z0-9+/=\\]+)*(?:\s*\n\s*(?:\d+:?[ \t]+)?)?"
    r"-----END [A-Z0-9 ]*PRIVATE KEY-----"
)
"""The rest of a key whose beginning was left out, one word a line."""
BUILT_IN_PATTERNS: dict[str, str] = {
    "aws": r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    "aws_secret": r"(?i)aws_?secret_?(?:access_?)?key[\"']?\s*[:=]\s*[\"']?([A-Za-z0-9/+]{40})",
    "github": r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,})",
    "openai": r"\bsk-[A-Za-z0-9_-]{20,}",
    "google": r"\bAIza[A-Za-z0-9_-]{35}",
    "slack": r"\bxox[abeprs]-[A-Za-z0-9-]{10,}",
    "jwt": r"\beyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*)?",
    "bearer": r"(?i)\bbearer\s+([A-Za-z0-9._~+/=-]{16,})",
    "url_password": r"\b[a-z][a-z0-9+.-]*://[^\s/:@]*:([^\s/@]{3,})@",
    "private_key": (
        rf"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----(?:{_KEY_TEXT}?-----END [A-Z0-9 ]*PRIVATE KEY-----"
        rf"|{_KEY_TEXT})|{_KEY_TAIL}"
    ),
}
"""The secrets that `Redaction.secrets` may name."""
_ALL = "keys"
"""Stands for all of them."""


@dataclass(frozen=True, slots=True)
class SecretPattern:
    """A secret of the operator's own. Raises ValueError for an invalid pattern."""

    name: str
    pattern: str
    """In RE2's syntax; if it has a group, only that is the secret."""

    def __post_init__(self) -> None:
        compile_pattern(self.pattern)


@dataclass(frozen=True, slots=True)
class Redaction:
    """The secrets that are replaced. Raises ValueError for an unknown name."""

    secrets: tuple[str, ...] = ()
    """keys: all that are built in; or some of them: aws, aws_secret, github, openai, google, slack,
    jwt, bearer, url_password, private_key."""
    patterns: tuple[SecretPattern, ...] = ()

    def __post_init__(self) -> None:
        if unknown := sorted({*self.secrets} - {_ALL, *BUILT_IN_PATTERNS}):
            known = ", ".join((_ALL, *BUILT_IN_PATTERNS))
            raise ValueError(f"{unknown[0]!r} is no secret that is known ({known})")

    @property
    def patterns_by_name(self) -> dict[str, str]:
        """The patterns by name."""
        names = BUILT_IN_PATTERNS if _ALL in self.secrets else self.secrets
        own = {each.name: each.pattern for each in self.patterns}
        return {name: BUILT_IN_PATTERNS[name] for name in names} | own


@dataclass(frozen=True, slots=True)
class _Found:
    whole: Span
    secret: Span
    name: str


class SecretFinder:
    """A Redaction with its patterns compiled."""

    def __init__(self, redaction: Redaction) -> None:
        self._patterns = {
            name: compile_pattern(written) for name, written in redaction.patterns_by_name.items()
        }

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def redact(self, text: str) -> str:
        """Return the text with its secrets replaced."""
        return _replaced(text, self.find(text)) if self._patterns else text

    def find(self, text: str) -> list[_Found]:
        """Return the secrets in a text, in the order in which they begin."""
        found = [
            _Found(whole, secret, name)
            for name, each in self._patterns.items()
            for whole, secret in each.spans(text)
        ]
        return sorted(found, key=lambda each: (each.secret, each.whole))


class StreamRedactor:
    """Replaces secrets in a text that comes in pieces. The last characters are held back, because
    they may begin a secret."""

    def __init__(self, secrets: SecretFinder) -> None:
        self._secrets = secrets
        self._held = ""

    def feed(self, piece: str) -> str:
        """Add a piece; return the text that is certain by now."""
        self._held += piece
        cut = len(self._held) - HELD_CHARS
        if cut <= 0:
            return ""
        found = self._secrets.find(self._held)
        while crossing := [each.whole[0] for each in found if each.whole[0] < cut < each.whole[1]]:
            cut = min(crossing)
        certain = _replaced(self._held[:cut], [each for each in found if each.whole[1] <= cut])
        self._held = self._held[cut:]
        if len(self._held) > MAX_HELD_CHARS:  # a secret, so its middle is never shown
            half = MAX_HELD_CHARS // 2
            self._held = self._held[:half] + self._held[-half:]
        return certain

    def finish(self) -> str:
        """Return the rest of the text."""
        rest, self._held = self._held, ""
        return self._secrets.redact(rest)


def _replaced(text: str, found: list[_Found]) -> str:
    parts, done = [], 0
    for each in found:
        start, end = each.secret
        if start >= done:
            parts += [text[done:start], f"[redacted {each.name}]"]
        done = max(done, end)
    return "".join([*parts, text[done:]])
