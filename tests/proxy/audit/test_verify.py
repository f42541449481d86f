"""The verifier finds every change, truncation and loss of a log, within its stated limits."""

import contextlib
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from proxy.audit.audit_log import LAST_LINE_FIELD, AuditLogWriter, DayIndex, HashChain, log_path
from tests.proxy.audit.logs import DAY, NOW, errors, found, states, write

A_DAY_S = 86_400.0
ROOT = Path(__file__).resolve().parents[3]


def index_of(root: Path, day: str = DAY) -> Path:
    return log_path(root / day, "index")


def test_untouched_logs_are_verified_as_ok(tmp_path: Path) -> None:
    write(tmp_path, "a", "b")
    assert [str(each) for each in found(tmp_path)][1:] == [
        f"ok          {DAY}/a  3 lines, failed: none",
        f"ok          {DAY}/b  3 lines, failed: none",
    ]
    assert states(tmp_path) == ["ok", "ok", "ok"]
    assert states(tmp_path, "b") == ["ok"]
    assert states(tmp_path, str(tmp_path / DAY / "a.jsonl")) == ["ok"]


def test_flipped_bit_anywhere_in_a_log_is_found(tmp_path: Path) -> None:
    (log,) = write(tmp_path, "a", lines=2)
    written = log.read_bytes()
    rng = random.Random(5)
    for position in range(len(written)):
        changed = bytearray(written)
        changed[position] ^= 1 << rng.randrange(8)
        log.write_bytes(changed)
        assert states(tmp_path, "a") == ["WRONG"], position
    log.write_bytes(written)
    assert states(tmp_path, "a") == ["ok"]


def test_flipped_bit_in_the_index_is_found(tmp_path: Path) -> None:
    write(tmp_path, "a")
    index = index_of(tmp_path)
    written = index.read_bytes()
    for position in (*range(0, len(written), 7), len(written) - 1):
        changed = bytearray(written)
        changed[position] ^= 1
        index.write_bytes(changed)
        assert "WRONG" in states(tmp_path), position


@pytest.mark.parametrize("key", [None, b"known to few"])
@pytest.mark.parametrize("name", ["index", "a"])
def test_flipped_bit_in_the_last_byte_is_found_after_another_run_is_logged(
    tmp_path: Path, name: str, key: bytes | None
) -> None:
    write(tmp_path, "a", key=key)
    changed = log_path(tmp_path / DAY, name)
    written = changed.read_bytes()
    for bit in range(8):
        changed.write_bytes(written[:-1] + bytes([written[-1] ^ 1 << bit]))
        with contextlib.suppress(OSError):
            write(tmp_path, f"b{bit}", key=key)
        assert "WRONG" in states(tmp_path, key=key), bit
        assert states(tmp_path, "a", key=key) == ["WRONG"], bit


@pytest.mark.parametrize("damage", [b"\n", b"\r", b" ", b"}", b"\x8a", b"\xff", b"{"])
def test_damaged_audit_index_is_still_reported_after_a_new_log_is_written(
    tmp_path: Path, damage: bytes
) -> None:
    write(tmp_path, "a")
    index = index_of(tmp_path)
    written = index.read_bytes()
    for position in (-1, -2, -30, written.rindex(b"\n", 0, -1)):
        changed = bytearray(written)
        changed[position : position + 1 or None] = damage
        if changed != written:
            index.write_bytes(changed)
            with contextlib.suppress(OSError):
                write(tmp_path, f"b{position}")
            assert states(tmp_path)[0] == "WRONG", position


def lines_of(log: Path) -> list[bytes]:
    return log.read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([0, 2, 3], "line 2 has the number 2 (expected: 1)"),
        ([0, 2, 1, 3], "line 2 has the number 2 (expected: 1)"),
        ([1, 2, 3], "line 1 has the number 1 (expected: 0)"),
        ([0, 0, 1, 2, 3], "line 2 has the number 0 (expected: 1)"),
        ([0, 1, 2, 3, 3], "line 5 follows the last line of the log"),
        ([0, 1, 2], "it has changed since it ended with 4 lines"),
        ([], "it has changed since it ended with 4 lines"),
    ],
)
def test_audit_verify_reports_missing_or_moved_or_added_lines_of_a_log(
    tmp_path: Path, order: list[int], message: str
) -> None:
    (log,) = write(tmp_path, "a", lines=4)
    lines = lines_of(log)
    log.write_bytes(b"".join(lines[number] for number in order))
    assert errors(tmp_path) == [f"{DAY}/a: {message}"]


@pytest.mark.parametrize("removed_bytes", [1, 2, 50])
def test_audit_verify_reports_a_truncated_finished_log(tmp_path: Path, removed_bytes: int) -> None:
    (log,) = write(tmp_path, "a")
    log.write_bytes(log.read_bytes()[:-removed_bytes])
    assert len(errors(tmp_path)) == 1


@pytest.mark.parametrize("data", [b"x", b"\n", b"{", b"{}\n"])
def test_audit_verify_reports_data_appended_to_a_log(tmp_path: Path, data: bytes) -> None:
    (log,) = write(tmp_path, "a")
    log.write_bytes(log.read_bytes() + data)
    assert len(errors(tmp_path)) == 1


def test_log_replaced_by_that_of_another_run_is_found(tmp_path: Path) -> None:
    first, second = write(tmp_path, "a", "b")
    first.write_bytes(second.read_bytes())
    assert errors(tmp_path) == [f"{DAY}/a: line 1 does not continue the line before it"]


def test_audit_verify_reports_a_removed_or_added_log(tmp_path: Path) -> None:
    first, _ = write(tmp_path, "a", "b")
    first.rename(first.with_name("c.jsonl"))
    assert errors(tmp_path) == [
        f"{DAY}/a: the log is missing",
        f"{DAY}/c: line 1 does not continue the line before it",
    ]
    chain = HashChain("c", None)
    log_path(tmp_path / DAY, "c").write_bytes(chain.next_line("now", {LAST_LINE_FIELD: True}))
    assert errors(tmp_path)[1] == f"{DAY}/c: it is not in the index"


def test_audit_verify_reports_a_removed_index_or_day(tmp_path: Path) -> None:
    for number, run_id in enumerate("abc"):
        write(tmp_path, run_id, now=NOW + number * A_DAY_S)
    first, second, third = sorted(tmp_path.iterdir())
    assert states(tmp_path) == ["ok"] * 6
    shutil.move(second, tmp_path.with_suffix(".away"))
    assert errors(tmp_path) == [f"{third.name}/index: the logs of {second.name} are missing"]
    shutil.move(tmp_path.with_suffix(".away"), second)
    index_of(tmp_path, first.name).unlink()
    assert errors(tmp_path)[0] == f"{first.name}/index: it is missing, or empty"


def test_log_that_ends_on_the_next_day_is_verified_as_ok(tmp_path: Path) -> None:
    late = AuditLogWriter(tmp_path / DAY, "late", None, lambda: NOW)
    late.begin()
    write(tmp_path, "next", now=NOW + A_DAY_S)
    late.append(late.next_line({"kind": "failure", LAST_LINE_FIELD: True, "error": "none"}))
    late.finish()
    late.close()
    assert states(tmp_path) == ["ok"] * 4


def test_audit_verify_reports_a_log_that_is_rewritten_without_the_key(tmp_path: Path) -> None:
    key = b"known to few"
    write(tmp_path, "a", key=key)
    assert states(tmp_path, key=key) == ["ok", "ok"]
    assert states(tmp_path) == ["WRONG", "WRONG"]
    shutil.rmtree(tmp_path / DAY)
    write(tmp_path, "a")
    assert states(tmp_path) == ["ok", "ok"]  # without the key the change is undetectable
    assert states(tmp_path, key=key) == ["WRONG", "WRONG"]


@pytest.mark.parametrize("kept_bytes", [0, 1, 30, None])
def test_interrupted_log_is_reported_as_unfinished_and_not_as_wrong(
    tmp_path: Path, kept_bytes: int | None
) -> None:
    writer = AuditLogWriter(tmp_path / DAY, "a", None, lambda: NOW)
    writer.begin()
    first, second = writer.next_line({"kind": "request"}), writer.next_line({"kind": "call"})
    writer.append(first + second[:kept_bytes])
    writer.close()
    assert states(tmp_path) == ["ok", "unfinished"]


def test_partial_index_line_of_a_killed_process_is_tolerated(tmp_path: Path) -> None:
    write(tmp_path, "a")
    with index_of(tmp_path).open("ab") as index:
        index.write(b'{"hash":"half of a li')
    write(tmp_path, "b")
    assert states(tmp_path) == ["ok", "ok", "ok"]


WRITE_MANY = """
import sys
from pathlib import Path
from tests.proxy.audit.logs import write
write(Path(sys.argv[1]), *(f"{sys.argv[2]}{number}" for number in range(10)))
"""


def test_two_processes_can_write_to_one_audit_index(tmp_path: Path) -> None:
    # multiprocessing would leave a helper process that other tests would count.
    command = [sys.executable, "-c", WRITE_MANY, str(tmp_path)]
    processes = [subprocess.Popen([*command, name], cwd=ROOT) for name in "ab"]
    assert [process.wait(60) for process in processes] == [0, 0]
    assert states(tmp_path) == ["ok"] * 21


def test_append_to_an_unreadable_audit_index_raises_an_error(tmp_path: Path) -> None:
    write(tmp_path, "a")
    index_of(tmp_path).write_bytes(b"no line of ours\n")
    with pytest.raises(OSError, match="cannot be read"):
        DayIndex(tmp_path / DAY, None).append("now", {})
