// A place to try the pipeline: what it serves, by the routes that all clients use.

import {element, ms} from "./drawing.js";
import {Recording, base64} from "./recording.js";
import {Unauthorised, ask, events, json, reason, said} from "./stream.js";

const TABS = [["chat", "Chat", Chat], ["speech", "Speech", Speech], ["transcription", "Transcription", Transcription], ["", "Raw JSON", Raw]];
let made = 0;

export class Trying {
  // page: locked(error), shown(request id), ended: the signal that all this is over
  constructor(place, facts, page) {
    page.ended.addEventListener("abort", () => forget(place));
    const tabs = element(place, "div", {class: "fields", role: "tablist", "aria-label": "What to try"});
    const offered = TABS.filter(([serves]) => !serves || facts.serves.includes(serves));
    const chosen = offered.map(([, name, Kind], index) => {
      const tab = element(tabs, "button", {type: "button", role: "tab", id: `tab-${index}`, "aria-controls": `try-${index}`}, name);
      const panel = element(place, "div", {role: "tabpanel", id: `try-${index}`, "aria-labelledby": `tab-${index}`});
      Kind(panel, facts, page);
      tab.onclick = () => choose(index);
      tab.onkeydown = event => {
        const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
        if (step) { choose((index + step + offered.length) % offered.length); }
      };
      return {tab, panel};
    });
    const choose = (index, focus = true) => chosen.forEach(({tab, panel}, place) => {
      tab.setAttribute("aria-selected", String(place === index)); tab.tabIndex = place === index ? 0 : -1;
      panel.hidden = place !== index;
      if (place === index && focus) tab.focus();
    });
    choose(0, false);
  }
}

// --- parts of forms -------------------------------------------------------------------------------------------------

function field(place, text, name, attributes = {}) {
  const id = `field-${made++}`, row = element(place, "span");
  element(row, "label", {for: id}, `${text} `);
  return element(row, name, {...attributes, id});
}
// What is inside goes, and the sounds that it could play.
function forget(place) {
  for (const audio of place.querySelectorAll("audio")) if (audio.src) URL.revokeObjectURL(audio.src);
  place.textContent = "";
}
const button = (place, text) => element(place, "button", {type: "button"}, text);

function picture(place, text, accept) {
  const input = field(place, text, "input", {type: "file", accept});
  return {file: () => input.files[0] || null, clear: () => { input.value = ""; }};
}

// A button that records while it is pressed down once, until it is pressed again, or until the signal `ended`.
function microphone(place, failed, ended) {
  const switched = button(place, "Record"), heard = element(place, "audio", {controls: ""});
  let recording = null, sound = null;
  const pressed = down => { said(switched, down ? "Stop recording" : "Record"); switched.setAttribute("aria-pressed", String(down)); };
  heard.hidden = true; pressed(false);
  if (!navigator.mediaDevices) { switched.disabled = true; switched.title = "browsers give a microphone to https and localhost only"; }
  ended.addEventListener("abort", () => { if (recording) recording.release(); });
  switched.onclick = async () => {
    switched.disabled = true;  // a second press while the user is asked for the microphone would be one too many
    try {
      const own = recording || new Recording();
      if (recording) {
        recording = null; pressed(false);
        sound = await own.stop();
        play(heard, sound);
      } else {
        await own.start();
        if (ended.aborted) { own.release(); return; }
        recording = own; pressed(true);
      }
    } catch (error) { recording = null; pressed(false); failed(error); }
    finally { switched.disabled = false; }
  };
  return {file: () => sound, clear: () => { sound = null; heard.hidden = true; }};
}

function play(audio, blob) {
  if (audio.src) URL.revokeObjectURL(audio.src);
  audio.src = URL.createObjectURL(blob); audio.hidden = false;
}

// Sends at a press; `send(signal, note)` may be cancelled. note: what is said of the request.
function sender(place, page, send) {
  const row = element(place, "div", {class: "fields"}), go = button(row, "Send"), stop = button(row, "Cancel");
  const note = element(row, "span", {class: "soft", role: "status"}), wrong = element(place, "p", {class: "error", role: "alert"});
  let running = null;
  stop.disabled = true;
  go.onclick = async () => {
    running = new AbortController(); go.disabled = true; stop.disabled = false; said(wrong, ""); said(note, "sent");
    const begun = performance.now(), facts = {first: null, id: null};
    const head = answer => { if (answer.status < 400 || answer.status >= 500) facts.id = answer.headers.get("x-request-id"); };  // one that is refused has no waterfall
    try {
      await send(running.signal, {head, first: () => { facts.first ??= performance.now() - begun; }});
      said(note, `${facts.first === null ? "" : `first output after ${ms(facts.first)}, `}whole answer after ${ms(performance.now() - begun)}`);
    } catch (error) {
      said(note, "");
      if (page.ended.aborted) return;
      if (error instanceof Unauthorised) page.locked(error);
      else said(wrong, error.name === "AbortError" ? "cancelled" : error.message);
    } finally {
      go.disabled = false; stop.disabled = true;
      if (facts.id && !page.ended.aborted) page.shown(facts.id);
    }
  };
  const cancel = () => { if (running) running.abort(); };
  stop.onclick = cancel;
  page.ended.addEventListener("abort", cancel);
  return {row, cancel, failed: error => said(wrong, error.message), send: () => go.disabled || go.click()};
}

async function post(path, body, signal, note) {
  const form = body instanceof FormData;
  const answer = await ask(path, {method: "POST", signal, body: form ? body : JSON.stringify(body), headers: form ? {} : {"content-type": "application/json"}});
  note.head(answer);
  if (!answer.ok) throw new Error(await reason(answer));
  return answer;
}

const enter = (area, send) => area.addEventListener("keydown", event => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); send(); } });

// --- kinds ----------------------------------------------------------------------------------------------------------

function Chat(place, facts, page) {
  const said_before = element(place, "div", {"aria-live": "polite"}), text = field(place, "Message", "textarea", {placeholder: "Ctrl+Enter sends"});
  const row = element(place, "div", {class: "fields"}), image = picture(row, "Picture", "image/*");
  const failed = error => form.failed(error), sound = microphone(row, failed, page.ended), upload = picture(row, "or a sound file", "audio/*");
  const stream = field(row, "stream", "input", {type: "checkbox", checked: ""}), aloud = field(row, "answer aloud", "input", {type: "checkbox"});
  const most = field(row, "max_tokens", "input", {type: "number", min: 1, placeholder: "unset"});
  let messages = [];

  async function parts() {
    const found = [], file = image.file(), heard = sound.file() || upload.file();
    if (file) found.push({type: "image_url", image_url: {url: `data:${file.type};base64,${await base64(file)}`}});
    if (heard) found.push({type: "input_audio", input_audio: {data: await base64(heard), format: soundFormat(heard.type)}});
    if (text.value || !found.length) found.push({type: "text", text: text.value});
    return found;
  }

  const form = sender(place, page, async (signal, note) => {
    const content = await parts(), plain = content.length === 1 && content[0].type === "text" ? text.value : content;
    const asked = {role: "user", content: plain}, whole = aloud.checked || !stream.checked;
    const body = {model: facts.model, messages: [...messages, asked], stream: !whole};
    if (most.value) body.max_tokens = Number(most.value);
    if (aloud.checked) Object.assign(body, {modalities: ["text", "audio"], audio: {format: "wav"}});
    bubble(said_before, "user", content);
    const shown = element(said_before, "div", {class: "said assistant"}), thought = element(shown, "div", {class: "soft"}), words = element(shown, "div");
    const before = messages, written = text.value;
    let answer;
    text.value = "";  // the next message may be written while this one is answered
    try { answer = await post("/v1/chat/completions", body, signal, note); } catch (error) { text.value ||= written; throw error; }
    image.clear(); sound.clear(); upload.clear();
    let message = {role: "assistant", content: ""};
    if (whole) {
      message = (await answer.json()).choices[0].message;
      note.first();
      said(thought, message.reasoning_content || "");
      said(words, message.content || (message.audio && message.audio.transcript) || "");
      if (message.tool_calls) element(shown, "pre", {}, JSON.stringify(message.tool_calls, null, 2));
      if (message.audio) play(element(shown, "audio", {controls: ""}), blob(message.audio.data, "audio/wav"));
    } else {
      for await (const {data} of events(answer)) {
        if (data === "[DONE]") break;
        const piece = JSON.parse(data);
        if (piece.error) throw new Error(`${piece.error.code}: ${piece.error.message}`);
        const delta = piece.choices.length ? piece.choices[0].delta : {};
        if (delta.content || delta.reasoning_content) note.first();
        if (delta.reasoning_content) thought.append(delta.reasoning_content);
        if (delta.content) { words.append(delta.content); message.content += delta.content; }
        if (delta.tool_calls) element(shown, "pre", {}, JSON.stringify(delta.tool_calls, null, 2));
      }
    }
    if (messages === before) messages = [...before, asked, {role: "assistant", content: message.content || words.textContent}];
  });
  enter(text, form.send);
  button(form.row, "New conversation").onclick = () => { form.cancel(); messages = []; forget(said_before); };
}

// The format of a sound as a chat names it, by the media type of its file.
function soundFormat(type) {
  const named = type.split(";")[0].trim().toLowerCase().replace(/^audio\/(x-)?/, "");
  return {"": "wav", wave: "wav", "vnd.wave": "wav", mpeg: "mp3", mp4: "m4a"}[named] || named;
}

function bubble(place, role, content) {
  const shown = element(place, "div", {class: `said ${role}`});
  for (const part of content) {
    if (part.type === "text") element(shown, "div", {}, part.text);
    else if (part.type === "image_url") element(shown, "img", {src: part.image_url.url, alt: "the picture that was sent"});
    else element(shown, "div", {class: "soft"}, "(sound)");
  }
}

function blob(data, type) {
  const text = atob(data), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return new Blob([bytes], {type});
}

function Speech(place, facts, page) {
  const text = field(place, "Text", "textarea", {placeholder: "What is to be said"}), row = element(place, "div", {class: "fields"});
  const voice = field(row, "Voice", "input", {placeholder: "unset"}), form_of = field(row, "Format", "select"), heard = element(place, "audio", {controls: ""});
  for (const one of ["wav", "mp3", "opus", "flac"]) element(form_of, "option", {}, one);
  heard.hidden = true;
  const form = sender(place, page, async (signal, note) => {
    const body = {model: facts.model, input: text.value, response_format: form_of.value};
    if (voice.value) body.voice = voice.value;
    const answer = await post("/v1/audio/speech", body, signal, note), type = answer.headers.get("content-type"), reader = answer.body.getReader(), pieces = [];
    for (;;) {
      const {value, done} = await reader.read();
      if (done) break;
      note.first(); pieces.push(value);
    }
    play(heard, new Blob(pieces, {type}));
    heard.play().catch(() => {});
  });
  enter(text, form.send);
}

function Transcription(place, facts, page) {
  const row = element(place, "div", {class: "fields"}), sound = microphone(row, error => form.failed(error), page.ended), upload = picture(row, "or a sound file", "audio/*");
  const language = field(row, "Language", "input", {placeholder: "unset", size: 6}), shown = element(place, "pre", {"aria-live": "polite"});
  shown.hidden = true;
  const form = sender(place, page, async (signal, note) => {
    const file = sound.file() || upload.file(), body = new FormData();
    if (!file) throw new Error("record something, or choose a file");
    body.set("file", file, file.name || "recording.wav"); body.set("model", facts.model);
    if (language.value) body.set("language", language.value);
    const answer = await post("/v1/audio/transcriptions", body, signal, note);
    note.first();
    shown.hidden = false;
    said(shown, (await answer.json()).text);
  });
}

function Raw(place, facts, page) {
  const row = element(place, "div", {class: "fields"}), method = field(row, "Method", "select"), path = field(row, "Path", "input", {list: "paths", size: 34, spellcheck: "false"});
  for (const one of ["POST", "GET", "DELETE"]) element(method, "option", {}, one);
  const known = element(row, "datalist", {id: "paths"}), body = field(place, "Body", "textarea", {class: "code", spellcheck: "false"});
  const head = element(place, "p", {class: "soft"}), shown = element(place, "pre", {"aria-live": "polite"});
  path.value = "/v1/pipeline"; body.value = JSON.stringify({inputs: "hello there"}, null, 2); shown.hidden = true;
  json("/openapi.json").then(found => Object.keys(found.paths).forEach(one => element(known, "option", {value: one}))).catch(() => {});
  const form = sender(place, page, async (signal, note) => {
    const sent = method.value === "POST" ? {body: body.value, headers: {"content-type": "application/json"}} : {};
    if (!path.value.startsWith("/") || path.value.startsWith("//")) throw new Error("path: expected one of this server, such as /v1/pipeline");
    const answer = await ask(path.value, {method: method.value, signal, ...sent}), type = answer.headers.get("content-type") || "";
    note.head(answer);
    said(head, `${answer.status} ${type}`); shown.hidden = false; said(shown, "");
    if (!/json|text|event-stream/.test(type)) { said(shown, `${(await answer.arrayBuffer()).byteLength} bytes`); return; }
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const {value, done} = await reader.read();
      if (done) break;
      note.first(); shown.append(value);
    }
    if (type.includes("json")) try { JSON.parse(shown.textContent); said(shown, indented(shown.textContent)); } catch { /* as it came */ }
  });
  enter(body, form.send);
}

// JSON in lines. Its numbers stay as they came: a parsed one is a float, which has other last digits.
function indented(text) {
  let lines = "", deep = "\n", before = "";
  for (const [token] of text.matchAll(/"(?:[^"\\]+|\\.)*"|[^\s"{}[\],:]+|[{}[\],:]/g)) {
    const opens = before === "{" || before === "[", closes = token === "}" || token === "]";
    if (closes) deep = deep.slice(0, -2);
    if ((opens && !closes) || before === "," || (closes && !opens)) lines += deep;
    lines += token === ":" ? ": " : token;
    if (token === "{" || token === "[") deep += "  ";
    before = token;
  }
  return lines;
}
