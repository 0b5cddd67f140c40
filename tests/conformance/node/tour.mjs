// What the JavaScript tours share: who is served, what is asked for, and the report as one line of JSON.
import { readFileSync } from "node:fs";
import { z } from "zod";

export const Animal = z.object({
  kind: z.enum(["cat", "dog"]),
  is_tame: z.boolean(),
  legs: z.union([z.literal(2), z.literal(4)]),
});

export const MOVE = {
  name: "move",
  parameters: {
    type: "object",
    properties: { direction: { enum: ["left", "right"] } },
    required: ["direction"],
    additionalProperties: false,
  },
};

export function served() {
  const [url, model, key] = process.argv.slice(2);
  return { url, model, key };
}

export async function report(client, packageName, checks) {
  const file = new URL(`./node_modules/${packageName}/package.json`, import.meta.url);
  const version = JSON.parse(readFileSync(file, "utf8")).version;
  const results = {};
  for (const [name, check] of Object.entries(checks)) {
    try {
      await check();
      results[name] = null;
    } catch (error) {
      results[name] = `${error?.stack ?? error}`;
    }
  }
  console.log(JSON.stringify({ client, version, results }));
}
