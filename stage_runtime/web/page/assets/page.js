// The page: the key, the stream of events, and what is shown of them. Everything shown is written as text.

import {$, colours, drawWaterfall, element, ms} from "./drawing.js";
import {Graph, bytes, perSecond} from "./graph.js";
import {Unauthorised, ask, events, forgetKey, hasKey, json, keepKey, mustAsk, reason, said, takeKeyOfAddress} from "./stream.js";
import {EDGES, GROUPS, INSTANCES, Requests, STAGES, Table, groupRows, instanceRows, stageRows} from "./tables.js";

const KEPT_S = 5;  // rates are those of the last seconds
const HIDDEN_S = 60;  // then a tab that nobody sees lets go of its stream: a coordinator has a few of them
const SILENT_S = 20;  // without a word of the coordinator, which has one each second: the connection is gone
const MOST_INSTANCES = 200;  // rows; of more, the filter finds the others
const state = {facts: null, loads: [], instances: new Map(), requests: new Map()};
const graph = new Graph($("graph"), stage => { $("instance-filter").value = state.facts.groups[stage]; showInstances(); $("instance-filter").focus(); });
const tables = {stages: new Table($("stages"), STAGES, "Stages"), edges: new Table($("edges"), EDGES, "Edges"),
  groups: new Table($("groups"), GROUPS, "Process groups"), instances: new Table($("instances"), INSTANCES, "Instances")};
const requests = new Requests($("requests"), pick);
let colour = colours([]), parts = null, waited_s = 1;
let trying = new AbortController();  // ends what is tried
let draw = () => {};  // draws the waterfall of the request that was picked

function show(opened) {
  for (const id of ["main", "nav"]) $(id).hidden = !opened;
  $("login").hidden = opened;
  $("logout").hidden = !opened || !hasKey();
  if (!opened) $("key").focus();
}

function pill(text, look) { said($("live"), text); $("live").className = `pill ${look}`; }

// Nothing of the pipeline stays in the document of somebody without the key.
function clear() {
  Object.assign(state, {facts: null, loads: []});
  state.instances.clear(); state.requests.clear();
  for (const table of Object.values(tables)) table.show([]);
  requests.show([], 0, colour); requests.picked = null;
  for (const id of ["graph", "cards", "problem", "revisions", "profile"]) $(id).textContent = "";
  said($("name"), "OmniPipeline"); said($("waterfall-title"), "Waterfall"); document.title = "OmniPipeline";
  clearWaterfall(); trying.abort();
  graph.known = ""; parts = null;
}

function clearWaterfall() {
  draw = () => {};
  for (const id of ["waterfall", "request-facts", "request-error"]) $(id).textContent = "";
}

const handlers = {
  pipeline(facts) {
    state.facts = facts;
    colour = colours(Object.keys(facts.groups || {}));
    said($("name"), facts.pipeline || facts.model); document.title = `${facts.pipeline || facts.model} · OmniPipeline`;
    said($("revisions"), `Pipeline revisions that are served, the newest last: ${(facts.revisions || []).join(", ") || "none"}. Coordinator ${facts.coordinator}, version ${facts.version}.`);
    begin(facts);
  },
  load(load) {
    state.loads.push(load);
    while (state.loads.length > 2 && state.loads[1].now <= load.now - KEPT_S) state.loads.shift();
    $("problem").hidden = !load.problem; said($("problem"), load.problem || "");
    if (load.draining) pill("draining", "bad"); else pill(load.problem ? "cannot serve" : "live", load.problem ? "bad" : "good");
  },
  instances({changed, gone}) { update(state.instances, "incarnation", changed, gone); },
  requests({changed, gone}) {
    update(state.requests, "id", changed, gone);
    if (changed.some(one => one.id === requests.picked)) pick(requests.picked);
  },
  error({message}) { pill(message, "bad"); },
};

function update(known, key, changed, gone) {
  for (const one of gone) known.delete(one);
  for (const one of changed) known.set(one[key], one);
}

// --- what follows from two moments -----------------------------------------------------------------------------

function rates() {
  const now = state.loads[state.loads.length - 1], before = state.loads[0], seconds = Math.max(now.now - before.now, 0.001), alone = now === before;
  const grown = (a, b) => alone ? 0 : Math.max((a || 0) - (b || 0), 0);
  const ready = new Map();
  for (const one of state.instances.values()) if (one.state === "ready") ready.set(one.group, (ready.get(one.group) || 0) + 1);
  const stages = new Map(Object.entries(state.facts.groups || {}).map(([name, group]) => {
    const a = now.stages[name] || {}, b = before.stages[name] || {}, done = grown(a.done, b.done);
    const mean = field => done ? 1000 * grown(a[field], b[field]) / done : null;
    return [name, {group, ready: ready.get(group) || 0, waiting: a.waiting || 0, running: a.running || 0, busy: a.busy || 0,
      rate: done / seconds, queue_ms: mean("queue_s"), run_ms: mean("run_s")}];
  }));
  const old = new Map(before.edges.map(edge => [`${edge.source}\n${edge.target}\n${edge.relay}`, edge.bytes]));
  const relays = new Map();
  for (const edge of now.edges) {
    const key = `${edge.source}\n${edge.target}`, rate = grown(edge.bytes, old.get(`${key}\n${edge.relay}`)) / seconds;
    if (!relays.has(key)) relays.set(key, []);
    relays.get(key).push({...edge, rate});
  }
  const all = outcomes => Object.values(outcomes).reduce((a, b) => a + b, 0), bad = outcomes => all(outcomes) - (outcomes.completed || 0);
  return {stages, relays, now, seconds, done: grown(all(now.outcomes), all(before.outcomes)) / seconds,
    failing: grown(bad(now.outcomes), bad(before.outcomes)) / seconds, completed: now.outcomes.completed || 0, failed: bad(now.outcomes)};
}

function transport(source, target, rows) {
  const groups = state.facts.groups;
  if (groups[source] !== undefined && groups[source] === groups[target]) return "in process";
  const used = rows.filter(row => Object.keys(row.media).length), shown = (used.length ? used : rows).map(row => {
    const media = Object.keys(row.media).filter(medium => medium !== "memory").sort();
    return media.length && !(media.length === 1 && row.relay.startsWith(media[0])) ? `${row.relay} (${media.join(", ")})` : row.relay;
  });
  return shown.join(", ");
}

// --- showing -----------------------------------------------------------------------------------------------------

// value: a text; an empty one hides the card
function card(name, value) {
  const found = [...$("cards").children].find(one => one.dataset.name === name);
  if (found) { said(found.querySelector("b"), value); found.hidden = value === ""; return; }
  if (value === "") return;
  const made = element($("cards"), "div", {class: "card", "data-name": name}, name);
  element(made, "b", {}, value);
}

function showAll() {
  if (!state.facts || !state.loads.length) return;
  const {stages, relays, now, done, failing, completed, failed} = rates();
  graph.place(state.facts);
  const labels = new Map(), rows = [], entry = state.facts.entry ? [["coordinator", state.facts.entry, "normal"]] : [];
  for (const [source, target, kind] of [...entry, ...state.facts.edges]) {
    const used = relays.get(`${source}\n${target}`) || [], name = transport(source, target, used);
    const rate = used.reduce((sum, row) => sum + row.rate, 0), flying = used.reduce((sum, row) => sum + row.in_flight, 0);
    labels.set(`${source}\n${target}\n${kind}`, {name, rate, title: `${source} to ${target}: ${name || "no instance yet"}`});
    rows.push([`${source}\n${target}\n${kind}`, [source, target, kind === "normal" ? "payload" : kind, name || "–", name === "in process" ? "–" : bytes(rate), name === "in process" ? "–" : flying]]);
  }
  graph.update(stages, labels, {rate: done, in_flight: now.in_flight});
  tables.stages.show(stageRows(stages));
  tables.edges.show(rows);
  card("requests", perSecond(done)); card("in flight", String(now.in_flight));
  card("wait for an instance", now.awaiting_instance ? String(now.awaiting_instance) : "");
  card("completed", String(completed)); card("not completed", failing > 0 ? `${failed} (${perSecond(failing)})` : String(failed));
  card("stages", String(stages.size)); card("instances", `${[...state.instances.values()].filter(one => one.state === "ready").length} of ${state.instances.size} ready`);
  showInstances();
  showRequests();
  document.body.dataset.ready = "yes";
}

function showInstances() {
  const all = [...state.instances.values()];
  tables.groups.show(groupRows(state.facts.groups, all));
  const [found, rows] = instanceRows(all, $("instance-filter").value, MOST_INSTANCES, Object.values(state.facts.groups || {}));
  tables.instances.show(rows);
  said($("instance-count"), found > rows.length ? `${rows.length} of ${found} are shown; those that are not ready come first` : `${found} of ${all.length}`);
}

function showRequests() {
  if (!state.loads.length) return;
  const wanted = $("request-filter").value, now = state.loads[state.loads.length - 1].now;  // when they were as they are shown
  const fits = {all: () => true, running: one => one.state === "running", wrong: one => one.state === "failed" || one.state === "cancelled"}[wanted];
  const found = [...state.requests.values()].filter(fits).sort((a, b) => b.admitted_at - a.admitted_at || (a.id < b.id ? -1 : 1));
  requests.show(found, now, colour);
  said($("request-count"), found.length ? `${found.length}, newest first` : "none yet");
}

async function pick(id) {
  if (requests.picked !== id) clearWaterfall();
  requests.picked = id;
  showRequests();
  said($("waterfall-title"), `Waterfall of ${id}`);
  try {
    const {record, lines} = await json(`/page/requests/${encodeURIComponent(id)}`);
    if (requests.picked !== id) return;
    const duration = record.total_ms === null ? record.age_ms : record.total_ms;
    const facts = [record.kind, record.state, ms(duration)];
    if (record.first_event_ms !== null) facts.push(`first output after ${ms(record.first_event_ms)}`);
    if (record.usage) facts.push(`${record.usage.prompt_tokens} + ${record.usage.completion_tokens} tokens`);
    if (record.attempt > 1) facts.push(`attempt ${record.attempt}`);
    if (record.waiting_for.length) facts.push(`waits for ${record.waiting_for.join(", ")}`);
    if (!lines.length) facts.push("no stage has reported yet");
    said($("request-facts"), facts.join(" · "));
    said($("request-error"), record.error ? `${record.error.code}${record.error.stage ? ` in ${record.error.stage}` : ""}: ${record.error.message}` : "");
    draw = () => drawWaterfall($("waterfall"), {rows: lines.slice(0, 400), count: lines.length, first: 0, duration: Math.max(duration, ...lines.map(line => line.end)), colour});
    draw();
  } catch (error) {
    if (requests.picked !== id) return;
    if (error instanceof Unauthorised) { lock(error.message); return; }
    said($("request-error"), error.message);
  }
}

// What is there once for each pipeline: the parts that are loaded when it is known. Another one may follow at the same
// address, such as the next `omni up`.
async function begin(facts) {
  const own = JSON.stringify([facts.model, facts.serves, facts.profiler]);
  if (own === parts) return;
  parts = own;
  trying.abort();
  const ended = (trying = new AbortController()).signal;
  $("profile-section").hidden = $("profile-link").hidden = !facts.profiler;
  const {Trying} = await import("./trying.js");
  if (!ended.aborted) new Trying($("try"), facts, {locked: error => lock(error.message), shown: id => { pick(id); }, ended});
  if (!facts.profiler) return;
  const {Profiles} = await import("./profiles.js");
  if (!ended.aborted) new Profiles($("profile"), error => lock(error.message));
}

// --- the stream ---------------------------------------------------------------------------------------------------

let following = null;  // {connection}: aborts the stream

function lock(why) {
  if (following) following.connection.abort();
  following = null;
  forgetKey(); clear(); show(false);
  pill("locked", "bad");
  said($("login-why"), why || "This pipeline is behind an API key. It stays in this tab.");
}

const seen = () => new Promise(done => {
  if (document.hidden) document.addEventListener("visibilitychange", () => done(seen()), {once: true}); else done();
});
let unseen = 0;
document.onvisibilitychange = () => {
  clearTimeout(unseen);
  if (document.hidden) unseen = setTimeout(() => { if (following) following.connection.abort(new Error("the tab was hidden")); }, HIDDEN_S * 1000);
};

async function follow() {
  if (following) following.connection.abort();
  const own = following = {connection: new AbortController()};
  for (;;) {
    await seen();
    if (following !== own) return;
    const connection = own.connection = new AbortController();
    let silence = 0;
    const heard = () => {
      clearTimeout(silence);
      silence = setTimeout(() => connection.abort(new Error(`nothing has come for ${SILENT_S} s`)), SILENT_S * 1000);
    };
    try {
      heard();
      const answer = await ask("/page/events", {signal: connection.signal});
      if (!answer.ok) throw new Error(await reason(answer));
      if (following !== own) return;
      show(true);
      Object.assign(state, {loads: []}); state.instances.clear(); state.requests.clear();
      for await (const event of events(answer)) {
        heard();
        waited_s = 1;
        if (handlers[event.name]) handlers[event.name](JSON.parse(event.data));
        if (event.name !== "pipeline") schedule();
      }
      throw new Error("the coordinator has ended the stream");
    } catch (error) {
      clearTimeout(silence);
      if (following !== own) return;
      if (error instanceof Unauthorised) { lock(error.message); return; }
      pill(`connecting again: ${error.message}`, "bad");
      await new Promise(done => setTimeout(done, waited_s * 1000));
      waited_s = Math.min(waited_s * 2, 15);
    }
  }
}

let scheduled = false;
function schedule() {
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(() => { scheduled = false; showAll(); });
}

$("login").onsubmit = event => { event.preventDefault(); keepKey($("key").value.trim()); $("key").value = ""; follow(); };
$("logout").onclick = () => lock("");
$("instance-filter").oninput = showInstances;
$("request-filter").onchange = showRequests;
window.onresize = () => { schedule(); draw(); };
window.onhashchange = () => { if (takeKeyOfAddress()) follow(); };
takeKeyOfAddress();
if (mustAsk()) lock(""); else follow();
