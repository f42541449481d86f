"""Run the reference implementation on one problem, in its own environment.

Reads a job as JSON from stdin. Writes the prompt and the tools that are constants of the reference
to stdout as JSON.
"""

import json
import sys

from llm_in_sandbox import Agent, AgentArgs, DockerRuntime
from llm_in_sandbox.observation import CONTINUE_MSG
from llm_in_sandbox.tools import execute_bash_tool, str_replace_editor_tool, submit_tool


def main() -> None:
    job = json.load(sys.stdin)
    args = AgentArgs(
        system_prompt=job["system_prompt"],
        instance_prompt=job["instance_prompt"],
        llm_name=f"openai/{job['model']}",
        llm_base_url=job["base_url"],
        quiet=True,
    )
    # On the engine's bridge network, the reference's default. An init process lets the container
    # stop at once; `sleep` ends it in any case.
    runtime = DockerRuntime(job["image"], command="sleep 300", logger=False, init=True)
    try:
        Agent(args).run(runtime, job["problem"], max_steps=100)
    finally:
        runtime.close()
    tools = [str_replace_editor_tool, execute_bash_tool, submit_tool]
    sys.stdout.write("\n" + json.dumps({"continue_message": CONTINUE_MSG, "tools": tools}))


if __name__ == "__main__":
    main()
