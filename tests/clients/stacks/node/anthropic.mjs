// The Anthropic SDK: whole, streamed and with its stream helper.

import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { z } from "zod";
import { KEY, MODEL, SAID, WARMTH, play, same, warmth } from "./stage.mjs";

const clientAt = (url) =>
  new Anthropic({ baseURL: url.replace(/\/v1$/, ""), apiKey: KEY, maxRetries: 0, timeout: 30_000 });

// As an app asks that shows what the model thinks.
const asking = (words) => ({
  model: MODEL,
  max_tokens: 2000,
  messages: [{ role: "user", content: words }],
  thinking: { type: "adaptive" },
});

// The reasons to stop, as the other clients call them.
const FINISH = { end_turn: "stop", tool_use: "tool_calls" };

const files = (sandbox) =>
  Object.fromEntries((sandbox?.files ?? []).map((file) => [file.filename, file.url]));

// A message, whole or added up by the SDK.
function shown({ content, stop_reason, usage, sandbox }) {
  const of = (type) => content.filter((block) => block.type === type);
  return {
    text: of("text").map((block) => block.text).join(""),
    finish: FINISH[stop_reason],
    calls: of("tool_use").map((block) => block.name),
    thought: of("thinking").map((block) => block.thinking).join(""),
    usage: [usage.input_tokens, usage.output_tokens],
    files: files(sandbox),
  };
}

const whole = async (url, words) => shown(await clientAt(url).messages.create(asking(words)));

// As an app adds the events up that looks at all of them.
async function streamed(url, words) {
  const told = { text: "", thought: "", calls: [] };
  const stream = await clientAt(url).messages.create({ ...asking(words), stream: true });
  for await (const event of stream) {
    if (event.type === "content_block_start" && event.content_block.type === "tool_use") {
      told.calls.push(event.content_block.name);
    } else if (event.type === "content_block_delta") {
      told.text += event.delta.text ?? "";
      told.thought += event.delta.thinking ?? "";
    } else if (event.type === "message_delta") {
      told.finish = FINISH[event.delta.stop_reason];
      told.usage = [event.usage.input_tokens, event.usage.output_tokens];
      told.files = files(event.sandbox);
    }
  }
  return told;
}

async function helper(url, words) {
  let told = "";
  const stream = clientAt(url).messages.stream(asking(words));
  stream.on("text", (delta) => (told += delta));
  const message = shown(await stream.finalMessage());
  same(told, message.text);
  return message;
}

// By hand: the call, its answer, the answer to that.
async function tools(url) {
  const { name, description, parameters: input_schema } = WARMTH;
  const asked = { ...asking(SAID.tools), tools: [{ name, description, input_schema }] };
  const client = clientAt(url);
  const first = await client.messages.create(asked);
  const { id: tool_use_id, input } = first.content.find((block) => block.type === "tool_use");
  const content = [{ type: "tool_result", tool_use_id, content: warmth(input) }];
  asked.messages.push({ role: "assistant", content: first.content }, { role: "user", content });
  return [shown(first), shown(await client.messages.create(asked))];
}

// The SDK calls the tool and asks again, streaming.
async function toolRunner(url) {
  const { name, description } = WARMTH;
  const inputSchema = z.object({ city: z.string() });
  const tool = betaZodTool({ name, description, inputSchema, run: warmth });
  const asked = { ...asking(SAID.tools), tools: [tool], stream: true };
  const runner = clientAt(url).beta.messages.toolRunner(asked);
  for await (const stream of runner) await stream.finalMessage();
  return shown(await runner.done()).text;
}

async function shape(url) {
  const form = z.object({ city: z.string(), degrees: z.number() });
  const output_config = { format: zodOutputFormat(form) };
  const message = await clientAt(url).messages.parse({ ...asking(SAID.shape), output_config });
  return message.parsed_output;
}

async function models(url) {
  const found = [];
  for await (const model of clientAt(url).models.list()) found.push(model.id);
  return found;
}

await play({
  ways: { whole, streamed, helper },
  alone: { tools, "tool runner": toolRunner, shape, models },
});
