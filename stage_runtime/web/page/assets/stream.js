// The key, requests with it, and server-sent events. `EventSource` sends no headers, so events are read by `fetch`.

const NAME = "omni.key";

export class Unauthorised extends Error {}

// `#key=…` is how `kubectl omni ui` hands the key over: a fragment is sent to no server. It leaves the address at once.
// Returns whether there was one.
export function takeKeyOfAddress() {
  if (!location.hash.startsWith("#key=")) return false;
  let key = location.hash.slice(5);
  history.replaceState(null, "", location.pathname);
  try { key = decodeURIComponent(key); } catch { /* somebody wrote it as it is */ }
  sessionStorage.setItem(NAME, key);
  return true;
}
export const mustAsk = () => document.documentElement.dataset.keyed === "yes" && !hasKey();
export const hasKey = () => sessionStorage.getItem(NAME) !== null;
export const keepKey = key => sessionStorage.setItem(NAME, key);
export const forgetKey = () => sessionStorage.removeItem(NAME);

export async function ask(path, options = {}) {
  const key = sessionStorage.getItem(NAME), headers = new Headers(options.headers);
  if (key !== null) try { headers.set("authorization", `Bearer ${key}`); } catch { throw new Unauthorised("This key has characters that no request can carry."); }
  const answer = await fetch(path, {...options, headers, credentials: "omit", cache: "no-store", redirect: "error"});
  if (answer.status === 401) throw new Unauthorised(await reason(answer));
  return answer;
}

export async function reason(answer) {
  const text = await answer.text();
  try {
    const error = JSON.parse(text).error;
    return `${error.code}${error.stage ? ` in ${error.stage}` : ""}: ${error.message}`;
  } catch { return `status ${answer.status}: ${text.slice(0, 500)}`; }
}

export async function json(path, options) {
  const answer = await ask(path, options);
  if (!answer.ok) throw new Error(await reason(answer));
  return answer.json();
}

// Each event as {name, data}, data a string; ends with the answer.
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const {value, done} = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const event = {name: "message", data: ""};
        for (const line of part.split("\n")) {
          if (line.startsWith("event: ")) event.name = line.slice(7);
          else if (line.startsWith("data: ")) event.data += line.slice(6);
        }
        if (event.data) yield event;
      }
    }
  } finally { reader.cancel().catch(() => {}); }
}

// Whether a button's text may be written to it again: one that has the focus keeps it.
export const said = (node, text) => { if (node.textContent !== text) node.textContent = text; };
