"""Start a run, disconnect, and poll for its result.

With `"on_disconnect": "detach"` the run continues when its client leaves.
"""

import os
import time

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8080/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
# The first model that the backend lists, unless MODEL names another.
model = os.environ.get("MODEL") or client.models.list().data[0].id

with client.chat.completions.with_streaming_response.create(
    model=model,
    messages=[{"role": "user", "content": "Find the 10,000th prime number."}],
    stream=True,
    extra_body={"sandbox": {"on_disconnect": "detach"}},
) as response:
    run_id = response.headers["x-sandbox-run"]
# The block has closed the connection, and the run continues.
print("disconnected")

# DELETE /v1/runs/{id} would cancel the run.
run = client.get(f"/runs/{run_id}", cast_to=object)
while run["status"] == "running":
    time.sleep(1)
    run = client.get(f"/runs/{run_id}", cast_to=object)

print("status:", run["status"])
if run["completion"]:
    print(run["completion"]["choices"][0]["message"]["content"])
