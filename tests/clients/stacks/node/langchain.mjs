// @langchain/openai: invoke, stream, tools, structured output.

import { HumanMessage, ToolMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { concat } from "@langchain/core/utils/stream";
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";
import { KEY, MODEL, PROMPTS, WARMTH, runScenarios, warmth } from "./scenario_runner.mjs";

const modelAt = (baseURL) =>
  new ChatOpenAI({ configuration: { baseURL }, apiKey: KEY, model: MODEL, maxRetries: 0 });

const responsesModelAt = (baseURL) =>
  new ChatOpenAI({
    configuration: { baseURL },
    apiKey: KEY,
    model: MODEL,
    maxRetries: 0,
    useResponsesApi: true,
  });

const finish = ({ finish_reason, status }) =>
  finish_reason ?? (status === "completed" ? "stop" : status);

const shown = (message) => ({
  text: message.text,
  finish: finish(message.response_metadata),
  calls: message.tool_calls.map((call) => call.name),
  thought: message.additional_kwargs.reasoning_content ?? "",
  usage: [message.usage_metadata.input_tokens, message.usage_metadata.output_tokens],
});

const nonStreamed = async (url, words) => shown(await modelAt(url).invoke(words));

const responses = async (url, words) => shown(await responsesModelAt(url).invoke(words));

const streamed = (url, words) => addedUp(modelAt(url), words);
const responsesStreamed = (url, words) => addedUp(responsesModelAt(url), words);

async function addedUp(model, words) {
  let message;
  for await (const chunk of await model.stream(words)) {
    message = message === undefined ? chunk : concat(message, chunk);
  }
  return shown(message);
}

const tools = (url) => toolsOf(modelAt(url));
const responsesTools = (url) => toolsOf(responsesModelAt(url));

async function toolsOf(asked) {
  const schema = z.object({ city: z.string() });
  const own = tool(warmth, { name: WARMTH.name, description: WARMTH.description, schema });
  const model = asked.bindTools([own]);
  const messages = [new HumanMessage(PROMPTS.tools)];
  const first = await model.invoke(messages);
  const [call] = first.tool_calls;
  messages.push(first, new ToolMessage({ content: warmth(call.args), tool_call_id: call.id }));
  return [shown(first), shown(await model.invoke(messages))];
}

// Request the answer with a JSON schema and with a forced tool call.
async function shape(url) {
  const form = z.object({ city: z.string(), degrees: z.number() });
  const seen = [];
  for (const method of ["jsonSchema", "functionCalling"]) {
    const model = modelAt(url).withStructuredOutput(form, { name: "place", method });
    seen.push(await model.invoke(PROMPTS.shape));
  }
  return seen;
}

await runScenarios({
  variants: {
    "non-streamed": nonStreamed,
    streamed,
    responses,
    "responses streamed": responsesStreamed,
  },
  scenarios: { tools, "responses tools": responsesTools, shape },
});
