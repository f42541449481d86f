"""What a person does in Open WebUI and what is then to be seen, scene by scene."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio
from playwright.async_api import expect

from tests.clients.openwebui import model
from tests.clients.openwebui.model import said
from tests.clients.openwebui.picture import HEIGHT, WIDTH, png
from tests.clients.openwebui.stage import PATIENCE_S, Stage
from tests.e2e.leftovers import running
from tests.fakes.waiting import until

Message = Mapping[str, Any]
ROWS = 9_000


async def steps_show_as_cards_while_the_run_goes_on(stage: Stage) -> None:
    chat = stage.chat
    await chat.begin(model.NAME)
    await chat.ask(model.SQUARES)
    await expect(chat.answer.get_by_text("Explored execute_bash")).to_be_visible()
    await expect(chat.status).to_contain_text("Ran: printf")
    await chat.look("1-working")
    stage.model.may_go_on[model.SQUARES].set()


async def the_answer_comes_with_its_picture_and_its_file(stage: Stage) -> None:
    chat = stage.chat
    await expect(chat.answer.get_by_text("Here is the table.")).to_be_visible()
    await expect(chat.status).to_have_text("2 steps, 2 files")
    picture = chat.answer.get_by_role("img", name="Generated Image")
    await expect(picture).to_have_js_property("naturalWidth", WIDTH)
    await expect(picture).to_have_js_property("naturalHeight", HEIGHT)
    await chat.look("2-answer")
    assert await chat.download(chat.answer.get_by_role("link", name="the table")) == model.TABLE
    await chat.answer.get_by_role("button", name="squares.csv").click()
    window = chat.page.get_by_role("dialog")
    assert await chat.download(window.get_by_role("link", name="squares.csv")) == model.TABLE
    await window.get_by_role("button", name="Close").click()


async def a_card_opens_on_what_was_thought_run_and_printed(stage: Stage) -> None:
    answer = stage.chat.answer
    await answer.get_by_role("button", name="Toggle details").click()
    await answer.get_by_text("Thought").click()
    await expect(answer.get_by_text(model.THOUGHT)).to_be_visible()
    await answer.get_by_text("View Result from execute_bash").last.click()
    await expect(answer.get_by_text("cat output/squares.csv")).to_be_visible()
    await expect(answer.get_by_text(model.TABLE.decode())).to_be_visible()
    await stage.chat.look("3-cards")


async def a_second_turn_uses_what_the_first_one_kept(stage: Stage) -> None:
    await stage.chat.ask(model.KEPT)
    await expect(stage.chat.answer.get_by_text(said(model.WORD))).to_be_visible()
    await stage.chat.look("4-second-turn")
    # Of the first turn the model is told the answer, and none of the cards.
    system, asked, answer, *_ = stage.worked[-1]
    assert (system["role"], asked["content"]) == ("system", model.SQUARES)
    assert answer["role"] == "assistant"
    assert answer["content"].startswith("Here is [the table](")
    assert "tool_calls" not in answer


async def what_open_webui_asks_for_itself_has_no_sandbox(stage: Stage) -> None:
    await expect(stage.chat.page.get_by_text(model.TITLE).first).to_be_visible()
    await expect(stage.chat.answer.get_by_text(model.FOLLOW_UP)).to_be_visible()
    await stage.relayed_in_all(4)  # a title, tags, and what to ask next, twice
    assert [len(messages) for messages in stage.relayed] == [1] * 4
    assert await stage.number("sandbox_runs_total") == 2


async def its_own_tools_are_called_between_ours(stage: Stage) -> None:
    await stage.chat.begin(model.NAME)
    await stage.chat.ask(model.CLOCK)
    await expect(stage.chat.answer.get_by_text(said(model.WORD))).to_be_visible()
    used = stage.chat.answer.get_by_text("Explored 2 execute_bash, get_current_timestamp")
    await expect(used).to_be_visible()
    await expect(stage.chat.answer.get_by_text(model.NARRATION.strip())).to_be_visible()
    await stage.chat.look("5-its-own-tools")
    told = [message["content"] for message in stage.worked[-2] if message["role"] == "tool"]
    assert len(told) == 2
    assert "current_timestamp" in told[1]


async def stopping_it_ends_the_command_and_the_chat_goes_on(stage: Stage) -> None:
    chat = stage.chat
    await chat.begin(model.NAME)
    await chat.ask(model.ENDLESS)
    await expect(chat.status).to_contain_text(f" - {model.OUTPUT}")
    await chat.look("6-live-output")
    assert running(stage.marker)
    await chat.stop()
    with anyio.fail_after(PATIENCE_S):
        await until(lambda: not running(stage.marker))
    assert await stage.number("sandbox_runs_in_flight") == 0
    await chat.ask(model.SLOW)
    await expect(chat.status).to_contain_text("Ran: ")
    await chat.look("7-after-stopping")
    # Open WebUI keeps nothing of an answer that had not begun.
    asked, again, *_ = stage.worked[-1][1:]
    assert [asked["content"], again["content"]] == [model.ENDLESS, model.SLOW]


async def a_page_that_is_loaded_anew_shows_the_run_go_on(stage: Stage) -> None:
    chat = stage.chat
    await chat.page.reload()
    await expect(chat.answer.get_by_text("View Result from execute_bash")).to_be_visible()
    await chat.look("8-loaded-anew")
    stage.model.may_go_on[model.SLOW].set()
    await expect(chat.answer.get_by_text(model.DONE)).to_be_visible()
    await expect(chat.answer.get_by_role("button", name="begun.txt")).to_be_visible()
    await chat.page.reload()
    await expect(chat.answer.get_by_role("button", name="begun.txt")).to_be_visible()
    await chat.look("9-loaded-again")


async def words_show_while_they_are_written_and_cards_stand_between_them(stage: Stage) -> None:
    chat = stage.chat
    await chat.begin(model.NAME)
    await chat.ask(model.TALK)
    await expect(chat.answer.get_by_text(model.NARRATION.strip())).to_be_visible()
    await expect(chat.answer.get_by_text(model.STORY[:80])).to_be_visible()
    await chat.look("13-typing")
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
    await chat.look("14-told")
    await chat.ask(model.KEPT)
    await expect(chat.answer.get_by_text("No such file")).to_be_visible()
    # The model is told what it said, in one message.
    _, asked, said, again, *_ = stage.worked[-1]
    assert [asked["content"], again["content"]] == [model.TALK, model.KEPT]
    assert said["content"].split() == [*model.NARRATION.split(), *model.STORY.split()]


async def a_picture_that_is_given_lies_in_the_sandbox(stage: Stage) -> None:
    await stage.chat.begin(model.NAME)
    await stage.chat.give("dot.png", png(), "image/png")
    await stage.chat.ask(model.PICTURE)
    await expect(stage.chat.answer.get_by_text(said("PNG"))).to_be_visible()
    await stage.chat.look("10-given-a-picture")


async def a_short_text_that_is_given_stands_in_the_question(stage: Stage) -> None:
    await stage.chat.begin(model.NAME)
    await stage.chat.give("rows.txt", b"row 1\nrow 2\n", "text/plain")
    await stage.chat.ask(model.TEXT)
    await expect(stage.chat.answer.get_by_text(said("0"))).to_be_visible()
    assert "row 1\nrow 2" in stage.worked[-1][1]["content"]


async def a_long_one_lies_in_the_sandbox(stage: Stage) -> None:
    rows = "".join(f"row {number}\n" for number in range(ROWS))
    await stage.chat.begin(model.NAME)
    await stage.chat.give("rows.txt", rows.encode(), "text/plain")
    await stage.chat.ask(model.TEXT)
    await expect(stage.chat.answer.get_by_text(said(str(ROWS)))).to_be_visible()
    await stage.chat.look("11-given-a-long-text")


async def a_model_that_fails_is_told_of(stage: Stage) -> None:
    await stage.chat.begin(model.NAME)
    await stage.chat.ask(model.BROKEN)
    await expect(stage.chat.answer.get_by_text(model.FAULT)).to_be_visible()
    await stage.chat.look("12-failure")


async def nothing_was_asked_of_strangers(stage: Stage) -> None:
    assert stage.strangers == []


async def a_chat_that_is_not_named_shows_steps_as_thinking(stage: Stage) -> None:
    stage.model.may_go_on[model.SQUARES].set()
    answer = stage.chat.answer
    await stage.chat.begin(model.NAME)
    await stage.chat.ask(model.SQUARES)
    await expect(answer.get_by_text("Here is the table.")).to_be_visible()
    await answer.get_by_text("Thought for").click()
    await expect(answer.get_by_role("blockquote")).to_contain_text("$ cat output/squares.csv")
    await expect(answer.get_by_role("blockquote")).to_contain_text(", 4 lines]")
    await stage.chat.look("1-thinking")


async def its_next_message_has_a_new_computer(stage: Stage) -> None:
    await stage.chat.ask(model.KEPT)
    missing = said("cat: kept.txt: No such file or directory")
    await expect(stage.chat.answer.get_by_text(missing)).to_be_visible()


async def a_stranger_is_asked_for_the_icons_of_links(stage: Stage) -> None:
    assert stage.strangers
    assert all("?sz=32&domain=http://127.0.0.1" in asked for asked in stage.strangers)


Scene = Callable[[Stage], Awaitable[None]]
SCENES: tuple[Scene, ...] = (
    steps_show_as_cards_while_the_run_goes_on,
    the_answer_comes_with_its_picture_and_its_file,
    a_card_opens_on_what_was_thought_run_and_printed,
    a_second_turn_uses_what_the_first_one_kept,
    what_open_webui_asks_for_itself_has_no_sandbox,
    its_own_tools_are_called_between_ours,
    stopping_it_ends_the_command_and_the_chat_goes_on,
    a_page_that_is_loaded_anew_shows_the_run_go_on,
    words_show_while_they_are_written_and_cards_stand_between_them,
    a_picture_that_is_given_lies_in_the_sandbox,
    a_short_text_that_is_given_stands_in_the_question,
    a_long_one_lies_in_the_sandbox,
    a_model_that_fails_is_told_of,
    nothing_was_asked_of_strangers,
)
NAMED: tuple[Scene, ...] = (*SCENES[:5], nothing_was_asked_of_strangers)
"""Those that show that Open WebUI says which chat it is."""
UNNAMED: tuple[Scene, ...] = (
    a_chat_that_is_not_named_shows_steps_as_thinking,
    its_next_message_has_a_new_computer,
    a_stranger_is_asked_for_the_icons_of_links,
)
"""What comes of it where it does not."""
