"""The output directory of a run: what the run has produced there, what of it is handed back to the
client, and what earlier runs have left."""

import asyncio
import json
import shlex
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from policies.artifacts import ProducedFile, SavedFile, SkippedFile, changed, output_path, select
from policies.file_names import UniqueShownNames
from policies.workspace import ANSWER_FILES, INPUT_DIR, OUTPUT_DIR
from proxy.agent.events import Emit, FileProduced
from proxy.agent.guard import Guard
from proxy.agent.result import Artifact, RunWarning
from proxy.agent.task import AgentTask, ArtifactStore, InputFile
from sandbox_runtime.errors import FileTimeoutError, SandboxFileError, SandboxLostError
from sandbox_runtime.sandbox import LIST_TIMEOUT_S, DirectoryEntry, HashLimits, Listing, Sandbox

TIDY_S = 10.0
LINKABLE_S = 10.0
"""How long an answer waits for the names of the files that it may link to."""
MAX_HASH_S, HASH_PART = 15.0, 0.25
"""The seconds that hashing files may take, and the part of the time that is left."""
_MANIFEST = f"{INPUT_DIR}/.given"
"""Names the files that clients gave to runs in this workspace."""
_OUTPUTS = f"{OUTPUT_DIR}/"
_MAX_MANIFEST_BYTES = 1 << 20
_UNLISTED = Listing((), truncated=True)
NOT_ALL_LISTED = RunWarning(
    "files_not_listed",
    "The output directory has more files than could be listed: those that are missing stay there.",
)
SANDBOX_LOST = RunWarning(
    "sandbox_lost",
    "The sandbox was lost before all files were taken out of it: those that are missing are gone.",
)


@dataclass(frozen=True, slots=True)
class FoundFile:
    """What lies in the output directory at the end of a run."""

    is_whole: bool
    """False if there are more files than can be listed, or not all could be named in time."""
    produced: list[ProducedFile] = field(default_factory=list)
    skipped_files: list[SkippedFile] = field(default_factory=list)
    """Files that could not be hashed in time, so that nobody knows whether they have changed."""


class ArtifactCollector:
    """The output directory of one run.

    A hash tells whether a file of an earlier run has changed. A file larger than `max_file_bytes`
    cannot be handed back, so its size alone is compared.
    """

    def __init__(self, inputs: Sequence[InputFile], max_file_bytes: int) -> None:
        given = {
            file.path: SavedFile(None, file.identity)
            for file in inputs
            if file.path.startswith(_OUTPUTS)
        }
        self._max_file_bytes = max_file_bytes
        self._before = given or None
        """The files that lay there before; None if it was empty."""
        self._is_before_known = True

    async def begin(self, sandbox: Sandbox, seconds: float) -> None:
        """Note what lies there from earlier runs, as far as `seconds` allow."""
        listing = await self._hashed(sandbox, seconds)
        self._is_before_known = listing is not _UNLISTED
        left = {output_path(entry.path): _contents(entry) for entry in listing.entries}
        self._before = {**left, **(self._before or {})}

    async def produced(self, sandbox: Sandbox, again: Collection[str], seconds: float) -> FoundFile:
        """Return the regular files that are new, have changed, or are to be handed back `again`."""
        if self._before is None:
            listing = await _listing(sandbox, None, seconds)
        else:
            listing = await self._hashed(sandbox, seconds)
        found = FoundFile(is_whole=not listing.truncated)
        before, wanted = self._before or {}, set(again)
        for entry in listing.entries:
            if entry.kind != "file":
                continue
            path = output_path(entry.path)
            is_unknown = path not in before and not self._is_before_known
            has_changed = path in wanted or (
                None if is_unknown else changed(before.get(path), _contents(entry))
            )
            if has_changed:
                found.produced.append(ProducedFile(path, entry.bytes))
            elif has_changed is None and entry.bytes <= self._max_file_bytes:
                found.skipped_files.append(SkippedFile(path, entry.bytes, "no_time"))
        return found

    async def _hashed(self, sandbox: Sandbox, seconds: float) -> Listing:
        hash_s = min(MAX_HASH_S, seconds * HASH_PART)
        return await _listing(sandbox, HashLimits(self._max_file_bytes, hash_s), seconds)


@dataclass(frozen=True, slots=True)
class CollectedArtifacts:
    """The files that a run hands back, and those that it does not."""

    artifacts: Sequence[Artifact] = ()
    skipped_files: Sequence[SkippedFile] = ()
    warnings: Sequence[RunWarning] = ()
    """Notices of files that a rule withholds, or that are lost."""


async def collect_artifacts(
    sandbox: Sandbox,
    outputs: ArtifactCollector,
    linked: Collection[str],
    task: AgentTask,
    guard: Guard,
    emit: Emit,
    seconds: float,
) -> CollectedArtifacts:
    """Save what a run has produced, and the files that its answer has `linked` and that are not
    saved yet, in so many seconds. Raises SandboxLostError if the files cannot be listed; whatever
    fails later is told in the notices, for the answer is there all the same.
    """
    end = asyncio.get_running_loop().time() + seconds
    found = await outputs.produced(sandbox, linked, seconds)
    withheld = await guard.withhold(found.produced)
    allowed = [file for file in found.produced if file.path not in withheld]
    selection = select(allowed, task.profile.artifacts)
    saved = await _save(sandbox, selection.chosen, task.artifact_store, emit, end)
    ruled_out = [SkippedFile(f.path, f.bytes, "rule") for f in found.produced if f.path in withheld]
    return CollectedArtifacts(
        saved.artifacts,
        [*selection.skipped_files, *ruled_out, *saved.skipped_files, *found.skipped_files],
        [*withheld.values(), *saved.warnings, *(() if found.is_whole else (NOT_ALL_LISTED,))],
    )


async def _save(
    sandbox: Sandbox,
    chosen: Sequence[ProducedFile],
    artifact_store: ArtifactStore,
    emit: Emit,
    end: float,
) -> CollectedArtifacts:
    """Take files out of the sandbox, until the loop's time `end`."""
    artifacts, skipped_files, names = list[Artifact](), list[SkippedFile](), UniqueShownNames()
    for n, file in enumerate(chosen):
        try:
            left_s = max(0.0, end - asyncio.get_running_loop().time())
            artifact = await artifact_store.save(sandbox, file, left_s)
        except FileTimeoutError:
            skipped_files += [SkippedFile(each.path, each.bytes, "no_time") for each in chosen[n:]]
            break
        except SandboxFileError:
            skipped_files.append(
                SkippedFile(file.path, file.bytes, "changed")
            )  # a process still runs
            continue
        except SandboxLostError:
            skipped_files += [SkippedFile(each.path, each.bytes, "lost") for each in chosen[n:]]
            return CollectedArtifacts(artifacts, skipped_files, (SANDBOX_LOST,))
        artifacts.append(replace(artifact, filename=names.give(artifact.path)))
        await emit(FileProduced(artifact.file_id, artifact.path, artifact.bytes))
    return CollectedArtifacts(artifacts, skipped_files)


async def remove_answer_files(sandbox: Sandbox) -> None:
    """Remove the answer files of earlier runs: they are no answer of this run."""
    files = shlex.join(ANSWER_FILES)
    await sandbox.exec(f"rm -rf {files}", timeout_s=TIDY_S, shell_state="none")


async def read_manifest(sandbox: Sandbox) -> dict[str, str]:
    """Return the files that clients gave to earlier runs: paths and identities."""
    pieces: list[bytes] = []

    async def keep(piece: bytes) -> None:
        pieces.append(piece)

    try:
        await sandbox.get(_MANIFEST, keep, max_bytes=_MAX_MANIFEST_BYTES)
        given = json.loads(b"".join(pieces))
    except (SandboxFileError, ValueError, RecursionError):
        return {}  # missing, or changed by the model: all files are given anew
    found = given.items() if isinstance(given, dict) else ()
    return {path: identity for path, identity in found if isinstance(identity, str)}


async def write_manifest(sandbox: Sandbox, given: Mapping[str, str]) -> None:
    """Note the files that clients gave, paths and identities, in the workspace, which is kept."""

    async def written() -> AsyncIterator[bytes]:
        yield json.dumps(given).encode()

    with suppress(SandboxFileError):  # the next run gives the files once more
        await sandbox.put(_MANIFEST, written())


async def all_files(sandbox: Sandbox) -> list[ProducedFile]:
    """Return the regular files in the output directory, as far as they can be named in time."""
    listing = await _listing(sandbox, None, LINKABLE_S)
    return [
        ProducedFile(output_path(entry.path), entry.bytes)
        for entry in listing.entries
        if entry.kind == "file"
    ]


async def _listing(sandbox: Sandbox, hashes: HashLimits | None, seconds: float) -> Listing:
    try:
        return await sandbox.list(OUTPUT_DIR, hashes=hashes, timeout_s=min(LIST_TIMEOUT_S, seconds))
    except FileTimeoutError:
        return _UNLISTED
    except SandboxFileError:
        return Listing((), truncated=False)


def _contents(entry: DirectoryEntry) -> SavedFile:
    return SavedFile(entry.bytes, entry.sha256)
