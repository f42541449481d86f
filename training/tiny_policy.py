"""A tiny model and its tasks, to demonstrate training through the proxy on a CPU.

A task has twelve facts in three files and asks for one of them, like the paper's reading tasks on a
small scale. The model has 0.4 million parameters and random weights, a tokenizer of its own, and a
chat template that writes tool calls as they were sampled.
"""

import hashlib
import json
import random
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from training.rewards import Attempt, Reward
from training.rows import Meta, QaType, TaskRow, files_json
from training.turn_server import text_of

ANIMALS = (
    *("fox", "owl", "hen", "cat", "dog", "cow", "pig", "bee"),
    *("ant", "bat", "rat", "elk", "emu", "ape", "koi", "yak"),
)
COLOURS = ("red", "blue", "green", "black", "white", "brown", "pink", "grey")
FACT_COUNT, FILE_NAMES = 12, ("a.txt", "b.txt", "c.txt")
PAD_TOKEN, BEGIN_TOKEN, END_TOKEN = "<|pad|>", "<|im_start|>", "<|im_end|>"
VOCABULARY_SIZE = 512
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{%- set arguments = call.function.arguments %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
{{- (arguments if arguments is string else arguments | tojson) + '}</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>' }}
{%- endgeneration %}
{{- '\\n' }}
{%- else %}
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content or [] %}{{ part.text or '' }}{% endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""The chat template. It does not write the definitions of the tools: the model learns the tools by
supervised training, before GRPO. Its `generation` blocks mark the assistant's tokens for
`assistant_only_loss` of TRL's SFTTrainer."""
RESPONSE_TEMPLATE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>", "content": "text"},
    },
}
"""The template with which the tokenizer's `parse_response` reads a reply."""
Message = Mapping[str, Any]


# Tasks


def make_tasks(count: int, rng: random.Random) -> list[TaskRow]:
    """Return tasks with random facts."""
    return [_make_task(rng) for _ in range(count)]


def _make_task(rng: random.Random) -> TaskRow:
    colours = {animal: rng.choice(COLOURS) for animal in rng.sample(ANIMALS, FACT_COUNT)}
    facts = [f"The color of the {animal} is {colour}.\n" for animal, colour in colours.items()]
    size = FACT_COUNT // len(FILE_NAMES)
    files = {
        name: "".join(facts[size * index : size * (index + 1)])
        for index, name in enumerate(FILE_NAMES)
    }
    asked = rng.choice(list(colours))
    return reading_task(f"What is the color of the {asked}?", files, colours[asked], "span")


def reading_task(question: str, files: Mapping[str, str], answer: str, qa_type: QaType) -> TaskRow:
    """Return a task with this question, these files and this answer."""
    digest = hashlib.sha256("".join([question, *files.values()]).encode()).hexdigest()
    meta = Meta(
        source="generated",
        licence="Apache-2.0",
        seed=0,
        context=digest,
        question=question,
        n_examples=0,
        n_files=len(files),
        n_distractors=0,
        sizes=tuple(map(len, files.values())),
        gold_files=tuple(name for name, text in files.items() if answer in text),
    )
    return TaskRow(
        id=f"reading-{digest[:16]}",
        domain="reading",
        problem_statement=question,
        ground_truth=answer,
        input_files=files_json(files),
        qa_type=qa_type,
        meta=meta,
    )


def score(row: TaskRow, attempt: Attempt) -> Reward:
    """Return 1 for the right colour, else 0. A lost sandbox gives None."""
    if attempt.sandbox_lost:
        return Reward(None, "sandbox lost")
    return Reward(float(attempt.answer.strip() == row.ground_truth), "function")


def scripted_reply(messages: Sequence[Message], rng: random.Random, search_share: float) -> Message:
    """Return the next message of a scripted policy. It searches the files in a share `search_share`
    of the runs, and guesses in the others."""
    last = text_of(messages[-1])
    if messages[-1]["role"] != "user":
        found = re.search(r" is (\w+)\.", last)
        return {"role": "assistant", "content": found[1] if found else rng.choice(COLOURS)}
    if rng.random() >= search_share:
        return {"role": "assistant", "content": rng.choice(COLOURS)}
    asked = re.search(r"the color of the (\w+)\?", last)
    assert asked, "a task asks for a colour"
    return call_message("execute_bash", command=f"grep {asked[1]} documents/*")


def call_message(tool: str, **arguments: str) -> Message:
    """Return a message of the assistant with one tool call."""
    function = {"name": tool, "arguments": json.dumps(arguments)}
    call = {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


# The model


def make_tokenizer(traces: Iterable[Sequence[Message]]) -> PreTrainedTokenizerFast:
    """Return a tokenizer that is trained on the texts of traces."""
    texts = [
        text
        for trace in traces
        for message in trace
        for text in (text_of(message), *_call_texts(message))
    ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[PAD_TOKEN, BEGIN_TOKEN, END_TOKEN],
        initial_alphabet=alphabet,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=END_TOKEN,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.response_template = RESPONSE_TEMPLATE
    return fast


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """Return a model with random weights, in fp32."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        initializer_range=0.1,  # with 0.02, a model of this size does not learn to look up
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config).float()


def _call_texts(message: Message) -> list[str]:
    calls = message.get("tool_calls") or []
    return [f"{call['function']['name']}{call['function']['arguments']}" for call in calls]
