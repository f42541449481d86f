// Vercel's AI SDK: generateText and streamText, by all its providers.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { createOpenRouter } from "@openrouter/ai-sdk-provider";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { KEY, MODEL, SAID, WARMTH, play, same, warmth } from "./stage.mjs";

// It warns of models it does not know, on the standard output.
globalThis.AI_SDK_LOG_WARNINGS = false;

const PROVIDERS = {
  compatible: (baseURL) =>
    createOpenAICompatible({
      name: "house",
      baseURL,
      apiKey: KEY,
      includeUsage: true,
      supportsStructuredOutputs: true,
    }).chatModel(MODEL),
  openai: (baseURL) => createOpenAI({ baseURL, apiKey: KEY }).chat(MODEL),
  responses: (baseURL) => createOpenAI({ baseURL, apiKey: KEY }).responses(MODEL),
  openrouter: (baseURL) =>
    createOpenRouter({ baseURL, apiKey: KEY, compatibility: "strict" }).chat(MODEL),
  anthropic: (baseURL) => createAnthropic({ baseURL, apiKey: KEY })(MODEL),
};

// Anthropic's clients say whether they show what the model thinks.
const providerOptions = { anthropic: { thinking: { type: "enabled", budgetTokens: 1024 } } };

const form = z.object({ city: z.string(), degrees: z.number() });

const links = (sources) => Object.fromEntries(sources.map(({ title, url }) => [title, url]));

// One step of either; what a stream has is awaited.
async function shown(step) {
  const usage = await step.usage;
  return {
    text: await step.text,
    finish: await step.finishReason,
    // What a provider has called by itself stands among them as well.
    calls: (await step.toolCalls).filter((c) => !c.providerExecuted).map((c) => c.toolName),
    thought: (await step.reasoningText) ?? "",
    usage: [usage.inputTokens, usage.outputTokens],
    cited: links(await step.sources),
    pictures: (await step.files).map((file) => `data:${file.mediaType};base64,${file.base64}`),
  };
}

const asked = (provider, url, prompt) => ({
  model: provider(url),
  prompt,
  providerOptions,
  maxRetries: 0,
});

const whole = (provider) => async (url, words) =>
  shown(await generateText(asked(provider, url, words)));

const streamed = (provider) => async (url, words) => {
  const onError = () => {}; // else it is written to the console too
  const stream = streamText({ ...asked(provider, url, words), onError });
  let told = "";
  for await (const part of stream.fullStream) {
    if (part.type === "error") throw part.error;
    if (part.type === "text-delta") told += part.text;
  }
  const seen = await shown(stream);
  same(told, seen.text);
  return seen;
};

const toolSet = {
  warmth: tool({
    description: WARMTH.description,
    inputSchema: z.object({ city: z.string() }),
    execute: async (input) => warmth(input),
  }),
};

const asking = (provider, url) => ({
  ...asked(provider, url, SAID.tools),
  tools: toolSet,
  stopWhen: stepCountIs(3),
});

// The SDK calls the tool and asks again.
const tools = (provider) => async (url) => {
  const { steps } = await generateText(asking(provider, url));
  return Promise.all(steps.map(shown));
};

const toolsStreamed = (provider) => async (url) => {
  const stream = streamText(asking(provider, url));
  await stream.consumeStream();
  return Promise.all((await stream.steps).map(shown));
};

const shape = (provider) => async (url) => {
  const output = Output.object({ schema: form });
  return (await generateText({ ...asked(provider, url, SAID.shape), output })).output;
};

// A shell of the provider's: the SDK shows its calls, and runs none of them.
async function hosted(url) {
  const provider = createOpenAI({ baseURL: url, apiKey: KEY });
  const shell = provider.tools.shell({ environment: { type: "containerAuto" } });
  const tools = { shell, ...toolSet };
  const model = provider.responses(MODEL);
  const stream = streamText({ model, prompt: SAID.tools, tools, maxRetries: 0 });
  const types = { "tool-call": [], "tool-result": [], "tool-error": [] };
  for await (const part of stream.fullStream) {
    if (part.type === "error") throw part.error;
    types[part.type]?.push(part.toolName);
  }
  return types;
}

const byEach = (name, act) =>
  Object.entries(PROVIDERS).map(([which, provider]) => [`${name}${which}`, act(provider)]);

await play({
  ways: Object.fromEntries([...byEach("whole ", whole), ...byEach("streamed ", streamed)]),
  alone: Object.fromEntries([
    ...byEach("tools whole ", tools),
    ...byEach("tools streamed ", toolsStreamed),
    ...byEach("shape ", shape),
    ["hosted", hosted],
  ]),
});
