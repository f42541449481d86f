// Vercel's AI SDK: generateText and streamText, with all of its providers.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { createOpenRouter } from "@openrouter/ai-sdk-provider";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { KEY, MODEL, PROMPTS, WARMTH, assertEqual, runScenarios, warmth } from "./scenario_runner.mjs";

// The SDK writes warnings about unknown models to stdout, which is for results.
globalThis.AI_SDK_LOG_WARNINGS = false;

const PROVIDERS = {
  compatible: (baseURL) =>
    createOpenAICompatible({
      name: "proxy",
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

// Without this, the Anthropic API returns no thinking blocks.
const providerOptions = { anthropic: { thinking: { type: "enabled", budgetTokens: 1024 } } };

const form = z.object({ city: z.string(), degrees: z.number() });

const links = (sources) => Object.fromEntries(sources.map(({ title, url }) => [title, url]));

// Return the parts of a step. Those of a stream are promises.
async function shown(step) {
  const usage = await step.usage;
  return {
    text: await step.text,
    finish: await step.finishReason,
    // toolCalls also contains the calls of tools that the provider executes.
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

const nonStreamed = (provider) => async (url, words) =>
  shown(await generateText(asked(provider, url, words)));

const streamed = (provider) => async (url, words) => {
  const onError = () => {}; // the default handler writes errors to the console
  const stream = streamText({ ...asked(provider, url, words), onError });
  let text = "";
  for await (const part of stream.fullStream) {
    if (part.type === "error") throw part.error;
    if (part.type === "text-delta") text += part.text;
  }
  const seen = await shown(stream);
  assertEqual(text, seen.text);
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
  ...asked(provider, url, PROMPTS.tools),
  tools: toolSet,
  stopWhen: stepCountIs(3),
});

// Let the SDK run the tool and send its result.
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
  return (await generateText({ ...asked(provider, url, PROMPTS.shape), output })).output;
};

// A hosted shell: the SDK shows its calls and executes none of them.
async function hosted(url) {
  const provider = createOpenAI({ baseURL: url, apiKey: KEY });
  const shell = provider.tools.shell({ environment: { type: "containerAuto" } });
  const tools = { shell, ...toolSet };
  const model = provider.responses(MODEL);
  const stream = streamText({ model, prompt: PROMPTS.tools, tools, maxRetries: 0 });
  const types = { "tool-call": [], "tool-result": [], "tool-error": [] };
  for await (const part of stream.fullStream) {
    if (part.type === "error") throw part.error;
    types[part.type]?.push(part.toolName);
  }
  return types;
}

const byEach = (name, act) =>
  Object.entries(PROVIDERS).map(([which, provider]) => [`${name}${which}`, act(provider)]);

await runScenarios({
  variants: Object.fromEntries([
    ...byEach("non-streamed ", nonStreamed),
    ...byEach("streamed ", streamed),
  ]),
  scenarios: Object.fromEntries([
    ...byEach("tools non-streamed ", tools),
    ...byEach("tools streamed ", toolsStreamed),
    ...byEach("shape ", shape),
    ["hosted", hosted],
  ]),
});
