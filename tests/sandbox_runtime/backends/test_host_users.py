"""Whether there are users enough for each sandbox to have its own."""

from pathlib import Path

import pytest

from sandbox_runtime.backends.host_users import has_range, new_uid

EVERYBODY = "         0          0 4294967295\n"
A_CONTAINERS = "         0     100000      65536\n"


@pytest.mark.parametrize(
    ("uids", "gids", "enough"),
    [
        (EVERYBODY, EVERYBODY, True),
        (A_CONTAINERS, A_CONTAINERS, False),
        (EVERYBODY, A_CONTAINERS, False),
        (A_CONTAINERS + "1000000000 1000000000 2000000000\n", EVERYBODY, True),
        ("", "", False),
    ],
)
def test_the_range_must_be_mapped(tmp_path: Path, uids: str, gids: str, enough: bool) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/uid_map").write_text(uids)
    (tmp_path / "self/gid_map").write_text(gids)
    assert has_range(tmp_path) is enough
    assert not has_range(tmp_path / "no Linux")


def test_uids_are_none_that_a_distribution_gives_away() -> None:
    uids = {new_uid() for _ in range(100)}
    assert len(uids) > 90
    assert 0x7000_0000 <= min(uids) <= max(uids) < 0x8000_0000
