"""The default instruction of a chat template, found in renderings as real templates make them."""

import pytest

from policies.default_instruction import MAX_CHARS, find_default_instruction, join_instructions

SYSTEM, USER = "Be 6d1f0a94b7c3", "Hi 5e21ab"
SMOLLM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
QWEN = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."


def found_in(without_system: str, with_system: str) -> str:
    return find_default_instruction(
        without_system=without_system, with_system=with_system, system=SYSTEM, user=USER
    )


def chatml(instruction: str | None) -> str:
    system = "" if instruction is None else f"<|im_start|>system\n{instruction}<|im_end|>\n"
    return f"{system}<|im_start|>user\n{USER}<|im_end|>\n<|im_start|>assistant\n"


def llama3(instruction: str) -> str:
    return (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
        "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
        f"{instruction}<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n{USER}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def mistral(instruction: str) -> str:
    return f"<s>[SYSTEM_PROMPT]{instruction}[/SYSTEM_PROMPT][INST]{USER}[/INST]"


def gpt_oss(instruction: str) -> str:
    developer = f"<|start|>developer<|message|># Instructions\n\n{instruction}\n\n<|end|>"
    return (
        "<|start|>system<|message|>You are ChatGPT, a large language model.\n\nReasoning: medium"
        f"<|end|>{developer if instruction else ''}<|start|>user<|message|>{USER}<|end|>"
        "<|start|>assistant"
    )


@pytest.mark.parametrize(
    ("without_system", "with_system", "default"),
    [
        pytest.param(chatml(SMOLLM), chatml(SYSTEM), SMOLLM, id="SmolLM2"),
        pytest.param(chatml(QWEN), chatml(SYSTEM), QWEN, id="Qwen2.5"),
        pytest.param(chatml(None), chatml(SYSTEM), "", id="ChatML without a default"),
        pytest.param(chatml(""), chatml(SYSTEM), "", id="empty system turn"),
        pytest.param(llama3(""), llama3(SYSTEM), "", id="Llama 3.1"),
        pytest.param(
            mistral("You are Le Chat. It is 2026-11-29."),
            mistral(SYSTEM),
            "You are Le Chat. It is 2026-11-29.",
            id="Mistral with a default",
        ),
        pytest.param(
            f"<s>[INST] {USER}[/INST]",
            f"<s>[INST] {SYSTEM}\n\n{USER}[/INST]",
            "",
            id="Mistral v3",
        ),
        pytest.param(
            f"<bos><start_of_turn>user\n{USER}<end_of_turn>\n<start_of_turn>model\n",
            f"<bos><start_of_turn>user\n{SYSTEM}\n\n{USER}<end_of_turn>\n<start_of_turn>model\n",
            "",
            id="Gemma 3",
        ),
        pytest.param(gpt_oss(""), gpt_oss(SYSTEM), "", id="gpt-oss"),
        pytest.param(f"{QWEN}\n\nUser: {USER}", f"{SYSTEM}\n\nUser: {USER}", QWEN, id="no markup"),
    ],
)
def test_default_instruction_of_a_chat_template_is_found(
    without_system: str, with_system: str, default: str
) -> None:
    assert found_in(without_system, with_system) == default


@pytest.mark.parametrize(
    "between",
    [
        "Help.<|im_end|>\n<|im_start|>user\nExample",
        "Help.</s>",
        "Help. [INST]",
        "Help.\0",
        "a" * (MAX_CHARS + 1),
        f"Help. {USER}",
    ],
)
def test_default_instruction_with_markup_user_text_or_excessive_length_is_refused(
    between: str,
) -> None:
    assert found_in(chatml(between), chatml(SYSTEM)) == ""


@pytest.mark.parametrize(
    ("without_system", "with_system"),
    [
        ("", ""),
        (chatml(SMOLLM), chatml(f"{SYSTEM}{SYSTEM}")),
        (chatml(SMOLLM), SYSTEM),
        (f"ab{USER}c", f"ab{SYSTEM}b{USER}c"),
        (chatml(SMOLLM).replace(USER, ""), chatml(SYSTEM).replace(USER, "")),
    ],
    ids=["empty", "system text twice", "user text lost", "overlap", "no user text"],
)
def test_unexpected_chat_template_renderings_give_no_default_instruction(
    without_system: str, with_system: str
) -> None:
    assert found_in(without_system, with_system) == ""


def test_default_instruction_of_the_maximum_length_is_found() -> None:
    longest = "a" * MAX_CHARS
    assert found_in(chatml(longest), chatml(SYSTEM)) == longest


def test_default_instruction_precedes_the_prompt() -> None:
    assert join_instructions("You are Qwen.", "You have a sandbox.") == (
        "You are Qwen.\n\nYou have a sandbox."
    )
    assert join_instructions("", "You have a sandbox.") == "You have a sandbox."
