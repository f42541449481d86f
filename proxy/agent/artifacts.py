"""The output directory of a run: finding the files that the run produced, saving them as artifacts,
and recognizing the files of earlier runs in the workspace."""

import asyncio
import json
import shlex
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from policies.artifacts import (
    FileVersion,
    ProducedFile,
    SkippedFile,
    is_changed,
    output_path,
    select_files,
)
from policies.file_names import UniqueDisplayNames
from policies.workspace import ANSWER_FILES, INPUT_DIR, OUTPUT_DIR
from proxy.agent.events import Emit, FileProduced
from proxy.agent.guard import Guard
from proxy.agent.result import Artifact, RunWarning
from proxy.agent.task import AgentTask, ArtifactStore, InputFile
from sandbox_runtime.errors import FileTimeoutError, SandboxFileError, SandboxLostError
from sandbox_runtime.sandbox import LIST_TIMEOUT_S, DirectoryEntry, HashLimits, Listing, Sandbox

REMOVE_TIMEOUT_S = 10.0
LINK_LISTING_S = 10.0
"""Timeout of listing the files that an answer may link to, in seconds."""
MAX_HASH_S, HASH_SHARE = 15.0, 0.25
"""Maximum duration of hashing files: in seconds, and as a share of the time left."""
_MANIFEST = f"{INPUT_DIR}/.given"
"""The manifest of the input files that earlier runs put into this workspace."""
_OUTPUTS = f"{OUTPUT_DIR}/"
_MAX_MANIFEST_BYTES = 1 << 20
_UNLISTED = Listing((), truncated=True)
NOT_ALL_LISTED = RunWarning(
    "files_not_listed",
    "The output directory has more files than could be listed. Files that are missing here are"
    " still in the output directory.",
)
SANDBOX_LOST = RunWarning(
    "sandbox_lost",
    "The sandbox was lost before all files were saved. Files that are missing here are lost.",
)


@dataclass(frozen=True, slots=True)
class FoundFiles:
    """The files in the output directory that a run has produced, may have produced, or links to in
    its answer."""

    is_complete: bool
    """False if there were too many files to list all of them in time."""
    produced: list[ProducedFile] = field(default_factory=list)
    skipped_files: list[SkippedFile] = field(default_factory=list)
    """Files that may have changed: their hashes, or the files before the run, are unknown because
    there was no time."""


class ArtifactCollector:
    """Finds the files that one run produced in the output directory.

    Files of earlier runs are compared by hash. A file larger than `max_file_bytes` cannot become an
    artifact, so only its size is compared.
    """

    def __init__(self, inputs: Sequence[InputFile], max_file_bytes: int) -> None:
        initial = {
            file.path: FileVersion(None, file.identity)
            for file in inputs
            if file.path.startswith(_OUTPUTS)
        }
        self._max_file_bytes = max_file_bytes
        self._before = initial or None
        """The files that existed before the run; None if there were none."""
        self._is_before_known = True

    async def record_existing(self, sandbox: Sandbox, seconds: float) -> None:
        """Record the files of earlier runs. `seconds` limits the time for listing and hashing."""
        listing = await self._hashed(sandbox, seconds)
        self._is_before_known = listing is not _UNLISTED
        existing = {output_path(entry.path): _contents(entry) for entry in listing.entries}
        self._before = {**existing, **(self._before or {})}

    async def produced(
        self, sandbox: Sandbox, linked: Collection[str], seconds: float
    ) -> FoundFiles:
        """Return the regular files that are new, have changed, or are in `linked`."""
        if self._before is None:
            listing = await _listing(sandbox, None, seconds)
        else:
            listing = await self._hashed(sandbox, seconds)
        found = FoundFiles(is_complete=not listing.truncated)
        before, linked = self._before or {}, set(linked)
        for entry in listing.entries:
            if entry.kind != "file":
                continue
            path = output_path(entry.path)
            is_unknown = path not in before and not self._is_before_known
            has_changed = path in linked or (
                None if is_unknown else is_changed(before.get(path), _contents(entry))
            )
            if has_changed:
                found.produced.append(ProducedFile(path, entry.bytes))
            elif has_changed is None and entry.bytes <= self._max_file_bytes:
                found.skipped_files.append(SkippedFile(path, entry.bytes, "no_time"))
        return found

    async def _hashed(self, sandbox: Sandbox, seconds: float) -> Listing:
        hash_s = min(MAX_HASH_S, seconds * HASH_SHARE)
        return await _listing(sandbox, HashLimits(self._max_file_bytes, hash_s), seconds)


@dataclass(frozen=True, slots=True)
class CollectedArtifacts:
    """The artifacts of a run, and the files that were skipped."""

    artifacts: Sequence[Artifact] = ()
    skipped_files: Sequence[SkippedFile] = ()
    warnings: Sequence[RunWarning] = ()
    """Warnings about files that a rule withholds, that are lost, or that could not be listed."""


async def collect_artifacts(
    sandbox: Sandbox,
    outputs: ArtifactCollector,
    linked: Collection[str],
    task: AgentTask,
    guard: Guard,
    emit: Emit,
    seconds: float,
) -> CollectedArtifacts:
    """Save the files that a run produced, and the `linked` files of its answer that are not saved
    yet, within `seconds`.

    Raises SandboxLostError if the sandbox is lost before the files are listed. Later failures
    become warnings or skipped files, for the answer is valid without the files.
    """
    end = asyncio.get_running_loop().time() + seconds
    found = await outputs.produced(sandbox, linked, seconds)
    withheld = await guard.withheld_files(found.produced)
    allowed = [file for file in found.produced if file.path not in withheld]
    selection = select_files(allowed, task.profile.artifacts)
    saved = await _save(sandbox, selection.chosen, task.artifact_store, emit, end)
    ruled_out = [SkippedFile(f.path, f.bytes, "rule") for f in found.produced if f.path in withheld]
    return CollectedArtifacts(
        saved.artifacts,
        [*selection.skipped, *ruled_out, *saved.skipped_files, *found.skipped_files],
        [*withheld.values(), *saved.warnings, *(() if found.is_complete else (NOT_ALL_LISTED,))],
    )


async def _save(
    sandbox: Sandbox,
    chosen: Sequence[ProducedFile],
    artifact_store: ArtifactStore,
    emit: Emit,
    end: float,
) -> CollectedArtifacts:
    """Save files until `end`, by the event loop's clock."""
    artifacts, skipped_files, names = list[Artifact](), list[SkippedFile](), UniqueDisplayNames()
    for n, file in enumerate(chosen):
        try:
            left_s = max(0.0, end - asyncio.get_running_loop().time())
            artifact = await artifact_store.save(sandbox, file, left_s)
        except FileTimeoutError:
            skipped_files += [SkippedFile(rest.path, rest.bytes, "no_time") for rest in chosen[n:]]
            break
        except SandboxFileError:
            # A process that still runs has changed or removed the file.
            skipped_files.append(SkippedFile(file.path, file.bytes, "changed"))
            continue
        except SandboxLostError:
            skipped_files += [SkippedFile(rest.path, rest.bytes, "lost") for rest in chosen[n:]]
            return CollectedArtifacts(artifacts, skipped_files, (SANDBOX_LOST,))
        artifacts.append(replace(artifact, filename=names.assign(artifact.path)))
        await emit(FileProduced(artifact.file_id, artifact.path, artifact.bytes))
    return CollectedArtifacts(artifacts, skipped_files)


async def remove_answer_files(sandbox: Sandbox) -> None:
    """Remove the answer files of earlier runs."""
    files = shlex.join(ANSWER_FILES)
    await sandbox.exec(f"rm -rf {files}", timeout_s=REMOVE_TIMEOUT_S, shell_state="none")


async def read_manifest(sandbox: Sandbox) -> dict[str, str]:
    """Return the identity (see InputFile) of each input file that earlier runs uploaded into the
    workspace, by path. Return an empty dict if the manifest is missing or the model has damaged
    it."""
    pieces: list[bytes] = []

    async def keep(piece: bytes) -> None:
        pieces.append(piece)

    try:
        await sandbox.get(_MANIFEST, keep, max_bytes=_MAX_MANIFEST_BYTES)
        given = json.loads(b"".join(pieces))
    except (SandboxFileError, ValueError, RecursionError):
        return {}  # missing, or changed by the model: all input files are uploaded again
    found = given.items() if isinstance(given, dict) else ()
    return {path: identity for path, identity in found if isinstance(identity, str)}


async def write_manifest(sandbox: Sandbox, identities: Mapping[str, str]) -> None:
    """Write the identities of the input files, by path, into the workspace for later runs."""

    async def written() -> AsyncIterator[bytes]:
        yield json.dumps(identities).encode()

    with suppress(SandboxFileError):  # the next run uploads the files again
        await sandbox.put(_MANIFEST, written())


async def list_output_files(sandbox: Sandbox) -> list[ProducedFile]:
    """Return the regular files in the output directory. Return an empty list if the directory is
    missing or listing it times out. Raises SandboxLostError."""
    listing = await _listing(sandbox, None, LINK_LISTING_S)
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


def _contents(entry: DirectoryEntry) -> FileVersion:
    return FileVersion(entry.bytes, entry.sha256)
