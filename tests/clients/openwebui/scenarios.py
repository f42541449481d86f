"""Scenarios: the actions of a person in Open WebUI, and the content that the page must show."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio
from playwright.async_api import expect

from tests.clients.openwebui import model
from tests.clients.openwebui.environment import TIMEOUT_S, Environment
from tests.clients.openwebui.model import said
from tests.clients.openwebui.picture import HEIGHT, WIDTH, png
from tests.fakes.waiting import until
from tests.processes import running

Message = Mapping[str, Any]
ROWS = 9_000


async def steps_show_as_cards_during_the_run(env: Environment) -> None:
    chat = env.chat
    await chat.start(model.NAME)
    await chat.ask(model.SQUARES)
    await expect(chat.answer.get_by_text("Explored execute_bash")).to_be_visible()
    await expect(chat.status).to_contain_text("Ran: printf")
    await chat.screenshot("1-working")
    env.model.may_go_on[model.SQUARES].set()


async def answer_shows_its_picture_and_file(env: Environment) -> None:
    chat = env.chat
    await expect(chat.answer.get_by_text("Here is the table.")).to_be_visible()
    await expect(chat.status).to_have_text("2 steps, 2 files")
    picture = chat.answer.get_by_role("img", name="Generated Image")
    await expect(picture).to_have_js_property("naturalWidth", WIDTH)
    await expect(picture).to_have_js_property("naturalHeight", HEIGHT)
    await chat.screenshot("2-answer")
    assert await chat.download(chat.answer.get_by_role("link", name="the table")) == model.TABLE
    await chat.answer.get_by_role("button", name="squares.csv").click()
    window = chat.page.get_by_role("dialog")
    assert await chat.download(window.get_by_role("link", name="squares.csv")) == model.TABLE
    await window.get_by_role("button", name="Close").click()


async def card_shows_reasoning_command_and_output(env: Environment) -> None:
    answer = env.chat.answer
    await answer.get_by_role("button", name="Toggle details").click()
    await answer.get_by_text("Thought").click()
    await expect(answer.get_by_text(model.THOUGHT)).to_be_visible()
    await answer.get_by_text("View Result from execute_bash").last.click()
    await expect(answer.get_by_text("cat output/squares.csv")).to_be_visible()
    await expect(answer.get_by_text(model.TABLE.decode())).to_be_visible()
    await env.chat.screenshot("3-cards")


async def second_turn_reads_files_of_the_first(env: Environment) -> None:
    await env.chat.ask(model.KEPT)
    await expect(env.chat.answer.get_by_text(said(model.WORD))).to_be_visible()
    await env.chat.screenshot("4-second-turn")
    # The model gets the first answer, but none of the step cards.
    system, asked, answer, *_ = env.run_requests[-1]
    assert (system["role"], asked["content"]) == ("system", model.SQUARES)
    assert answer["role"] == "assistant"
    assert answer["content"].startswith("Here is [the table](")
    assert "tool_calls" not in answer


async def open_webui_tasks_have_no_sandbox(env: Environment) -> None:
    await expect(env.chat.page.get_by_text(model.TITLE).first).to_be_visible()
    await expect(env.chat.answer.get_by_text(model.FOLLOW_UP)).to_be_visible()
    await env.wait_for_relayed_requests(4)  # title, tags and follow-ups, twice
    assert [len(messages) for messages in env.relayed_requests] == [1] * 4
    assert await env.metric("llm_sandbox_runs_total") == 2


async def open_webui_tools_are_called_between_sandbox_tools(env: Environment) -> None:
    await env.chat.start(model.NAME)
    await env.chat.ask(model.CLOCK)
    await expect(env.chat.answer.get_by_text(said(model.WORD))).to_be_visible()
    used = env.chat.answer.get_by_text("Explored 2 execute_bash, get_current_timestamp")
    await expect(used).to_be_visible()
    await expect(env.chat.answer.get_by_text(model.NARRATION.strip())).to_be_visible()
    await env.chat.screenshot("5-its-own-tools")
    contents = [message["content"] for message in env.run_requests[-2] if message["role"] == "tool"]
    assert len(contents) == 2
    assert "current_timestamp" in contents[1]


async def stop_button_ends_the_command_and_the_chat_continues(env: Environment) -> None:
    chat = env.chat
    await chat.start(model.NAME)
    await chat.ask(model.ENDLESS)
    await expect(chat.status).to_contain_text(f" - {model.OUTPUT}")
    await chat.screenshot("6-live-output")
    assert running(env.marker)
    await chat.stop()
    with anyio.fail_after(TIMEOUT_S):
        await until(lambda: not running(env.marker))
    assert await env.metric("llm_sandbox_runs_in_flight") == 0
    await chat.ask(model.SLOW)
    await expect(chat.status).to_contain_text("Ran: ")
    await chat.screenshot("7-after-stopping")
    # Open WebUI stores nothing of an answer without text.
    asked, again, *_ = env.run_requests[-1][1:]
    assert [asked["content"], again["content"]] == [model.ENDLESS, model.SLOW]


async def reloaded_page_shows_the_running_run(env: Environment) -> None:
    chat = env.chat
    await chat.page.reload()
    await expect(chat.answer.get_by_text("View Result from execute_bash")).to_be_visible()
    await chat.screenshot("8-loaded-anew")
    env.model.may_go_on[model.SLOW].set()
    await expect(chat.answer.get_by_text(model.DONE)).to_be_visible()
    await expect(chat.answer.get_by_role("button", name="begun.txt")).to_be_visible()
    await chat.page.reload()
    await expect(chat.answer.get_by_role("button", name="begun.txt")).to_be_visible()
    await chat.screenshot("9-loaded-again")


async def text_is_shown_while_written_with_cards_between(env: Environment) -> None:
    chat = env.chat
    await chat.start(model.NAME)
    await chat.ask(model.TALK)
    await expect(chat.answer.get_by_text(model.NARRATION.strip())).to_be_visible()
    await expect(chat.answer.get_by_text(model.STORY[:80])).to_be_visible()
    await chat.screenshot("13-typing")
    env.model.may_go_on[model.TALK].set()
    await expect(chat.answer.get_by_text(model.STORY.strip())).to_be_visible()
    narration, card, answer = [
        await chat.answer.get_by_text(words).first.bounding_box()
        for words in (model.NARRATION.strip(), "View Result from execute_bash", model.STORY.strip())
    ]
    assert narration is not None
    assert card is not None
    assert answer is not None
    assert narration["y"] < card["y"] < answer["y"]
    await chat.screenshot("14-written")
    await chat.ask(model.KEPT)
    await expect(chat.answer.get_by_text("No such file")).to_be_visible()
    # The model gets its narration and story as one message.
    _, asked, said, again, *_ = env.run_requests[-1]
    assert [asked["content"], again["content"]] == [model.TALK, model.KEPT]
    assert said["content"].split() == [*model.NARRATION.split(), *model.STORY.split()]


async def uploaded_picture_is_in_the_sandbox(env: Environment) -> None:
    await env.chat.start(model.NAME)
    await env.chat.upload("dot.png", png(), "image/png")
    await env.chat.ask(model.PICTURE)
    await expect(env.chat.answer.get_by_text(said("PNG"))).to_be_visible()
    await env.chat.screenshot("10-given-a-picture")


async def short_uploaded_text_is_in_the_prompt(env: Environment) -> None:
    await env.chat.start(model.NAME)
    await env.chat.upload("rows.txt", b"row 1\nrow 2\n", "text/plain")
    await env.chat.ask(model.TEXT)
    await expect(env.chat.answer.get_by_text(said("0"))).to_be_visible()
    assert "row 1\nrow 2" in env.run_requests[-1][1]["content"]


async def long_uploaded_text_is_in_the_sandbox(env: Environment) -> None:
    rows = "".join(f"row {number}\n" for number in range(ROWS))
    await env.chat.start(model.NAME)
    await env.chat.upload("rows.txt", rows.encode(), "text/plain")
    await env.chat.ask(model.TEXT)
    await expect(env.chat.answer.get_by_text(said(str(ROWS)))).to_be_visible()
    await env.chat.screenshot("11-given-a-long-text")


async def model_failure_is_shown(env: Environment) -> None:
    await env.chat.start(model.NAME)
    await env.chat.ask(model.BROKEN)
    await expect(env.chat.answer.get_by_text(model.FAULT)).to_be_visible()
    await env.chat.screenshot("12-failure")


async def browser_contacts_no_third_party(env: Environment) -> None:
    assert env.third_party_urls == []


async def chat_without_an_id_shows_steps_as_reasoning(env: Environment) -> None:
    env.model.may_go_on[model.SQUARES].set()
    answer = env.chat.answer
    await env.chat.start(model.NAME)
    await env.chat.ask(model.SQUARES)
    await expect(answer.get_by_text("Here is the table.")).to_be_visible()
    await answer.get_by_text("Thought for").click()
    await expect(answer.get_by_role("blockquote")).to_contain_text("$ cat output/squares.csv")
    await expect(answer.get_by_role("blockquote")).to_contain_text(", 4 lines]")
    await env.chat.screenshot("1-thinking")


async def chat_without_an_id_gets_a_new_sandbox_for_each_message(env: Environment) -> None:
    await env.chat.ask(model.KEPT)
    missing = said("cat: kept.txt: No such file or directory")
    await expect(env.chat.answer.get_by_text(missing)).to_be_visible()


async def link_icons_are_requested_from_a_third_party(env: Environment) -> None:
    assert env.third_party_urls
    assert all("?sz=32&domain=http://127.0.0.1" in asked for asked in env.third_party_urls)


Scenario = Callable[[Environment], Awaitable[None]]
SCENARIOS: tuple[Scenario, ...] = (
    steps_show_as_cards_during_the_run,
    answer_shows_its_picture_and_file,
    card_shows_reasoning_command_and_output,
    second_turn_reads_files_of_the_first,
    open_webui_tasks_have_no_sandbox,
    open_webui_tools_are_called_between_sandbox_tools,
    stop_button_ends_the_command_and_the_chat_continues,
    reloaded_page_shows_the_running_run,
    text_is_shown_while_written_with_cards_between,
    uploaded_picture_is_in_the_sandbox,
    short_uploaded_text_is_in_the_prompt,
    long_uploaded_text_is_in_the_sandbox,
    model_failure_is_shown,
    browser_contacts_no_third_party,
)
WITH_CHAT_ID: tuple[Scenario, ...] = (*SCENARIOS[:5], browser_contacts_no_third_party)
"""Scenarios that show that Open WebUI sends the chat id."""
WITHOUT_CHAT_ID: tuple[Scenario, ...] = (
    chat_without_an_id_shows_steps_as_reasoning,
    chat_without_an_id_gets_a_new_sandbox_for_each_message,
    link_icons_are_requested_from_a_third_party,
)
"""Scenarios without a chat id."""
