"""The output directory of a run: finding the files that the run produced, saving them as artifacts,
and recognizing the files of earlier runs in the workspace."""

import asyncio
import json
import shlex
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

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
"""Path of the manifest, which lists the input files that earlier runs put into this workspace."""
_OUTPUT_PREFIX = f"{OUTPUT_DIR}/"
_MAX_MANIFEST_BYTES = 1 << 20
_TIMED_OUT_LISTING = Listing((), truncated=True)
FILES_NOT_LISTED = RunWarning(
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
    produced_files: list[ProducedFile] = field(default_factory=list)
    skipped_files: list[SkippedFile] = field(default_factory=list)
    """Files that may have changed. There was no time to hash them, or to record the files that
    existed before the run."""


class ArtifactCollector:
    """Finds the files in the output directory that one run created or changed.

    A file that existed before the run has changed if its hash is different. A file larger than
    `max_file_bytes` cannot become an artifact, so it is not hashed, and only its size is compared.
    """

    def __init__(self, input_files: Sequence[InputFile], max_file_bytes: int) -> None:
        initial = {
            file.path: FileVersion(None, file.identity)
            for file in input_files
            if file.path.startswith(_OUTPUT_PREFIX)
        }
        self._max_file_bytes = max_file_bytes
        self._existing_files = initial or None
        """The files that existed before the run, and the input files in the output directory. None
        if there are no such input files and `record_existing_files` was not called."""
        self._knows_existing_files = True

    def state(self) -> dict[str, Any]:
        """Return the files that existed before the run, as JSON values."""
        files = self._existing_files
        return {
            "files": files and {path: asdict(version) for path, version in files.items()},
            "is_complete": self._knows_existing_files,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the record of the files that existed before the run. `state` is the value that
        the method `state` returned on the run's previous server."""
        files = state["files"]
        self._existing_files = files and {path: FileVersion(**each) for path, each in files.items()}
        self._knows_existing_files = state["is_complete"]

    async def record_existing_files(self, sandbox: Sandbox, timeout_s: float) -> None:
        """Record the files of earlier runs. `timeout_s` limits the time for listing and hashing."""
        listing = await self._list_with_hashes(sandbox, timeout_s)
        self._knows_existing_files = listing is not _TIMED_OUT_LISTING
        existing = {output_path(entry.path): _file_version(entry) for entry in listing.entries}
        self._existing_files = {**existing, **(self._existing_files or {})}

    async def find_produced_files(
        self, sandbox: Sandbox, linked_paths: Collection[str], timeout_s: float
    ) -> FoundFiles:
        """Return the regular files that are new, have changed, or are in `linked_paths`."""
        if self._existing_files is None:
            listing = await _list_output_dir(sandbox, None, timeout_s)
        else:
            listing = await self._list_with_hashes(sandbox, timeout_s)
        found = FoundFiles(is_complete=not listing.truncated)
        before, linked = self._existing_files or {}, set(linked_paths)
        for entry in listing.entries:
            if entry.kind != "file":
                continue
            path = output_path(entry.path)
            is_unknown = path not in before and not self._knows_existing_files
            has_changed = path in linked or (
                None if is_unknown else is_changed(before.get(path), _file_version(entry))
            )
            if has_changed:
                found.produced_files.append(ProducedFile(path, entry.bytes))
            elif has_changed is None and entry.bytes <= self._max_file_bytes:
                found.skipped_files.append(SkippedFile(path, entry.bytes, "no_time"))
        return found

    async def _list_with_hashes(self, sandbox: Sandbox, timeout_s: float) -> Listing:
        hash_s = min(MAX_HASH_S, timeout_s * HASH_SHARE)
        return await _list_output_dir(sandbox, HashLimits(self._max_file_bytes, hash_s), timeout_s)


@dataclass(frozen=True, slots=True)
class CollectedArtifacts:
    """The artifacts of a run, and the files that were skipped."""

    artifacts: Sequence[Artifact] = ()
    skipped_files: Sequence[SkippedFile] = ()
    warnings: Sequence[RunWarning] = ()
    """Warnings about files that a rule withholds, that are lost, or that could not be listed."""


async def collect_artifacts(
    sandbox: Sandbox,
    collector: ArtifactCollector,
    linked_paths: Collection[str],
    task: AgentTask,
    guard: Guard,
    emit: Emit,
    timeout_s: float,
) -> CollectedArtifacts:
    """Save the files that a run produced, and those files at the `linked_paths` of its answer that
    are not saved yet, within `timeout_s`.

    Raises SandboxLostError if the sandbox is lost before the files are listed. Later failures
    become warnings or skipped files, for the answer is valid without the files.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    found = await collector.find_produced_files(sandbox, linked_paths, timeout_s)
    withheld = await guard.withheld_files(found.produced_files)
    allowed = [file for file in found.produced_files if file.path not in withheld]
    selection = select_files(allowed, task.profile.artifacts)
    saved = await _save_files(sandbox, selection.chosen, task.artifact_store, emit, deadline)
    ruled_out = [
        SkippedFile(f.path, f.bytes, "rule") for f in found.produced_files if f.path in withheld
    ]
    return CollectedArtifacts(
        saved.artifacts,
        [*selection.skipped, *ruled_out, *saved.skipped_files, *found.skipped_files],
        [*withheld.values(), *saved.warnings, *(() if found.is_complete else (FILES_NOT_LISTED,))],
    )


async def _save_files(
    sandbox: Sandbox,
    chosen_files: Sequence[ProducedFile],
    artifact_store: ArtifactStore,
    emit: Emit,
    deadline: float,
) -> CollectedArtifacts:
    """Save files until `deadline`, by the event loop's clock."""
    artifacts, skipped_files, names = list[Artifact](), list[SkippedFile](), UniqueDisplayNames()
    for n, file in enumerate(chosen_files):
        try:
            left_s = max(0.0, deadline - asyncio.get_running_loop().time())
            artifact = await artifact_store.save(sandbox, file, left_s)
        except FileTimeoutError:
            skipped_files += [
                SkippedFile(rest.path, rest.bytes, "no_time") for rest in chosen_files[n:]
            ]
            break
        except SandboxFileError:
            # A process that still runs has changed or removed the file.
            skipped_files.append(SkippedFile(file.path, file.bytes, "changed"))
            continue
        except SandboxLostError:
            skipped_files += [
                SkippedFile(rest.path, rest.bytes, "lost") for rest in chosen_files[n:]
            ]
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

    async def manifest_bytes() -> AsyncIterator[bytes]:
        yield json.dumps(identities).encode()

    with suppress(SandboxFileError):  # the next run uploads the files again
        await sandbox.put(_MANIFEST, manifest_bytes())


async def list_output_files(sandbox: Sandbox) -> list[ProducedFile]:
    """Return the regular files in the output directory. Return an empty list if the directory is
    missing or listing it times out. Raises SandboxLostError."""
    listing = await _list_output_dir(sandbox, None, LINK_LISTING_S)
    return [
        ProducedFile(output_path(entry.path), entry.bytes)
        for entry in listing.entries
        if entry.kind == "file"
    ]


async def _list_output_dir(
    sandbox: Sandbox, hash_limits: HashLimits | None, timeout_s: float
) -> Listing:
    try:
        return await sandbox.list(
            OUTPUT_DIR, hashes=hash_limits, timeout_s=min(LIST_TIMEOUT_S, timeout_s)
        )
    except FileTimeoutError:
        return _TIMED_OUT_LISTING
    except SandboxFileError:
        return Listing((), truncated=False)


def _file_version(entry: DirectoryEntry) -> FileVersion:
    return FileVersion(entry.bytes, entry.sha256)
