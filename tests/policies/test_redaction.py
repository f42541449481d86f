"""Redaction of secrets in texts and in streams of pieces."""

import random

import pytest

from policies.redaction import (
    BUILT_IN_PATTERNS,
    MAX_HELD_CHARS,
    Redaction,
    SecretFinder,
    SecretPattern,
    StreamRedactor,
)

KEYS = SecretFinder(Redaction(("all",)))
PEM = "-----BEGIN RSA PRIVATE KEY-----\n{}-----END RSA PRIVATE KEY-----"
BODY = "MIIEowIBAAKCAQEA7bq+/Z0\n" * 60
EXAMPLES = {
    "aws": ("id AKIAIOSFODNN7EXAMPLE here", "id [redacted aws] here"),
    "aws_secret": (
        'aws_secret_access_key = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"',
        'aws_secret_access_key = "[redacted aws_secret]"',
    ),
    "github": (f"ghp_{'a1B2' * 9}.", "[redacted github]."),
    "openai": (f"key=sk-proj-{'aB3_-' * 8}", "key=[redacted openai]"),
    "google": (f"AIza{'x' * 35} ", "[redacted google] "),
    "slack": ("xoxb-1234567890-abcdef", "[redacted slack]"),
    "jwt": ("t eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2ln e", "t [redacted jwt] e"),
    "bearer": (
        "Authorization: Bearer abcdefghij0123456789",
        "Authorization: Bearer [redacted bearer]",
    ),
    "url_password": ("postgres://me:hunter2@db/x", "postgres://me:[redacted url_password]@db/x"),
    "private_key": (f"a\n{PEM.format(BODY)}\nb", "a\n[redacted private_key]\nb"),
}
HARMLESS = [
    "The sky is blue.",
    "sk-learn and sk-image are libraries",
    "https://example.com:8080/path@v2",
    "bearer bonds",
    "eyJ is how base64 of JSON begins",
    "git commit 3f786850e387550fdab836ed7e6dc881de23001b",
]


def redact_stream(secrets: SecretFinder, pieces: list[str]) -> list[str]:
    stream = StreamRedactor(secrets)
    return [*map(stream.feed, pieces), stream.finish()]


def random_pieces(text: str, seed: int) -> list[str]:
    rng = random.Random(seed)
    ends = sorted(rng.choices(range(len(text) + 1), k=len(text) // 6))
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


def test_each_built_in_secret_pattern_has_an_example_in_the_tests() -> None:
    assert list(EXAMPLES) == list(BUILT_IN_PATTERNS)


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_kind_of_secret_is_redacted(name: str) -> None:
    text, shown = EXAMPLES[name]
    assert SecretFinder(Redaction((name,))).redact(text) == shown
    assert KEYS.redact(f"é {text}") == f"é {shown}"


@pytest.mark.parametrize("text", HARMLESS)
def test_text_without_secrets_is_unchanged(text: str) -> None:
    assert KEYS.redact(text) == text


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("before", [0, 230, 1000])
def test_secret_split_across_pieces_is_redacted(name: str, before: int) -> None:
    text, shown = (f"{'a b ' * (before // 4)}{example}{' é. ' * 200}" for example in EXAMPLES[name])
    for seed in range(10):
        assert "".join(redact_stream(KEYS, random_pieces(text, seed))) == shown
    assert "".join(redact_stream(KEYS, list(text))) == shown


def test_all_secrets_in_a_text_are_redacted_and_nested_secrets_only_once() -> None:
    text = " ".join(text for text, _ in EXAMPLES.values())
    assert KEYS.redact(text) == " ".join(shown for _, shown in EXAMPLES.values())
    assert KEYS.redact(f"Bearer sk-{'a' * 30}.") == "Bearer [redacted openai]"


def test_stream_holds_back_only_the_end_of_a_text_without_secrets() -> None:
    pieces = redact_stream(KEYS, ["word " * 200, "more"])
    assert [len(piece) for piece in pieces] == [744, 4, 256]


@pytest.mark.parametrize(
    ("end", "shown"), [("", ""), ("\n-----END RSA PRIVATE KEY-----", ""), ("!", "!")]
)
def test_very_long_private_key_in_a_stream_is_redacted_in_bounded_memory(
    end: str, shown: str
) -> None:
    stream = StreamRedactor(KEYS)
    redacted = stream.feed("see -----BEGIN RSA PRIVATE KEY-----\n")
    for _ in range(40):
        redacted += stream.feed("MIIEowIBAAKCAQEA7bq\n" * 300)
        assert len(stream._held_text) <= MAX_HELD_CHARS
    redacted += stream.feed(end) + stream.finish()
    assert redacted == f"see [redacted private_key]{shown}"


def test_configured_secret_pattern_redacts_only_its_group() -> None:
    own = (SecretPattern("pin", r"pin: (\d{4})"), SecretPattern("name", "Rumpel[a-z]+"))
    secrets = SecretFinder(Redaction(patterns=own))
    redacted = secrets.redact("pin: 1234, Rumpelstiltskin")
    assert redacted == "pin: [redacted pin], [redacted name]"


def test_unknown_detector_name_and_invalid_secret_pattern_are_refused() -> None:
    with pytest.raises(ValueError, match="'pins' is not a known detector"):
        Redaction(("pins",))
    with pytest.raises(ValueError, match="is not a valid pattern"):
        SecretPattern("look", "(?=a)")


def test_no_secret_is_redacted_by_default() -> None:
    text = EXAMPLES["github"][0]
    assert SecretFinder(Redaction()).redact(text) == text


@pytest.mark.parametrize("between", ["\n", "\n    17\t", "\n  ", "\\n", "\r\n"])
def test_both_parts_of_a_truncated_private_key_are_redacted(between: str) -> None:
    marker = "[... 1000 bytes, 20 lines left out ...]"
    lines = between.join(BODY.split())
    head, tail = (
        f"-----BEGIN PRIVATE KEY-----{between}{lines}",
        f"{lines}{between}-----END PRIVATE KEY-----",
    )
    shown = KEYS.redact(f"a\n{head}\n{marker}\n{tail}\nb")
    assert shown == f"a\n[redacted private_key]{marker}\n[redacted private_key]\nb"
    assert (
        KEYS.redact(f"the rest\n{marker}\n{tail}") == f"the rest\n{marker}\n[redacted private_key]"
    )


def test_base64_lines_that_are_no_private_key_are_not_redacted() -> None:
    text = f"{BODY}\nthat is all -----END CERTIFICATE-----\n"
    assert KEYS.redact(text) == text
