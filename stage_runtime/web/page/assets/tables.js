// Tables whose rows stay the same elements while their numbers change, so that focus and selection stay.

import {element} from "./drawing.js";
import {said} from "./stream.js";

export class Table {
  // columns: [heading, "n" for numbers]
  constructor(table, columns, caption) {
    element(table, "caption", {class: "soft"}, caption).hidden = true;
    const head = element(element(table, "thead"), "tr");
    this.columns = columns; this.body = element(table, "tbody"); this.rows = new Map();
    for (const [heading, kind] of columns) element(head, "th", {scope: "col", class: kind || ""}, heading);
  }

  // rows: [key, cells]; a cell is a text, or [text, class]
  show(rows) {
    const wanted = new Set(rows.map(row => row[0]));
    for (const [key, row] of this.rows) if (!wanted.has(key)) { row.remove(); this.rows.delete(key); }
    let before = null;
    for (const [key, cells] of rows) {
      let row = this.rows.get(key);
      if (!row) {
        row = document.createElement("tr");
        for (const [, kind] of this.columns) element(row, "td", {class: kind || ""});
        this.rows.set(key, row);
      }
      cells.forEach((cell, place) => {
        const [text, look] = Array.isArray(cell) ? cell : [cell, ""], shown = row.cells[place];
        if (shown.textContent !== String(text)) { shown.textContent = text; shown.title = text; }
        const kind = `${this.columns[place][1] || ""} ${look}`.trim();
        if (shown.className !== kind) shown.className = kind;
      });
      const next = before ? before.nextSibling : this.body.firstChild;
      if (next !== row) this.body.insertBefore(row, next);
      before = row;
    }
  }
}

const percent = share => `${Math.round(share * 100)} %`;
const milliseconds = value => value === null ? "–" : value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0);

export function stageRows(stages) {
  return [...stages].map(([name, one]) => [name, [name, one.group, [one.ready, one.ready ? "" : "none"], one.waiting, one.running,
    one.rate.toFixed(1), milliseconds(one.queue_ms), milliseconds(one.run_ms), percent(one.busy)]]);
}
export const STAGES = [["Stage"], ["Process group"], ["Ready", "n"], ["Waiting", "n"], ["Running", "n"], ["Per s", "n"], ["Queue ms", "n"], ["Run ms", "n"], ["Busy", "n"]];
export const EDGES = [["From"], ["To"], ["Kind"], ["Transport"], ["Bytes/s", "n"], ["In flight", "n"]];
export const GROUPS = [["Process group"], ["Instances", "n"], ["Ready", "n"], ["Loading", "n"], ["Draining", "n"], ["Other", "n"], ["Waiting", "n"], ["Running", "n"], ["Unit revisions"]];
export const INSTANCES = [["Process group"], ["State"], ["Incarnation"], ["Unit revision"], ["Address"], ["Waiting", "n"], ["Running", "n"], ["Bound", "n"], ["Bound ever", "n"], ["Why it gets no requests"]];

// loading: the stages of an instance that report how far they are
const bytes = count => { for (const unit of ["B", "kB", "MB"]) { if (count < 1000) return `${count.toFixed(0)} ${unit}`; count /= 1000; } return `${count.toFixed(1)} GB`; };
const share = one => one.total > 0 ? Math.min(Math.max(one.done / one.total, 0), 1) : null;
const least = rows => rows.map(share).filter(one => one !== null).reduce((a, b) => a === null ? b : Math.min(a, b), null);
const behind = rows => least(rows) === null ? "" : ` ${Math.floor(100 * least(rows))} %`;
function inWords(one) {
  const amount = count => one.unit === "B" ? bytes(count) : String(count);
  return `${one.stage} has loaded ${amount(one.done)}${one.total > 0 ? ` of ${amount(one.total)}` : ""}`;
}

export function groupRows(groups, instances) {
  const found = new Map([...new Set(Object.values(groups || {}))].map(name => [name, []]));
  for (const one of instances) { if (!found.has(one.group)) found.set(one.group, []); found.get(one.group).push(one); }
  return [...found].map(([name, all]) => {
    const of = (...states) => all.filter(one => states.includes(one.state)).length, sum = field => all.reduce((a, one) => a + one[field], 0);
    return [name, [name, all.length, [of("ready"), of("ready") ? "ready" : "none"], `${of("loading")}${behind(all.flatMap(one => one.loading)).replace(/ (.+)/, " ($1)")}`, of("draining"), of("aside", "unused"),
      sum("waiting"), sum("running"), [...new Set(all.map(one => one.revision))].join(", ")]];
  });
}

// groups: process groups; a word that is the name of one means that one, and not others with it in their names
export function instanceRows(instances, wanted, most, groups) {
  const words = wanted.toLowerCase().split(/\s+/).filter(Boolean), names = new Set(groups.map(name => name.toLowerCase()));
  const found = instances.filter(one => {
    const text = `${one.group} ${one.state} ${one.revision} ${one.endpoint} ${one.incarnation}`.toLowerCase();
    return words.every(word => names.has(word) ? one.group.toLowerCase() === word : text.includes(word));
  }).sort((a, b) => (a.state === "ready") - (b.state === "ready") || a.group.localeCompare(b.group) || a.incarnation.localeCompare(b.incarnation));
  return [found.length, found.slice(0, most).map(one => [one.incarnation, [one.group, [one.state + behind(one.loading), one.state], one.incarnation, one.revision, one.endpoint,
    one.waiting, one.running, one.bound, one.bound_total, one.reason || one.loading.map(inWords).join(", ")]])];
}

// A list of requests as buttons; each has its stages' times as a bar.
export class Requests {
  constructor(place, chosen) { this.place = place; this.chosen = chosen; this.rows = new Map(); this.picked = null; }

  show(requests, now, colour) {
    const wanted = new Set(requests.map(one => one.id));
    for (const [key, row] of this.rows) if (!wanted.has(key)) { row.button.remove(); this.rows.delete(key); }
    const over = requests.filter(one => one.total_ms !== null), longest = (over.length ? over : requests).reduce((most, one) => Math.max(most, took(one, now)), 0.001);
    let before = null;
    for (const one of requests) {
      const row = this.rows.get(one.id) || this.add(one.id), ms = took(one, now);
      said(row.id, one.id); said(row.kind, one.kind);
      said(row.state, one.state + (one.attempt > 1 ? ` (${one.attempt}.)` : "")); row.state.className = one.state;
      said(row.took, ms >= 1000 ? `${(ms / 1000).toFixed(2)} s` : `${ms.toFixed(ms < 10 ? 2 : 0)} ms`);
      said(row.why, one.error ? `${one.error.code}${one.error.stage ? ` in ${one.error.stage}` : ""}: ${one.error.message}` : "");
      row.why.hidden = !one.error;
      row.button.setAttribute("aria-pressed", String(this.picked === one.id));
      const drawn = JSON.stringify([one.bars, one.state === "running" ? ms : one.total_ms, longest]);
      if (drawn !== row.drawn) { row.drawn = drawn; bars(row.svg, one, ms, longest, colour); }
      const next = before ? before.nextSibling : this.place.firstChild;
      if (next !== row.button) this.place.insertBefore(row.button, next);
      before = row.button;
    }
  }

  add(id) {
    const button = document.createElement("button"), row = {button, drawn: ""};
    button.type = "button"; button.className = "row"; button.onclick = () => this.chosen(id);
    row.id = element(button, "span"); row.kind = element(button, "span", {class: "kind soft"}); row.state = element(button, "span");
    row.took = element(button, "span", {class: "n"});
    row.svg = button.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "svg"));
    row.svg.setAttribute("preserveAspectRatio", "none"); row.svg.setAttribute("viewBox", "0 0 1000 12"); row.svg.setAttribute("aria-hidden", "true");
    row.why = element(button, "span", {class: "why"});
    this.rows.set(id, row);
    return row;
  }
}

export const took = (one, now) => one.total_ms !== null ? one.total_ms : Math.max((now - one.admitted_at) * 1000, 0);

function bars(svg, one, ms, longest, colour) {
  svg.textContent = "";
  element(svg, "rect", {x: 0, y: 4, width: Math.min(1000 * ms / longest, 1000), height: 4, fill: "currentColor", opacity: 0.2});
  for (const [stage, start, end] of one.bars)
    element(svg, "rect", {x: 1000 * Math.max(start, 0) / longest, y: 1, width: Math.max(1000 * (end - start) / longest, 2), height: 10, fill: colour(stage), opacity: 0.8});
}
