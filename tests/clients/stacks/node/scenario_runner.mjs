// Run the scenarios of a client program and print one line of JSON for each.
// The program knows nothing of the proxy: prompts and URLs come as JSON in its first argument.

const SETTINGS = JSON.parse(process.argv[2]);
export const PROMPTS = SETTINGS.prompts;
export const MODEL = SETTINGS.model;
export const KEY = "sk-of-the-client";

export const WARMTH = {
  name: "warmth",
  description: "Return the temperature in a city.",
  parameters: {
    type: "object",
    properties: { city: { type: "string" } },
    required: ["city"],
  },
};

export const warmth = ({ city }) => ({ Bonn: "21 degrees" })[city];

export const messagesOf = (scenario) => [{ role: "user", content: PROMPTS[scenario] }];

export const assertEqual = (left, right) => {
  if (left !== right) throw new Error(`not equal: ${left} and ${right}`);
};

// Run each shared scenario in each variant, and the scenarios that have a function of their own.
export async function runScenarios({ variants, scenarios }) {
  for (const [profile, urls] of Object.entries(SETTINGS.urls)) {
    for (const [scenario, prompt] of Object.entries(SETTINGS.shared_prompts)) {
      const url = urls[scenario] ?? urls.others;
      for (const [variant, ask] of Object.entries(variants)) {
        printResult(profile, `${scenario} ${variant}`, await result(ask, url, prompt));
      }
    }
    for (const [scenario, act] of Object.entries(scenarios)) {
      printResult(profile, scenario, await result(act, urls.others));
    }
  }
}

function printResult(profile, scenario, seen) {
  process.stdout.write(JSON.stringify({ profile, scenario, ...seen }) + "\n");
}

async function result(act, ...args) {
  try {
    return { seen: await act(...args) };
  } catch (error) {
    const status = error.status ?? error.statusCode ?? "";
    return { raised: { kind: `${error.constructor.name} ${status}`.trim(), words: error.message } };
  }
}
