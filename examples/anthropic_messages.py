"""Use Anthropic's SDK (`pip install anthropic`). Its base URL does not end in /v1.

The tool `code_execution` shows the steps as blocks; without it the answer is one text block.
"""

import os

from anthropic import Anthropic

url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8080/v1")
client = Anthropic(
    base_url=url.removesuffix("/v1"), api_key=os.environ.get("OPENAI_API_KEY", "none")
)
# The first model that the backend lists, unless MODEL names another.
model = os.environ.get("MODEL") or client.models.list().data[0].id

message = client.messages.create(
    model=model,
    max_tokens=4096,
    messages=[{"role": "user", "content": "How many primes are there below a million?"}],
    tools=[{"type": "code_execution_20250825", "name": "code_execution"}],
)
for block in message.content:
    match block.type:
        case "server_tool_use":
            print("command:", block.input.get("command"))
        case "bash_code_execution_tool_result":
            print("output:", block.content.stdout.strip())
        case "text":
            print(block.text)
