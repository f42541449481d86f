"""Files in the output directory that a run has produced."""

from policies.artifacts import SkippedFile
from policies.workspace import OUTPUT_DIR
from proxy.agent.artifacts import ArtifactCollector
from tests.fakes.memory_sandbox import MemorySandbox

MAX_FILE_BYTES = 1 << 20
OLD = f"{OUTPUT_DIR}/old.txt"


async def test_files_are_not_reported_as_new_if_listing_the_earlier_files_timed_out() -> None:
    sandbox, collector = MemorySandbox(), ArtifactCollector([], MAX_FILE_BYTES)
    await sandbox.exec(f"mkdir -p {OUTPUT_DIR}; echo old > {OLD}", timeout_s=10)
    await collector.record_existing_files(sandbox, timeout_s=0)
    found = await collector.find_produced_files(sandbox, [], timeout_s=30)
    again = await collector.find_produced_files(sandbox, [OLD], timeout_s=30)
    await sandbox.close()
    assert (found.produced_files, found.skipped_files) == ([], [SkippedFile(OLD, 4, "no_time")])
    assert [file.path for file in again.produced_files] == [OLD]


async def test_file_is_reported_as_new_if_the_output_directory_was_empty() -> None:
    sandbox, collector = MemorySandbox(), ArtifactCollector([], MAX_FILE_BYTES)
    await collector.record_existing_files(sandbox, timeout_s=30)
    await sandbox.exec(f"mkdir -p {OUTPUT_DIR}; echo new > {OLD}", timeout_s=10)
    found = await collector.find_produced_files(sandbox, [], timeout_s=30)
    await sandbox.close()
    assert ([file.path for file in found.produced_files], found.skipped_files) == ([OLD], [])
