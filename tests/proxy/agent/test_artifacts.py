"""Files in the output directory that a run has produced."""

from policies.artifacts import SkippedFile
from policies.workspace import OUTPUT_DIR
from proxy.agent.artifacts import ArtifactCollector
from tests.fakes.memory_sandbox import MemorySandbox

MAX_FILE_BYTES = 1 << 20
OLD = f"{OUTPUT_DIR}/old.txt"


async def test_files_of_earlier_runs_are_not_new_where_they_could_not_be_listed_in_time() -> None:
    sandbox, outputs = MemorySandbox(), ArtifactCollector([], MAX_FILE_BYTES)
    await sandbox.exec(f"mkdir -p {OUTPUT_DIR}; echo old > {OLD}", timeout_s=10)
    await outputs.record_existing(sandbox, seconds=0)
    found = await outputs.produced(sandbox, [], seconds=30)
    again = await outputs.produced(sandbox, [OLD], seconds=30)
    await sandbox.close()
    assert (found.produced, found.skipped_files) == ([], [SkippedFile(OLD, 4, "no_time")])
    assert [file.path for file in again.produced] == [OLD]


async def test_file_is_new_where_nothing_was_there_before() -> None:
    sandbox, outputs = MemorySandbox(), ArtifactCollector([], MAX_FILE_BYTES)
    await outputs.record_existing(sandbox, seconds=30)
    await sandbox.exec(f"mkdir -p {OUTPUT_DIR}; echo new > {OLD}", timeout_s=10)
    found = await outputs.produced(sandbox, [], seconds=30)
    await sandbox.close()
    assert ([file.path for file in found.produced], found.skipped_files) == ([OLD], [])
