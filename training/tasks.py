"""Builds tasks from contexts: questions to be answered from files, with examples and distractors.

The recipe is that of arXiv 2601.16206: one question of a context is the task, earlier ones are
examples in the prompt, and the documents of the context are files beside distractors. The same
source, options and seed give the same bytes.
"""

import hashlib
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from training.contexts import Context, Document, Question
from training.distractors import Candidate, DistractorMode, DistractorPool
from training.leaks import DecontaminationFilter, contains_answer, normalise
from training.rows import MAX_ANSWER_CHARS, Manifest, Meta, QaType, Split, TaskRow, files_json
from training.sources import Source

Names = Literal["neutral", "titles"]
MAX_ANSWER_TOKENS = 30
"""Maximum length of a right answer in tokens, which are words and punctuation marks. A question
with a longer answer is dropped."""
MAX_FILES_CHARS = 2_000_000
"""Maximum number of characters of the files of one task. A larger context is dropped. Distractors
that do not fit are left out."""
ANSWER_FORMS: Mapping[QaType, str] = {
    "mcq1": "One choice is right. The answer is its letter.",
    "mcqN": (
        "Several choices are right. The answer is their letters in alphabetical order, with commas"
        " and no spaces between them."
    ),
    "number": "The answer is a number.",
    "span": "The answer is a few words from the documents.",
    "free": "The answer is a short text.",
}
"""The sentence of a problem that says which form the answer must have, by the type of the
question."""
_TOKEN = re.compile(r"\w+|[^\w\s]")
_NUMBER = re.compile(r"[+-]?(\d+|\d{1,3}(,\d{3})+)(\.\d+)?", re.ASCII)
_YES_NO = frozenset(("yes", "no", "true", "false"))
_UNSAFE_CHARS = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """The options of a build."""

    seed: int
    examples: int = 3
    """Maximum number of examples in a prompt."""
    distractors: int = 4
    distractor_mode: DistractorMode = "random"
    names: Names = "neutral"
    """Names of the files. `neutral` gives doc_01.txt and so on, and `titles` makes the names from
    the titles. The order of the files is random."""
    tasks_per_context: int = 1
    val_fraction: float = 0.0
    """The part of the contexts whose tasks are held out."""
    limit: int | None = None
    """Maximum number of tasks of both splits; None: no limit."""


@dataclass(frozen=True, slots=True)
class BuildResult:
    """The result of a build: the rows, and a manifest without files."""

    manifest: Manifest
    rows: Mapping[Split, Sequence[TaskRow]]


@dataclass(frozen=True, slots=True)
class _Task:
    """A question with its type and its right answer."""

    question: Question
    qa_type: QaType
    gold_answer: str
    statement: str
    """The question with its choices."""

    @property
    def answers(self) -> tuple[str, ...]:
        """The texts that give the answer away: the accepted answers, or the right choices."""
        question = self.question
        if not question.choices:
            return question.answers
        return tuple(question.choices[ord(letter) - ord("A")] for letter in question.answers)


@dataclass(frozen=True, slots=True)
class _ContextTasks:
    """The tasks of a context, in the order of the source."""

    key: str
    context: Context
    normalised_documents: tuple[str, ...]
    """The result of `normalise` for the text of each document."""
    tasks: tuple[_Task, ...]


def build(
    source: Source, options: BuildOptions, decontamination: DecontaminationFilter | None = None
) -> BuildResult:
    """Return the tasks of a source. Contexts are split by the hash of their words, so that a
    context is in the same split with every seed."""
    dropped_counts: Counter[str] = Counter()
    contexts = _merge_contexts(source.contexts)
    groups = list(
        _context_tasks(contexts, decontamination or DecontaminationFilter(()), dropped_counts)
    )
    splits: dict[Split, list[_ContextTasks]] = {"train": [], "val": []}
    for group in groups:
        splits["val" if _is_held_out(group.key, options.val_fraction) else "train"].append(group)
    chosen = _choose_tasks(groups, options)
    rows: dict[Split, Sequence[TaskRow]] = {}
    for split, members in splits.items():
        # Distractors of the other split would show its contexts.
        pool = DistractorPool([each for group in members for each in _candidates(group)])
        rows[split] = [
            _row(source, options, group, task_number, pool)
            for group in members
            for task_number in chosen.get(group.key, ())
        ]
    manifest = Manifest(
        kind=source.kind,
        source=source.origin,
        licence=source.licence,
        seed=options.seed,
        options=asdict(options),
        contexts=len(contexts),
        questions=sum(len(context.questions) for context in source.contexts),
        dropped=dict(sorted(dropped_counts.items())),
        files={},
    )
    return BuildResult(manifest, rows)


# Contexts and questions


def _context_tasks(
    contexts: Mapping[str, Context],
    decontamination: DecontaminationFilter,
    dropped_counts: Counter[str],
) -> Iterator[_ContextTasks]:
    for key, context in contexts.items():
        texts = [document.text for document in context.documents]
        if any(map(decontamination.is_contaminated, texts)):
            dropped_counts["contexts: contaminated"] += 1
        elif sum(map(len, texts)) > MAX_FILES_CHARS:
            dropped_counts["contexts: too large"] += 1
        else:
            normalised_documents = tuple(map(normalise, texts))
            tasks = _tasks(context, normalised_documents, decontamination, dropped_counts)
            yield _ContextTasks(key, context, normalised_documents, tuple(tasks))


def _merge_contexts(contexts: Sequence[Context]) -> dict[str, Context]:
    """Return the contexts by hash. The questions of contexts with the same words are joined."""
    merged: dict[str, Context] = {}
    questions: dict[str, list[Question]] = {}
    for context in contexts:
        words = "\n".join(normalise(document.text) for document in context.documents)
        key = hashlib.sha256(words.encode()).hexdigest()
        merged.setdefault(key, context)
        questions.setdefault(key, []).extend(context.questions)
    return {
        key: replace(context, questions=tuple(questions[key])) for key, context in merged.items()
    }


def _tasks(
    context: Context,
    normalised_documents: Sequence[str],
    decontamination: DecontaminationFilter,
    dropped_counts: Counter[str],
) -> Iterator[_Task]:
    seen: set[str] = set()
    for question in context.questions:
        task = _task(question, normalised_documents)
        key = normalise(task.statement)
        reason = _drop_reason(task)
        if reason is None and key in seen:
            reason = "repeated"
        if reason is None and any(
            map(decontamination.is_contaminated, (question.text, task.statement))
        ):
            reason = "contaminated"
        if reason is not None:
            dropped_counts[f"questions: {reason}"] += 1
            continue
        seen.add(key)
        yield task


def _task(question: Question, normalised_documents: Sequence[str]) -> _Task:
    gold = question.answers[0] if question.answers else ""
    if question.choices:
        qa_type: QaType = "mcq1" if len(question.answers) == 1 else "mcqN"
        lines = [f"{chr(ord('A') + at)}. {text}" for at, text in enumerate(question.choices)]
        statement = "\n".join([question.text.strip(), *lines])
        return _Task(question, qa_type, ",".join(question.answers), statement)
    return _Task(
        question,
        question.qa_type or _qa_type_of(gold, normalised_documents),
        gold,
        question.text.strip(),
    )


def _qa_type_of(gold: str, normalised_documents: Sequence[str]) -> QaType:
    if _NUMBER.fullmatch(gold):
        return "number"
    return "span" if any(contains_answer(each, gold) for each in normalised_documents) else "free"


def _drop_reason(task: _Task) -> str | None:
    if not task.gold_answer:
        return "unanswerable"
    if {normalise(answer) for answer in task.answers} & _YES_NO:
        return "yes or no"
    choices = task.question.choices
    if len(set(map(normalise, choices))) < len(set(choices)) or len(set(choices)) < len(choices):
        return "two equal choices"
    if task.qa_type == "number" and not _NUMBER.fullmatch(task.gold_answer):
        return "answer of the type number that is no number"
    if not all(map(normalise, task.answers)):
        return "answer without letters and digits"
    if not choices and len(_TOKEN.findall(task.gold_answer)) > MAX_ANSWER_TOKENS:
        return f"answer over {MAX_ANSWER_TOKENS} tokens"
    if not choices and len(task.gold_answer) > MAX_ANSWER_CHARS:
        return f"answer over {MAX_ANSWER_CHARS:,} characters"
    return None


# Splits and draws


def _is_held_out(key: str, fraction: float) -> bool:
    return int(key[:8], 16) / 16**8 < fraction


def _choose_tasks(groups: Sequence[_ContextTasks], options: BuildOptions) -> dict[str, list[int]]:
    """Return the indexes of the chosen tasks of each context, by the key of the context.
    `options.limit` is the maximum number of tasks of all contexts. The contexts with the smallest
    hashes of seed and key get their tasks first, and those beyond the limit get none."""
    chosen = {
        group.key: sorted(
            random.Random(f"{options.seed}/{group.key}/tasks").sample(
                range(len(group.tasks)), min(options.tasks_per_context, len(group.tasks))
            )
        )
        for group in groups
    }
    if options.limit is None:
        return chosen
    order = sorted(
        chosen, key=lambda key: hashlib.sha256(f"{options.seed}/{key}".encode()).digest()
    )
    drawn: dict[str, list[int]] = {}
    left = options.limit
    for key in order:
        drawn[key] = chosen[key][:left]
        left -= len(drawn[key])
    return drawn


def _candidates(group: _ContextTasks) -> Iterator[Candidate]:
    for document, words in zip(group.context.documents, group.normalised_documents, strict=True):
        yield Candidate(group.context.topic, document.title, document.text, words)


# Rows


def _row(
    source: Source,
    options: BuildOptions,
    group: _ContextTasks,
    task_number: int,
    pool: DistractorPool,
) -> TaskRow:
    task, context = group.tasks[task_number], group.context
    rng = random.Random(f"{options.seed}/{group.key}/{task_number}")
    examples = _examples(group.tasks[:task_number], task, options.examples)
    drawn = pool.draw(
        options.distractor_mode,
        options.distractors,
        rng,
        topic=context.topic,
        own_documents=group.normalised_documents,
        question=task.statement,
        answers=task.answers,
    )
    distractors = _fitting_distractors(context.documents, drawn)
    files, context_files = _shuffle_files(context.documents, distractors, rng, options.names)
    digest = hashlib.sha256(f"{group.key}\n{task.statement}".encode()).hexdigest()
    return TaskRow(
        id=f"{source.kind}/{digest[:16]}",
        domain=context.domain[:100],
        problem_statement=_problem_statement(task, examples),
        ground_truth=task.gold_answer,
        input_files=files_json(files),
        qa_type=task.qa_type,
        meta=Meta(
            source=source.origin,
            licence=source.licence,
            seed=options.seed,
            context=group.key,
            question=task.statement,
            n_examples=len(examples),
            n_files=len(files),
            n_distractors=len(distractors),
            sizes=tuple(map(len, files.values())),
            gold_files=tuple(_gold_files(task, files, context_files)),
        ),
    )


def _shuffle_files(
    context_documents: Sequence[Document],
    distractors: Sequence[Document],
    rng: random.Random,
    names: Names,
) -> tuple[dict[str, str], list[str]]:
    """Return the texts of all files by name, in random order, and the names of those in
    `context_documents`."""
    order = list(range(len(context_documents) + len(distractors)))
    rng.shuffle(order)
    documents = [[*context_documents, *distractors][number] for number in order]
    found = _file_names(documents, names)
    files = {name: each.text for name, each in zip(found, documents, strict=True)}
    return files, [
        name for name, number in zip(found, order, strict=True) if number < len(context_documents)
    ]


def _gold_files(task: _Task, files: Mapping[str, str], context_files: Sequence[str]) -> list[str]:
    """Return the names of the context's files that contain the answer, or of all if none does."""
    gold = [
        name
        for name in context_files
        if any(contains_answer(normalise(files[name]), answer) for answer in task.answers)
    ]
    return sorted(gold or context_files)


def _examples(earlier_tasks: Sequence[_Task], task: _Task, count: int) -> list[_Task]:
    """Return the last `count` earlier tasks whose answers do not contain the answer of `task`.

    Choices are compared by their texts, not by their letters: if all examples with the letter of
    the right choice were left out, the letters of the others would tell which choices are wrong.
    """
    golds = list(map(normalise, task.answers))
    others = [
        each
        for each in earlier_tasks
        if not any(gold in normalise(answer) for gold in golds for answer in each.answers)
    ]
    return others[max(0, len(others) - count) :]


def _problem_statement(task: _Task, examples: Sequence[_Task]) -> str:
    if not examples:
        return (
            f"Answer this question about the documents.\n\n{task.statement}\n\n{_answer_form(task)}"
        )
    shown = "\n\n".join(
        f"Question: {each.statement}\nAnswer: {each.gold_answer}" for each in examples
    )
    return (
        f"These questions about the documents have their answers beside them.\n\n{shown}\n\n"
        f"Answer the next question about the documents.\n\nQuestion: {task.statement}\n\n"
        f"{_answer_form(task)}"
    )


def _answer_form(task: _Task) -> str:
    return ANSWER_FORMS[task.qa_type]


def _fitting_distractors(
    context_documents: Sequence[Document], candidates: Sequence[Candidate]
) -> list[Document]:
    left = MAX_FILES_CHARS - sum(len(document.text) for document in context_documents)
    kept = []
    for each in candidates:
        if len(each.text) <= left:
            left -= len(each.text)
            kept.append(Document(each.title, each.text))
    return kept


def _file_names(documents: Sequence[Document], names: Names) -> list[str]:
    """Return the names of the files. Titles that differ only in case count as equal, and all but
    the first of equal titles get a number."""
    if names == "neutral":
        width = max(2, len(str(len(documents))))
        return [f"doc_{number:0{width}}.txt" for number in range(1, len(documents) + 1)]
    found: dict[str, str] = {}
    for document in documents:
        stem = _UNSAFE_CHARS.sub("-", document.title).strip("-._")[:80] or "document"
        name, number = stem, 1
        while name.casefold() in found:
            number += 1
            name = f"{stem}_{number}"
        found[name.casefold()] = f"{name}.txt"
    return list(found.values())
