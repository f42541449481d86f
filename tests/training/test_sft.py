"""TRL's SFTTrainer trains on an export in the format `sft`."""

import json
import math
from pathlib import Path

import anyio

from proxy.models.scripted import call, tool_reply
from tests.clients.chat_http import http_client, post_chat
from tests.clients.test_trajectory_export import ANSWER, STEP, exported
from tests.fakes.backend import scripted_backend
from tests.fakes.server import running_proxy
from tests.training.install_trl import run_python

TRAIN = Path(__file__).parent / "trainers" / "train_sft.py"
SUBMIT = tool_reply(call("submit", answer="It is 42."))


async def test_sft_trainer_trains_on_the_replies_alone(tmp_path: Path) -> None:
    async with (
        scripted_backend([STEP, SUBMIT, ANSWER]) as backend,
        running_proxy(backend, "memory", tmp_path / "state") as url,
        http_client(url) as http,
    ):
        for _ in range(2):
            await post_chat(http, sandbox={"capture": "messages"})
        lines = await exported(http, "sft")
        tools = backend.requests[0].body["tools"]
    export = tmp_path / "export.jsonl"
    export.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")

    output = await anyio.to_thread.run_sync(run_python, str(TRAIN), str(export))
    found = json.loads(output.splitlines()[-1])

    assert len(found["loss"]) == 3
    assert all(map(math.isfinite, found["loss"]))
    assert found["has_changed"]
    assert found["trained"] == [
        [
            '<tool_call>\n{"name": "execute_bash", "arguments": {"command": "echo 42"}}\n'
            "</tool_call><|im_end|>\n",
            '<tool_call>\n{"name": "submit", "arguments": {"answer": "It is 42."}}\n'
            "</tool_call><|im_end|>\n",
        ],
        ["It is 42.<|im_end|>\n"],
    ]
    for prompt in found["prompts"]:
        shown = prompt.partition("<tools>\n")[2].partition("\n</tools>")[0]
        assert [json.loads(line) for line in shown.splitlines()] == tools
