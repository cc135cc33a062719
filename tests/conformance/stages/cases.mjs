// How a script of node's says what it found: a line a case, as cases.py.
import { appendFileSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { pathToFileURL } from "node:url";

const { CONFORMANCE_URL, CONFORMANCE_MODEL, CONFORMANCE_OUT, CONFORMANCE_BIN } = process.env;
export const URL_OF = CONFORMANCE_URL;
export const MODEL = CONFORMANCE_MODEL;

// A package of the environment, which does not stand above this file.
export function load(name) {
  const require = createRequire(join(dirname(CONFORMANCE_BIN), "package.json"));
  return import(pathToFileURL(require.resolve(name)).href);
}

export async function test(name, run) {
  let why = "";
  try {
    await run();
  } catch (error) {
    console.error(error);
    why = `${error.name}: ${error.message}`.split("\n")[0].slice(0, 300);
  }
  appendFileSync(CONFORMANCE_OUT, JSON.stringify({ name, ok: !why, why }) + "\n");
}

export function check(ok, what) {
  if (!ok) throw new Error(typeof what === "string" ? what : JSON.stringify(what));
}
