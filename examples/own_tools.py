"""Offer a function of the client's own beside the sandbox.

The model runs commands in the sandbox and calls `get_temperature`, which this program answers. The
next request has the result, and the run resumes in the same sandbox.
"""

import json
import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8080/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
# The first model that the backend lists, unless MODEL names another.
model = os.environ.get("MODEL") or client.models.list().data[0].id

tools = [
    {
        "type": "function",
        "function": {
            "name": "get_temperature",
            "description": "Return the current temperature of a city, in degrees Celsius.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
TEMPERATURES = {"Bonn": 21.0, "Rome": 30.0}

messages = [{"role": "user", "content": "How warm are Bonn and Rome, in Fahrenheit?"}]
while True:
    completion = client.chat.completions.create(model=model, messages=messages, tools=tools)
    message = completion.choices[0].message
    messages.append(message)
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        city = json.loads(call.function.arguments)["city"]
        print(f"{call.function.name}({city!r}) -> {TEMPERATURES.get(city)}")
        result = json.dumps({"celsius": TEMPERATURES.get(city)})
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
print(message.content)
