"""The range of host uids for sandboxes, and whether this host maps it."""

from pathlib import Path

import pytest

from sandbox_runtime.backends.limits import HOST_UIDS, maps_host_uids, new_host_uid

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
def test_host_uid_range_is_usable_only_if_its_uids_and_gids_are_mapped(
    tmp_path: Path, uids: str, gids: str, enough: bool
) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/uid_map").write_text(uids)
    (tmp_path / "self/gid_map").write_text(gids)
    assert maps_host_uids(tmp_path) is enough
    assert not maps_host_uids(tmp_path / "no Linux")


TAKEN = {
    "SSSD's range for users of an Active Directory": (200_000, 2_000_200_000),
    "systemd's range for foreign images": (0x7FFE_0000, 0x7FFE_FFFF),
    "numbers that signed 32-bit programs misread": (0x8000_0000, 0xFFFF_FFFF),
}


@pytest.mark.parametrize("taken", TAKEN.values(), ids=TAKEN.keys())
def test_host_uid_range_overlaps_no_uid_range_that_other_software_uses_by_default(
    taken: tuple[int, int],
) -> None:
    first, last = HOST_UIDS.start, HOST_UIDS.stop - 1
    assert last < taken[0] or first > taken[1]


def test_host_uids_are_random_in_their_range() -> None:
    uids = {new_host_uid() for _ in range(100)}
    assert len(uids) > 90
    assert all(uid in HOST_UIDS for uid in uids)
