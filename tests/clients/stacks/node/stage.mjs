// Where a client's program plays its scenarios: one line of JSON for each.
// It knows nothing of the house: what to say and where comes as JSON in the first argument.

const GIVEN = JSON.parse(process.argv[2]);
export const SAID = GIVEN.said;
export const MODEL = GIVEN.model;
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

export const asked = (scenario) => [{ role: "user", content: SAID[scenario] }];

export const same = (left, right) => {
  if (left !== right) throw new Error(`not the same: ${left} and ${right}`);
};

// Ask everything in every way, and play the scenarios that are asked in one way only.
export async function play({ ways, alone }) {
  for (const [profile, places] of Object.entries(GIVEN.places)) {
    for (const [scenario, words] of Object.entries(GIVEN.said_in_every_way)) {
      const url = places[scenario] ?? places.others;
      for (const [way, ask] of Object.entries(ways)) {
        tell(profile, `${scenario} ${way}`, await seen(ask, url, words));
      }
    }
    for (const [scenario, act] of Object.entries(alone)) {
      tell(profile, scenario, await seen(act, places.others));
    }
  }
}

function tell(profile, scenario, what) {
  process.stdout.write(JSON.stringify({ profile, scenario, ...what }) + "\n");
}

async function seen(act, ...args) {
  try {
    return { seen: await act(...args) };
  } catch (error) {
    const status = error.status ?? error.statusCode ?? "";
    return { raised: { kind: `${error.constructor.name} ${status}`.trim(), words: error.message } };
  }
}
