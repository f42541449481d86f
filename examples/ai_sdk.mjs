// Vercel's AI SDK (`npm install ai @ai-sdk/openai-compatible`): stream the steps as reasoning,
// then the answer.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { streamText } from "ai";

const baseURL = process.env.OPENAI_BASE_URL ?? "http://127.0.0.1:8080/v1";
const apiKey = process.env.OPENAI_API_KEY ?? "none";
// The first model that the backend lists, unless MODEL names another.
const listed = await fetch(`${baseURL}/models`, { headers: { Authorization: `Bearer ${apiKey}` } });
const model = process.env.MODEL ?? (await listed.json()).data[0].id;

const provider = createOpenAICompatible({ name: "sandbox-proxy", baseURL, apiKey });
const { fullStream } = streamText({
  model: provider.chatModel(model),
  prompt: "How many primes are there below a million?",
});
for await (const part of fullStream) {
  if (part.type === "error") throw part.error;
  if (part.type === "reasoning-delta") process.stdout.write(part.text);
  if (part.type === "text-start") process.stdout.write("\n== answer\n");
  if (part.type === "text-delta") process.stdout.write(part.text);
}
process.stdout.write("\n");
