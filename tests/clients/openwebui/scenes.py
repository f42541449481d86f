"""Scenes: the actions of a person in Open WebUI, and what the page must show."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio
from playwright.async_api import expect

from tests.clients.openwebui import model
from tests.clients.openwebui.model import said
from tests.clients.openwebui.picture import HEIGHT, WIDTH, png
from tests.clients.openwebui.stage import TIMEOUT_S, Stage
from tests.e2e.leftovers import running
from tests.fakes.waiting import until

Message = Mapping[str, Any]
ROWS = 9_000


async def steps_show_as_cards_during_the_run(stage: Stage) -> None:
    chat = stage.chat
    await chat.start(model.NAME)
    await chat.ask(model.SQUARES)
    await expect(chat.answer.get_by_text("Explored execute_bash")).to_be_visible()
    await expect(chat.status).to_contain_text("Ran: printf")
    await chat.screenshot("1-working")
    stage.model.may_go_on[model.SQUARES].set()


async def answer_shows_its_picture_and_file(stage: Stage) -> None:
    chat = stage.chat
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


async def card_shows_reasoning_command_and_output(stage: Stage) -> None:
    answer = stage.chat.answer
    await answer.get_by_role("button", name="Toggle details").click()
    await answer.get_by_text("Thought").click()
    await expect(answer.get_by_text(model.THOUGHT)).to_be_visible()
    await answer.get_by_text("View Result from execute_bash").last.click()
    await expect(answer.get_by_text("cat output/squares.csv")).to_be_visible()
    await expect(answer.get_by_text(model.TABLE.decode())).to_be_visible()
    await stage.chat.screenshot("3-cards")


async def second_turn_reads_files_of_the_first(stage: Stage) -> None:
    await stage.chat.ask(model.KEPT)
    await expect(stage.chat.answer.get_by_text(said(model.WORD))).to_be_visible()
    await stage.chat.screenshot("4-second-turn")
    # The model gets the first answer, but none of the step cards.
    system, asked, answer, *_ = stage.run_requests[-1]
    assert (system["role"], asked["content"]) == ("system", model.SQUARES)
    assert answer["role"] == "assistant"
    assert answer["content"].startswith("Here is [the table](")
    assert "tool_calls" not in answer


async def open_webui_tasks_have_no_sandbox(stage: Stage) -> None:
    await expect(stage.chat.page.get_by_text(model.TITLE).first).to_be_visible()
    await expect(stage.chat.answer.get_by_text(model.FOLLOW_UP)).to_be_visible()
    await stage.wait_for_relayed_requests(4)  # title, tags and follow-ups, twice
    assert [len(messages) for messages in stage.relayed_requests] == [1] * 4
    assert await stage.number("sandbox_runs_total") == 2


async def open_webui_tools_are_called_between_sandbox_tools(stage: Stage) -> None:
    await stage.chat.start(model.NAME)
    await stage.chat.ask(model.CLOCK)
    await expect(stage.chat.answer.get_by_text(said(model.WORD))).to_be_visible()
    used = stage.chat.answer.get_by_text("Explored 2 execute_bash, get_current_timestamp")
    await expect(used).to_be_visible()
    await expect(stage.chat.answer.get_by_text(model.NARRATION.strip())).to_be_visible()
    await stage.chat.screenshot("5-its-own-tools")
    contents = [
        message["content"] for message in stage.run_requests[-2] if message["role"] == "tool"
    ]
    assert len(contents) == 2
    assert "current_timestamp" in contents[1]


async def stop_button_ends_the_command_and_the_chat_continues(stage: Stage) -> None:
    chat = stage.chat
    await chat.start(model.NAME)
    await chat.ask(model.ENDLESS)
    await expect(chat.status).to_contain_text(f" - {model.OUTPUT}")
    await chat.screenshot("6-live-output")
    assert running(stage.marker)
    await chat.stop()
    with anyio.fail_after(TIMEOUT_S):
        await until(lambda: not running(stage.marker))
    assert await stage.number("sandbox_runs_in_flight") == 0
    await chat.ask(model.SLOW)
    await expect(chat.status).to_contain_text("Ran: ")
    await chat.screenshot("7-after-stopping")
    # Open WebUI stores nothing of an answer without text.
    asked, again, *_ = stage.run_requests[-1][1:]
    assert [asked["content"], again["content"]] == [model.ENDLESS, model.SLOW]


async def reloaded_page_shows_the_running_run(stage: Stage) -> None:
    chat = stage.chat
    await chat.page.reload()
    await expect(chat.answer.get_by_text("View Result from execute_bash")).to_be_visible()
    await chat.screenshot("8-loaded-anew")
    stage.model.may_go_on[model.SLOW].set()
    await expect(chat.answer.get_by_text(model.DONE)).to_be_visible()
    await expect(chat.answer.get_by_role("button", name="begun.txt")).to_be_visible()
    await chat.page.reload()
    await expect(chat.answer.get_by_role("button", name="begun.txt")).to_be_visible()
    await chat.screenshot("9-loaded-again")


async def text_is_shown_while_written_with_cards_between(stage: Stage) -> None:
    chat = stage.chat
    await chat.start(model.NAME)
    await chat.ask(model.TALK)
    await expect(chat.answer.get_by_text(model.NARRATION.strip())).to_be_visible()
    await expect(chat.answer.get_by_text(model.STORY[:80])).to_be_visible()
    await chat.screenshot("13-typing")
    stage.model.may_go_on[model.TALK].set()
    await expect(chat.answer.get_by_text(model.STORY.strip())).to_be_visible()
    narration, card, answer = [
        await chat.answer.get_by_text(words).first.bounding_box()
        for words in (model.NARRATION.strip(), "View Result from execute_bash", model.STORY.strip())
    ]
    assert narration is not None
    assert card is not None
    assert answer is not None
    assert narration["y"] < card["y"] < answer["y"]
    await chat.screenshot("14-told")
    await chat.ask(model.KEPT)
    await expect(chat.answer.get_by_text("No such file")).to_be_visible()
    # The model gets its narration and story as one message.
    _, asked, said, again, *_ = stage.run_requests[-1]
    assert [asked["content"], again["content"]] == [model.TALK, model.KEPT]
    assert said["content"].split() == [*model.NARRATION.split(), *model.STORY.split()]


async def uploaded_picture_is_in_the_sandbox(stage: Stage) -> None:
    await stage.chat.start(model.NAME)
    await stage.chat.upload("dot.png", png(), "image/png")
    await stage.chat.ask(model.PICTURE)
    await expect(stage.chat.answer.get_by_text(said("PNG"))).to_be_visible()
    await stage.chat.screenshot("10-given-a-picture")


async def short_uploaded_text_is_in_the_prompt(stage: Stage) -> None:
    await stage.chat.start(model.NAME)
    await stage.chat.upload("rows.txt", b"row 1\nrow 2\n", "text/plain")
    await stage.chat.ask(model.TEXT)
    await expect(stage.chat.answer.get_by_text(said("0"))).to_be_visible()
    assert "row 1\nrow 2" in stage.run_requests[-1][1]["content"]


async def long_uploaded_text_is_in_the_sandbox(stage: Stage) -> None:
    rows = "".join(f"row {number}\n" for number in range(ROWS))
    await stage.chat.start(model.NAME)
    await stage.chat.upload("rows.txt", rows.encode(), "text/plain")
    await stage.chat.ask(model.TEXT)
    await expect(stage.chat.answer.get_by_text(said(str(ROWS)))).to_be_visible()
    await stage.chat.screenshot("11-given-a-long-text")


async def model_failure_is_shown(stage: Stage) -> None:
    await stage.chat.start(model.NAME)
    await stage.chat.ask(model.BROKEN)
    await expect(stage.chat.answer.get_by_text(model.FAULT)).to_be_visible()
    await stage.chat.screenshot("12-failure")


async def browser_contacts_no_third_party(stage: Stage) -> None:
    assert stage.third_party_urls == []


async def chat_without_an_id_shows_steps_as_reasoning(stage: Stage) -> None:
    stage.model.may_go_on[model.SQUARES].set()
    answer = stage.chat.answer
    await stage.chat.start(model.NAME)
    await stage.chat.ask(model.SQUARES)
    await expect(answer.get_by_text("Here is the table.")).to_be_visible()
    await answer.get_by_text("Thought for").click()
    await expect(answer.get_by_role("blockquote")).to_contain_text("$ cat output/squares.csv")
    await expect(answer.get_by_role("blockquote")).to_contain_text(", 4 lines]")
    await stage.chat.screenshot("1-thinking")


async def chat_without_an_id_gets_a_new_sandbox_for_each_message(stage: Stage) -> None:
    await stage.chat.ask(model.KEPT)
    missing = said("cat: kept.txt: No such file or directory")
    await expect(stage.chat.answer.get_by_text(missing)).to_be_visible()


async def link_icons_are_requested_from_a_third_party(stage: Stage) -> None:
    assert stage.third_party_urls
    assert all("?sz=32&domain=http://127.0.0.1" in asked for asked in stage.third_party_urls)


Scene = Callable[[Stage], Awaitable[None]]
SCENES: tuple[Scene, ...] = (
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
NAMED: tuple[Scene, ...] = (*SCENES[:5], browser_contacts_no_third_party)
"""Scenes that show that Open WebUI sends the chat id."""
UNNAMED: tuple[Scene, ...] = (
    chat_without_an_id_shows_steps_as_reasoning,
    chat_without_an_id_gets_a_new_sandbox_for_each_message,
    link_icons_are_requested_from_a_third_party,
)
"""Scenes without a chat id."""
