// The Anthropic SDK: non-streamed, streamed and with its stream helper.

import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { z } from "zod";
import { KEY, MODEL, PROMPTS, WARMTH, assertEqual, runScenarios, warmth } from "./scenario_runner.mjs";

const clientAt = (url) =>
  new Anthropic({ baseURL: url.replace(/\/v1$/, ""), apiKey: KEY, maxRetries: 0, timeout: 30_000 });

// A request with extended thinking.
const asking = (words) => ({
  model: MODEL,
  max_tokens: 2000,
  messages: [{ role: "user", content: words }],
  thinking: { type: "adaptive" },
});

// The chat finish reason for each stop reason.
const FINISH = { end_turn: "stop", tool_use: "tool_calls" };

const files = (sandbox) =>
  Object.fromEntries((sandbox?.files ?? []).map((file) => [file.filename, file.url]));

// Return the parts of a message, non-streamed or assembled by the SDK.
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

const nonStreamed = async (url, words) => shown(await clientAt(url).messages.create(asking(words)));

// Assemble the parts of a message from the raw events of a stream.
async function streamed(url, words) {
  const found = { text: "", thought: "", calls: [] };
  const stream = await clientAt(url).messages.create({ ...asking(words), stream: true });
  for await (const event of stream) {
    if (event.type === "content_block_start" && event.content_block.type === "tool_use") {
      found.calls.push(event.content_block.name);
    } else if (event.type === "content_block_delta") {
      found.text += event.delta.text ?? "";
      found.thought += event.delta.thinking ?? "";
    } else if (event.type === "message_delta") {
      found.finish = FINISH[event.delta.stop_reason];
      found.usage = [event.usage.input_tokens, event.usage.output_tokens];
      found.files = files(event.sandbox);
    }
  }
  return found;
}

async function helper(url, words) {
  let text = "";
  const stream = clientAt(url).messages.stream(asking(words));
  stream.on("text", (delta) => (text += delta));
  const message = shown(await stream.finalMessage());
  assertEqual(text, message.text);
  return message;
}

// Answer a tool call without a helper of the SDK.
async function tools(url) {
  const { name, description, parameters: input_schema } = WARMTH;
  const asked = { ...asking(PROMPTS.tools), tools: [{ name, description, input_schema }] };
  const client = clientAt(url);
  const first = await client.messages.create(asked);
  const { id: tool_use_id, input } = first.content.find((block) => block.type === "tool_use");
  const content = [{ type: "tool_result", tool_use_id, content: warmth(input) }];
  asked.messages.push({ role: "assistant", content: first.content }, { role: "user", content });
  return [shown(first), shown(await client.messages.create(asked))];
}

// Let the SDK run the tool and send its result, streamed.
async function toolRunner(url) {
  const { name, description } = WARMTH;
  const inputSchema = z.object({ city: z.string() });
  const tool = betaZodTool({ name, description, inputSchema, run: warmth });
  const asked = { ...asking(PROMPTS.tools), tools: [tool], stream: true };
  const runner = clientAt(url).beta.messages.toolRunner(asked);
  for await (const stream of runner) await stream.finalMessage();
  return shown(await runner.done()).text;
}

async function shape(url) {
  const form = z.object({ city: z.string(), degrees: z.number() });
  const output_config = { format: zodOutputFormat(form) };
  const message = await clientAt(url).messages.parse({ ...asking(PROMPTS.shape), output_config });
  return message.parsed_output;
}

async function models(url) {
  const found = [];
  for await (const model of clientAt(url).models.list()) found.push(model.id);
  return found;
}

await runScenarios({
  variants: { "non-streamed": nonStreamed, streamed, helper },
  scenarios: { tools, "tool runner": toolRunner, shape, models },
});
