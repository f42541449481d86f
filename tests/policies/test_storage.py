"""What clients may keep, and how long."""

from policies.sessions import FileLimits


def test_a_file_lives_as_long_as_its_client_asks_and_no_longer_than_all() -> None:
    limits = FileLimits(retention_hours=2)
    assert [limits.expiry(100, asked) for asked in (None, 3600, 7200, 7201)] == [
        7300,
        3700,
        7300,
        7300,
    ]
