"""The redaction of secrets in the texts of a run."""

from dataclasses import dataclass

from policies.rules import Span, compile_pattern

HELD_CHARS = 256
"""Number of characters at the end of a stream that are held back. A longer secret in a stream is
found only if the pattern already matches the secret's first `HELD_CHARS` characters."""
MAX_HELD_CHARS = 65_536
"""Maximum number of characters that are held back because a secret may continue. The middle of a
longer secret is dropped."""
_KEY_TEXT = r"[\sA-Za-z0-9+/=:,.\\-]*"
_KEY_TAIL = (
    r"[A-Za-z0-9+/=\\]+(?:\s*\n\s*(?:\d+:?[ \t]+)?[A-Za-z0-9+/=\\]+)*(?:\s*\n\s*(?:\d+:?[ \t]+)?)?"
    r"-----END [A-Z0-9 ]*PRIVATE KEY-----"
)
"""The end of a private key whose beginning was cut off by truncation."""
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
"""The patterns that `Redaction.detectors` may name."""
_ALL = "all"
"""The name for all built-in patterns."""


@dataclass(frozen=True, slots=True)
class SecretPattern:
    """A pattern that the operator has configured to find secrets. Raises ValueError for an invalid
    pattern."""

    name: str
    """The name that replaces the secret: `[redacted NAME]`."""
    pattern: str
    """A regular expression in RE2's syntax. If it has a group, only the group is replaced."""

    def __post_init__(self) -> None:
        compile_pattern(self.pattern)


@dataclass(frozen=True, slots=True)
class Redaction:
    """The secrets that are redacted. Raises ValueError for an unknown name."""

    detectors: tuple[str, ...] = ()
    """Names of built-in patterns: aws, aws_secret, github, openai, google, slack, jwt, bearer,
    url_password, private_key. all: all of them."""
    patterns: tuple[SecretPattern, ...] = ()
    """Patterns of the operator, in addition to the built-in patterns."""

    def __post_init__(self) -> None:
        if unknown := sorted({*self.detectors} - {_ALL, *BUILT_IN_PATTERNS}):
            known = ", ".join((_ALL, *BUILT_IN_PATTERNS))
            raise ValueError(f"{unknown[0]!r} is not a known detector ({known})")

    @property
    def patterns_by_name(self) -> dict[str, str]:
        """The selected built-in patterns and the operator's patterns, by name."""
        names = BUILT_IN_PATTERNS if _ALL in self.detectors else self.detectors
        own = {secret.name: secret.pattern for secret in self.patterns}
        return {name: BUILT_IN_PATTERNS[name] for name in names} | own


@dataclass(frozen=True, slots=True)
class _Match:
    span: Span
    secret: Span
    """The span of the pattern's group, or of the whole match if the pattern has no group."""
    name: str


class SecretFinder:
    """Finds and replaces the secrets that a Redaction selects."""

    def __init__(self, redaction: Redaction) -> None:
        self._patterns = {
            name: compile_pattern(written) for name, written in redaction.patterns_by_name.items()
        }

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def redact(self, text: str) -> str:
        """Return the text with its secrets replaced."""
        return _replace_secrets(text, self.find(text)) if self._patterns else text

    def find(self, text: str) -> list[_Match]:
        """Return the secrets in a text, in the order of their positions."""
        matches = [
            _Match(span, secret, name)
            for name, pattern in self._patterns.items()
            for span, secret in pattern.spans(text)
        ]
        return sorted(matches, key=lambda match: (match.secret, match.span))


class StreamRedactor:
    """Replaces secrets in a text that arrives in pieces. The end of the text is held back, because
    it may contain the beginning of a secret."""

    def __init__(self, secrets: SecretFinder) -> None:
        self._secrets = secrets
        self._held_text = ""

    def feed(self, piece: str) -> str:
        """Add a piece; return the redacted text that no further piece can change."""
        self._held_text += piece
        cut = len(self._held_text) - HELD_CHARS
        if cut <= 0:
            return ""
        matches = self._secrets.find(self._held_text)
        while crossing := [m.span[0] for m in matches if m.span[0] < cut < m.span[1]]:
            cut = min(crossing)
        released = _replace_secrets(self._held_text[:cut], [m for m in matches if m.span[1] <= cut])
        self._held_text = self._held_text[cut:]
        if len(self._held_text) > MAX_HELD_CHARS:  # a secret, so its middle will not be shown
            half = MAX_HELD_CHARS // 2
            self._held_text = self._held_text[:half] + self._held_text[-half:]
        return released

    def finish(self) -> str:
        """Return the rest of the redacted text."""
        rest, self._held_text = self._held_text, ""
        return self._secrets.redact(rest)


def _replace_secrets(text: str, matches: list[_Match]) -> str:
    parts, position = [], 0
    for match in matches:
        start, end = match.secret
        if start >= position:
            parts += [text[position:start], f"[redacted {match.name}]"]
        position = max(position, end)
    return "".join([*parts, text[position:]])
