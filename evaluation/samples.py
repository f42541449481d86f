"""The samples of a suite: their format on disk, its validation and its manifest.

A prepared suite is a directory:

    manifest.json   name, count, hash, licence, source and protocol
    samples.jsonl   one sample a line
    files/          the input files of the samples
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from evaluation.journal import first_fault

GraderName = Literal[
    "number", "text", "verbatim", "json", "reasoning-gym", "math", "choice", "ifbench", "judge"
]
Rubric = Literal["physics", "long-context"]
MANIFEST_FILE, SAMPLES_FILE, FILES_DIRECTORY = "manifest.json", "samples.jsonl", "files"
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
_Id = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$", max_length=200)]
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class SuiteError(ValueError):
    """A suite is missing, incomplete or malformed. The message is one line for the user."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class InputFile(_Record):
    """A text file that belongs to a problem. Its content is in the suite's directory `files`."""

    name: _Name
    """The name by which the model knows the file."""
    sha256: _Digest
    """The SHA-256 of the content, which is also the name in `files`."""


class Sample(_Record):
    """One problem with its right answer."""

    id: _Id
    """The id of the problem, which is unique in all suites of a run."""
    domain: _Name
    """The domain: the row of the results table that counts the problem."""
    kind: _Name
    """The family of problems inside the domain."""
    problem: Annotated[str, Field(min_length=1)]
    """The text for the model, with the form that the answer must have."""
    plain_problem: Annotated[str, Field(min_length=1)] | None = None
    """The text for the plain mode, if it differs from `problem`."""
    ground_truth: str
    grader: GraderName
    entry: Mapping[str, Any] | None = None
    """The data of the grader. reasoning-gym: the problem as the package made it. ifbench: key,
    prompt, instruction_id_list and kwargs, as in the benchmark's file. judge: question and rubric
    (physics or long-context). The other graders need none."""
    files: Annotated[tuple[InputFile, ...], Field(strict=False)] = ()
    solution: str | None = None
    """A shell command that prints the right answer in a sandbox with the files. The scripted model
    runs it; other models never see it."""


class EvaluationProtocol(_Record):
    """The settings of a suite's requests. Options of `sandbox-eval run` replace them."""

    repeats: Annotated[int, Field(ge=1, le=1000)] = 1
    """Number of requests for each problem in each mode."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """The sampling temperature; None: not sent."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Maximum tokens of one model call; None: not sent."""
    sandbox: Mapping[str, Any] = {}
    """Fields of the `sandbox` object of the requests with a sandbox."""

    def request_fields(self) -> dict[str, Any]:
        """Return the fields that the protocol adds to each request, such as temperature."""
        return self.model_dump(include={"temperature", "max_tokens"}, exclude_none=True)

    def changed_settings(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults, without `repeats`, for run.json."""
        return self.model_dump(exclude={"repeats"}, exclude_defaults=True)


class GymEntry(BaseModel):
    """The entry of the grader `reasoning-gym`. Its fields depend on the family of problems."""


class JudgeEntry(BaseModel):
    """The entry of the grader `judge`."""

    question: Annotated[str, Field(min_length=1)]
    """The question for the judge, without instructions for the model."""
    rubric: Rubric


class IfbenchEntry(BaseModel):
    """The entry of the grader `ifbench`."""

    key: str | int
    prompt: str
    instruction_id_list: Annotated[Sequence[str], Field(min_length=1)]
    kwargs: Sequence[Mapping[str, Any]]
    """The arguments of each instruction."""


_ENTRY_MODELS: Mapping[str, type[BaseModel]] = {
    "reasoning-gym": GymEntry,
    "judge": JudgeEntry,
    "ifbench": IfbenchEntry,
}


class Manifest(_Record):
    """The origin, the hash and the protocol of a suite."""

    name: _Name
    count: Annotated[int, Field(ge=1)]
    """The number of samples."""
    sha256: _Digest
    """The SHA-256 of samples.jsonl, which contains the hashes of the input files."""
    licence: str
    source: str
    protocol: EvaluationProtocol = EvaluationProtocol()


@dataclass(frozen=True, slots=True)
class Draft:
    """A sample before it is written: the fields of Sample, and the texts of its files by name."""

    fields: Mapping[str, Any]
    documents: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Suite:
    """The samples and the manifest of a prepared suite."""

    directory: Path
    manifest: Manifest
    samples: tuple[Sample, ...]

    def read(self, file: InputFile) -> str:
        """Return the text of an input file. Raises SuiteError if it is missing or was changed."""
        path = self.directory / FILES_DIRECTORY / file.sha256
        try:
            data = path.read_bytes()
        except OSError as error:
            raise SuiteError(f"{path}: {error.strerror}. Prepare the suite again.") from error
        if hashlib.sha256(data).hexdigest() != file.sha256:
            raise SuiteError(f"{path}: the file was changed. Prepare the suite again.")
        return data.decode()


def write_suite(
    directory: Path,
    name: str,
    drafts: Sequence[Draft],
    *,
    licence: str,
    source: str,
    protocol: EvaluationProtocol | None = None,
) -> Suite:
    """Write a suite and return it. The manifest is written last: a suite without a manifest is
    incomplete."""
    files = directory / FILES_DIRECTORY
    files.mkdir(parents=True, exist_ok=True)
    (directory / MANIFEST_FILE).unlink(missing_ok=True)
    lines = [_write_sample(draft, files).model_dump_json() + "\n" for draft in drafts]
    data = "".join(lines).encode()
    (directory / SAMPLES_FILE).write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    manifest = Manifest(
        name=name,
        count=len(lines),
        sha256=digest,
        licence=licence,
        source=source,
        protocol=protocol or EvaluationProtocol(),
    )
    (directory / MANIFEST_FILE).write_text(
        manifest.model_dump_json(indent=2) + "\n", encoding="utf-8"
    )
    return load_suite(directory)


def load_suite(directory: Path) -> Suite:
    """Return the suite in a directory. Raises SuiteError with the file, the line and the field that
    is wrong."""
    path = directory / MANIFEST_FILE
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
        data = (directory / SAMPLES_FILE).read_bytes()
    except FileNotFoundError as error:
        raise SuiteError(
            f"{error.filename}: no such file. Prepare the suite: sandbox-eval prepare"
            f" {directory.name} --data {directory.parent}"
        ) from error
    except ValidationError as error:
        raise SuiteError(f"{path}: {first_fault(error)}") from error
    samples = tuple(_read_samples(directory / SAMPLES_FILE, data))
    if len(samples) != manifest.count:
        raise SuiteError(
            f"{directory / SAMPLES_FILE}: {len(samples)} samples, but the manifest says"
            f" {manifest.count}. Prepare the suite again."
        )
    if hashlib.sha256(data).hexdigest() != manifest.sha256:
        raise SuiteError(
            f"{directory / SAMPLES_FILE}: the file does not have the manifest's hash. Prepare"
            " the suite again."
        )
    return Suite(directory, manifest, samples)


def prepared_suite_names(data_directory: Path) -> list[str]:
    """Return the names of the suites in a directory, sorted. Raises SuiteError if there is none."""
    names = sorted(path.parent.name for path in data_directory.glob(f"*/{MANIFEST_FILE}"))
    if not names:
        raise SuiteError(
            f"{data_directory}: no prepared suite. Prepare the suites: sandbox-eval prepare"
        )
    return names


def load_suites(data_directory: Path, names: Sequence[str]) -> list[Suite]:
    """Return the named suites in a directory. Raises SuiteError if a suite cannot be loaded, or if
    two samples have the same id."""
    suites = [load_suite(data_directory / name) for name in names]
    seen: set[str] = set()
    for suite in suites:
        for sample in suite.samples:
            if sample.id in seen:
                raise SuiteError(f"{suite.directory}: the id {sample.id} is in two suites.")
            seen.add(sample.id)
    return suites


def _write_sample(draft: Draft, files_directory: Path) -> Sample:
    """Write the files of a draft and return its sample."""
    found = []
    for name, text in draft.documents.items():
        data = text.encode()
        digest = hashlib.sha256(data).hexdigest()
        (files_directory / digest).write_bytes(data)
        found.append(InputFile(name=name, sha256=digest))
    return Sample(**draft.fields, files=tuple(found))


def _read_samples(path: Path, data: bytes) -> Iterator[Sample]:
    lines: dict[str, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        try:
            sample = Sample.model_validate_json(line)
        except ValidationError as error:
            raise SuiteError(f"{path}:{number}: {first_fault(error)}") from error
        if sample.id in lines:
            first = lines[sample.id]
            raise SuiteError(f"{path}:{number}: id: {sample.id} is also on line {first}")
        if fault := _grader_fault(sample):
            raise SuiteError(f"{path}:{number}: {fault}")
        lines[sample.id] = number
        yield sample


def _grader_fault(sample: Sample) -> str | None:
    """Return the first fault in the fields that the sample's grader reads, or None."""
    if model := _ENTRY_MODELS.get(sample.grader):
        if sample.entry is None:
            return f"entry: the grader {sample.grader} needs an entry"
        try:
            model.model_validate(sample.entry)
        except ValidationError as error:
            return f"entry.{first_fault(error)}"
    if sample.grader == "json" and (fault := _json_fault(sample.ground_truth)):
        return f"ground_truth: {fault}"
    if sample.grader == "choice" and not re.fullmatch("[A-Z]", sample.ground_truth):
        return f"ground_truth: not one capital letter: {sample.ground_truth!r}"
    return None


def _json_fault(text: str) -> str | None:
    try:
        json.loads(text)
    except ValueError as error:
        return f"not JSON: {error}"
    return None
