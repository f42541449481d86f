"""Stream a run: each command, its output while it runs, and the answer.

With `"steps": "events"` the steps are in chunks without choices, in the field `sandbox`.
"""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8080/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
# The first model that the backend lists, unless MODEL names another.
model = os.environ.get("MODEL") or client.models.list().data[0].id

stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Which Python version is installed?"}],
    stream=True,
    extra_body={"sandbox": {"steps": "events"}},
)
for chunk in stream:
    step = chunk.model_extra.get("sandbox", {})
    match step.get("kind"):
        case "tool_start":
            print(f"[step {step['step']}] {step['tool']} {step['arguments']}", flush=True)
        case "tool_output":
            print(step["text"], end="", flush=True)
        case "tool_end":
            print(f"[step {step['step']}] exit code {step['exit_code']}", flush=True)
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
print()
