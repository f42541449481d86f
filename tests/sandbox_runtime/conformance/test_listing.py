"""Listings of directories, in which links are not followed."""

import pytest

from sandbox_runtime.errors import FileMissingError, FileTimeoutError, NotARegularFileError
from sandbox_runtime.sandbox import DirectoryEntry, HashLimits, Sandbox
from tests.sandbox_runtime.transfer import PLENTY_S, output, write


async def _names(sandbox: Sandbox, path: str) -> list[str]:
    return [entry.path for entry in (await sandbox.list(path)).entries]


async def test_listing_has_sorted_relative_paths(sandbox: Sandbox) -> None:
    await output(sandbox, "mkdir -p d/sub/deep d/sub-1; touch d/sub/b d/sub/deep/c d/z d/A d/.h")
    names = ["A", ".h", "sub", "sub-1", "sub/b", "sub/deep", "sub/deep/c", "z"]
    listing = await sandbox.list("/testbed/d")
    assert [entry.path for entry in listing.entries] == sorted(names)
    assert not listing.truncated


async def test_listing_has_file_sizes_and_entry_kinds(sandbox: Sandbox) -> None:
    await output(sandbox, "mkdir -p d/empty; printf 12345 > d/five; touch d/none")
    listing = await sandbox.list("/testbed/d")
    assert {entry.path: entry.kind for entry in listing.entries} == {
        "empty": "directory",
        "five": "file",
        "none": "file",
    }
    assert DirectoryEntry("five", "file", 5) in listing.entries
    assert DirectoryEntry("none", "file", 0) in listing.entries


async def test_an_empty_directory_has_no_entries(sandbox: Sandbox) -> None:
    listing = await sandbox.list("/testbed/output")
    assert (listing.entries, listing.truncated) == ((), False)


async def test_links_and_fifos_are_listed_as_other_and_links_are_not_followed(
    sandbox: Sandbox,
) -> None:
    await output(sandbox, "mkdir -p real d; touch real/file; mkfifo d/fifo")
    await output(sandbox, "ln -s ../real d/to-directory; ln -s ../real/file d/to-file")
    await output(sandbox, "ln -s nowhere d/to-nothing; ln -s . d/loop")
    listing = await sandbox.list("/testbed/d")
    assert [(entry.path, entry.kind) for entry in listing.entries] == [
        ("fifo", "other"),
        ("loop", "other"),
        ("to-directory", "other"),
        ("to-file", "other"),
        ("to-nothing", "other"),
    ]


async def test_listing_is_truncated_at_max_entries(sandbox: Sandbox) -> None:
    await output(sandbox, "mkdir d; cd d; for n in 1 2 3 4 5; do touch $n; done")
    cut = await sandbox.list("/testbed/d", max_entries=3)
    assert (len(cut.entries), cut.truncated) == (3, True)
    assert list(cut.entries) == sorted(cut.entries, key=lambda entry: entry.path)
    whole = await sandbox.list("/testbed/d", max_entries=5)
    assert (len(whole.entries), whole.truncated) == (5, False)


async def test_listing_stops_at_max_depth(sandbox: Sandbox) -> None:
    await output(sandbox, "mkdir -p d/1/2/3; touch d/1/2/3/file")
    for depth, names in ((1, ["1"]), (2, ["1", "1/2"]), (3, ["1", "1/2", "1/2/3"])):
        listing = await sandbox.list("/testbed/d", max_depth=depth)
        assert [entry.path for entry in listing.entries] == names
        assert not listing.truncated


async def test_special_characters_of_listed_names_are_unchanged(sandbox: Sandbox) -> None:
    names = ["new\nline", "quote ' \" \\", "Größe 数 🎉", " blank ", "-dash"]
    for name in names:
        await write(sandbox, f"/testbed/d/{name}", b"")
    assert await _names(sandbox, "/testbed/d") == sorted(names)


async def test_listed_name_that_is_not_utf_8_has_surrogate_escapes(sandbox: Sandbox) -> None:
    await output(sandbox, "mkdir d; touch \"d/$(printf 'caf\\351')\"")
    assert await _names(sandbox, "/testbed/d") == ["caf\udce9"]


async def test_listing_of_a_missing_path_is_refused(sandbox: Sandbox) -> None:
    with pytest.raises(FileMissingError):
        await sandbox.list("/testbed/missing")


@pytest.mark.parametrize("making", ["touch it", "ln -s output it", "mkfifo it"])
async def test_listing_of_a_file_is_refused(sandbox: Sandbox, making: str) -> None:
    await output(sandbox, making)
    with pytest.raises(NotARegularFileError):
        await sandbox.list("/testbed/it")


async def test_files_over_the_hash_limit_have_no_hash(sandbox: Sandbox) -> None:
    await write(sandbox, "/testbed/d/fits", b"1234")
    await write(sandbox, "/testbed/d/large", b"12345")
    listing = await sandbox.list("/testbed/d", hashes=HashLimits(4, PLENTY_S))
    assert [(entry.path, entry.bytes, bool(entry.sha256)) for entry in listing.entries] == [
        ("fits", 4, True),
        ("large", 5, False),
    ]


async def test_files_that_are_not_hashed_in_time_are_listed_without_a_hash(
    sandbox: Sandbox,
) -> None:
    await write(sandbox, "/testbed/d/file", b"1234")
    listing = await sandbox.list("/testbed/d", hashes=HashLimits(4, 0.0))
    assert listing.entries == (DirectoryEntry("file", "file", 4),)


async def test_timed_out_listing_leaves_the_sandbox_usable(
    sandbox: Sandbox,
) -> None:
    with pytest.raises(FileTimeoutError):
        await sandbox.list("/testbed", timeout_s=0)
    assert await _names(sandbox, "/testbed") == ["documents", "output"]
