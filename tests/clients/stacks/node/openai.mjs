// The openai SDK: non-streamed, streamed and with its stream helper.

import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import {
  KEY,
  MODEL,
  PROMPTS,
  WARMTH,
  assertEqual,
  messagesOf,
  runScenarios,
  warmth,
} from "./scenario_runner.mjs";

const clientAt = (url) => new OpenAI({ baseURL: url, apiKey: KEY, maxRetries: 0, timeout: 30_000 });
const completionsAt = (url) => clientAt(url).chat.completions;
const asking = (words) => ({ model: MODEL, messages: [{ role: "user", content: words }] });
const usageToo = { stream_options: { include_usage: true } };

const links = (entries) => Object.fromEntries(entries);
const cited = (notes) => links((notes ?? []).map((n) => [n.url_citation.title, n.url_citation.url]));
const files = (sandbox) => links((sandbox?.files ?? []).map((file) => [file.filename, file.url]));
const called = (calls) => (calls ?? []).map((call) => call.function.name);
const pictures = (images) => (images ?? []).map((image) => image.image_url.url);

// Return the parts of a completion, non-streamed or assembled by the SDK.
function shown({ choices: [choice], usage, sandbox }) {
  const { message } = choice;
  return {
    text: message.content,
    finish: choice.finish_reason,
    calls: called(message.tool_calls),
    thought: message.reasoning_content ?? "",
    usage: [usage.prompt_tokens, usage.completion_tokens],
    cited: cited(message.annotations),
    pictures: pictures(message.images),
    files: files(sandbox),
  };
}

const nonStreamed = async (url, words) => shown(await completionsAt(url).create(asking(words)));

// Assemble the parts of a completion from the raw chunks of a stream.
async function streamed(url, words) {
  const found = { text: "", thought: "", calls: [], usage: [], cited: {}, pictures: [], files: {} };
  const stream = await completionsAt(url).create({ ...asking(words), stream: true, ...usageToo });
  for await (const chunk of stream) {
    if (chunk.usage) found.usage.push(chunk.usage.prompt_tokens, chunk.usage.completion_tokens);
    for (const { delta, finish_reason } of chunk.choices) {
      found.text += delta.content ?? "";
      found.thought += delta.reasoning_content ?? "";
      found.calls.push(...called(delta.tool_calls));
      found.pictures.push(...pictures(delta.images));
      Object.assign(found.cited, cited(delta.annotations));
      if (finish_reason) Object.assign(found, { finish: finish_reason, files: files(chunk.sandbox) });
    }
  }
  return found;
}

async function helper(url, words) {
  const stream = completionsAt(url).stream({ ...asking(words), ...usageToo });
  let text = "";
  stream.on("content", (delta) => (text += delta));
  const completion = shown(await stream.finalChatCompletion());
  assertEqual(text, completion.text);
  return completion;
}

// Return the parts of a response, non-streamed or from the last event of a stream.
function shownResponse({ output, output_text, status, usage, sandbox }) {
  const ofType = (type) => output.filter((item) => item.type === type);
  const texts = ofType("message").flatMap(({ content }) => content.map((part) => part.text));
  return {
    text: output_text ?? texts.join(""),
    finish: status === "completed" ? "stop" : status,
    calls: ofType("function_call").map((item) => item.name),
    thought: ofType("reasoning").flatMap(({ summary }) => summary.map((part) => part.text)).join(""),
    usage: [usage.input_tokens, usage.output_tokens],
    files: files(sandbox),
  };
}

const asResponse = (words) => ({ model: MODEL, input: words });
const responsesAt = (url) => clientAt(url).responses;

const responses = async (url, words) =>
  shownResponse(await responsesAt(url).create(asResponse(words)));

async function responsesStreamed(url, words) {
  let text = "";
  let last;
  for await (const event of await responsesAt(url).create({ ...asResponse(words), stream: true })) {
    if (event.type === "response.output_text.delta") text += event.delta;
    last = event;
  }
  const seen = shownResponse(last.response);
  assertEqual(text, seen.text);
  return seen;
}

async function responsesHelper(url, words) {
  const stream = responsesAt(url).stream(asResponse(words));
  let text = "";
  stream.on("response.output_text.delta", (event) => (text += event.delta));
  const seen = shownResponse(await stream.finalResponse());
  assertEqual(text, seen.text);
  return seen;
}

const OWN_TOOL = { type: "function", strict: false, ...WARMTH };

async function responsesTools(url) {
  const input = messagesOf("tools");
  const first = await responsesAt(url).create({ model: MODEL, input, tools: [OWN_TOOL] });
  const call = first.output.find((item) => item.type === "function_call");
  const output = warmth(JSON.parse(call.arguments));
  input.push(...first.output, { type: "function_call_output", call_id: call.call_id, output });
  const second = await responsesAt(url).create({ model: MODEL, input, tools: [OWN_TOOL] });
  return [shownResponse(first), shownResponse(second)];
}

async function hosted(url) {
  const shell = { type: "shell", environment: { type: "container_auto" } };
  const tools = [shell, OWN_TOOL];
  const asking = { ...asResponse(PROMPTS.tools), tools, stream: true };
  const types = [];
  // Not the stream helper, which raises an error on shell events in version 6.
  for await (const event of await responsesAt(url).create(asking)) {
    if (event.type === "response.output_item.done") types.push(event.item.type);
  }
  return types;
}

// Answer a tool call without a helper of the SDK.
async function tools(url) {
  const messages = messagesOf("tools");
  const tools = [{ type: "function", function: WARMTH }];
  const first = await completionsAt(url).create({ model: MODEL, messages, tools });
  const [{ message }] = first.choices;
  const [call] = message.tool_calls;
  const content = warmth(JSON.parse(call.function.arguments));
  messages.push(message, { role: "tool", tool_call_id: call.id, content });
  return [shown(first), shown(await completionsAt(url).create({ model: MODEL, messages, tools }))];
}

// Let the SDK run the tool and send its result, streamed.
async function toolsHelper(url) {
  const tool = { ...WARMTH, function: warmth, parse: JSON.parse };
  const messages = messagesOf("tools");
  const tools = [{ type: "function", function: tool }];
  return completionsAt(url).runTools({ model: MODEL, messages, tools, stream: true }).finalContent();
}

async function shape(url) {
  const form = z.object({ city: z.string(), degrees: z.number() });
  const response_format = zodResponseFormat(form, "place");
  const completion = await completionsAt(url).parse({ ...asking(PROMPTS.shape), response_format });
  return completion.choices[0].message.parsed;
}

async function models(url) {
  const found = [];
  for await (const model of clientAt(url).models.list()) found.push(model.id);
  return found;
}

await runScenarios({
  variants: {
    "non-streamed": nonStreamed,
    streamed,
    helper,
    responses,
    "responses streamed": responsesStreamed,
    "responses helper": responsesHelper,
  },
  scenarios: {
    tools,
    "tools helper": toolsHelper,
    "responses tools": responsesTools,
    hosted,
    shape,
    models,
  },
});
