"""A LangChain agent loop (`pip install langchain-openai`) with a tool of its own.

The sandbox is on the server, so the agent's tools are only those that need the client.
"""

import os

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import OpenAI

url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8080/v1")
key = os.environ.get("OPENAI_API_KEY", "none")
# The first model that the backend lists, unless MODEL names another.
model = os.environ.get("MODEL") or OpenAI(base_url=url, api_key=key).models.list().data[0].id


@tool
def get_temperature(city: str) -> float:
    """Return the current temperature of a city, in degrees Celsius."""
    return {"Bonn": 21.0, "Rome": 30.0}[city]


agent = ChatOpenAI(base_url=url, api_key=key, model=model).bind_tools([get_temperature])

messages = [HumanMessage("How warm is Bonn, in Fahrenheit?")]
while True:
    answer = agent.invoke(messages)
    messages.append(answer)
    if not answer.tool_calls:
        break
    for call in answer.tool_calls:
        result = get_temperature.invoke(call["args"])
        print(f"{call['name']}({call['args']}) -> {result}")
        messages.append(ToolMessage(str(result), tool_call_id=call["id"]))
print(answer.text)
