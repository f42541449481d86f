"""A tiny model and its tasks, with which training through the proxy is shown on a CPU.

A task has twelve facts in three files and asks for one of them, as the paper's reading tasks do in
large. The model has 0.4 million parameters and random weights, a tokenizer of its own, and a chat
template that writes tool calls as they were sampled.
"""

import hashlib
import json
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from training.rewards import Attempt, Reward
from training.rows import Meta, TaskRow

ANIMALS = (
    *("fox", "owl", "hen", "cat", "dog", "cow", "pig", "bee"),
    *("ant", "bat", "rat", "elk", "emu", "ape", "koi", "yak"),
)
COLOURS = ("red", "blue", "green", "black", "white", "brown", "pink", "grey")
FACTS, FILES = 12, ("a.txt", "b.txt", "c.txt")
PAD, BEGIN, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
VOCABULARY = 512
TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content or [] %}{{ part.text or '' }}{% endfor %}
{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments + '}</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
Message = Mapping[str, Any]


# Tasks


def make_tasks(count: int, rng: random.Random) -> list[TaskRow]:
    """Return tasks with random facts."""
    return [_make_task(rng) for _ in range(count)]


def _make_task(rng: random.Random) -> TaskRow:
    colours = {animal: rng.choice(COLOURS) for animal in rng.sample(ANIMALS, FACTS)}
    facts = [f"The color of the {animal} is {colour}.\n" for animal, colour in colours.items()]
    size = FACTS // len(FILES)
    files = {
        name: "".join(facts[size * index : size * (index + 1)]) for index, name in enumerate(FILES)
    }
    asked = rng.choice(list(colours))
    question = f"What is the color of the {asked}?"
    digest = hashlib.sha256("".join([question, *facts]).encode()).hexdigest()
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
        gold_files=tuple(name for name, text in files.items() if f" {asked} " in text),
    )
    return TaskRow(
        id=f"facts-{digest[:16]}",
        domain="facts",
        problem_statement=question,
        ground_truth=colours[asked],
        input_files=json.dumps(files),
        qa_type="span",
        meta=meta,
    )


def score(row: TaskRow, attempt: Attempt) -> Reward:
    """Return 1 for the right colour, else 0. A lost sandbox gives None."""
    if attempt.sandbox_lost:
        return Reward(None, "sandbox lost")
    return Reward(float(attempt.answer.strip() == row.ground_truth), "function")


def scripted_reply(messages: Sequence[Message], rng: random.Random, reads: float) -> Message:
    """Return the next message of a scripted policy. It searches the files in a share `reads` of the
    runs, and guesses in the others."""
    last = _text(messages[-1])
    if messages[-1]["role"] != "user":
        found = re.search(r" is (\w+)\.", last)
        return {"role": "assistant", "content": found[1] if found else rng.choice(COLOURS)}
    if rng.random() >= reads:
        return {"role": "assistant", "content": rng.choice(COLOURS)}
    asked = re.search(r"the color of the (\w+)\?", last)
    assert asked, "a task asks for a colour"
    arguments = json.dumps({"command": f"grep {asked[1]} documents/*"})
    function = {"name": "execute_bash", "arguments": arguments}
    call = {"id": f"call_{rng.getrandbits(64):016x}", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


# The model


def make_tokenizer(traces: Iterable[Sequence[Message]]) -> PreTrainedTokenizerFast:
    """Return a tokenizer that is trained on the texts of traces."""
    texts = [
        text
        for trace in traces
        for message in trace
        for text in (_text(message), *_written_calls(message))
    ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[PAD, BEGIN, END], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE
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


def encode(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message]
) -> tuple[list[int], list[int]]:
    """Return the tokens of a trace, and a mask with 1 for each token of the assistant."""
    ids = _render(tokenizer, messages)
    mask = [0] * len(ids)
    newline = len(tokenizer("\n", add_special_tokens=False)["input_ids"])
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            start = len(_render(tokenizer, messages[:index], add_generation_prompt=True))
            end = len(_render(tokenizer, messages[: index + 1])) - newline
            mask[start:end] = [1] * (end - start)
    return ids, mask


def _render(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message], **options: bool
) -> list[int]:
    ids = tokenizer.apply_chat_template(list(messages), return_dict=False, **options)
    return list(ids)


def fine_tune(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    traces: Sequence[Sequence[Message]],
    *,
    steps: int,
    rng: random.Random,
    learning_rate: float,
    batch: int = 16,
) -> float:
    """Train the model on the assistant's tokens of traces. Return the last loss."""
    pad = tokenizer.pad_token_id
    encoded = [encode(tokenizer, trace) for trace in traces]
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    model.train()
    loss = torch.tensor(0.0)
    for step in range(steps):
        chosen = rng.choices(encoded, k=batch)
        width = max(len(ids) for ids, _ in chosen)
        ids = torch.tensor([each + [pad] * (width - len(each)) for each, _ in chosen])
        mask = torch.tensor([each + [0] * (width - len(each)) for _, each in chosen])
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1, (step + 1) / 10) * (1 - 0.9 * step / steps)
        labels = ids.masked_fill(mask == 0, -100)
        loss = model(input_ids=ids, attention_mask=(ids != pad).long(), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return float(loss.item())


def _text(message: Message) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def _written_calls(message: Message) -> list[str]:
    calls = message.get("tool_calls") or []
    return [f"{call['function']['name']}{call['function']['arguments']}" for call in calls]
