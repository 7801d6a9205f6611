// The graph of stages: placed when it changes, its numbers written each second. It goes from left to right where that
// fits, else from top to bottom, in as many columns as there is room for.

import {cut, element} from "./drawing.js";
import {said} from "./stream.js";

const COORDINATOR = "coordinator";
const LABEL = 104;  // pixels that a transport's name and rate may take

// layers: stages by the longest way from the entry, each in the order of its sources
function layersOf(stages, edges) {
  const depth = new Map(stages.map(stage => [stage, 0]));
  for (let round = 0; round < stages.length; round++) {
    let moved = false;
    for (const [source, target] of edges) {
      if (!depth.has(source) || !depth.has(target) || depth.get(target) > depth.get(source)) continue;
      if (depth.get(source) + 1 >= stages.length) continue;
      depth.set(target, depth.get(source) + 1);
      moved = true;
    }
    if (!moved) break;
  }
  const layers = [];
  for (const stage of stages) (layers[depth.get(stage)] ||= []).push(stage);
  const places = new Map();
  return layers.filter(Boolean).map(layer => {
    const weight = stage => {
      const before = edges.filter(edge => edge[1] === stage && places.has(edge[0])).map(edge => places.get(edge[0]));
      return before.length ? before.reduce((a, b) => a + b, 0) / before.length : 0;
    };
    const sorted = layer.map(stage => [weight(stage), stage]).sort((a, b) => a[0] - b[0]).map(each => each[1]);
    sorted.forEach((stage, place) => places.set(stage, place - (sorted.length - 1) / 2));
    return sorted;
  });
}

// stage → {x, y}, the picture's size, and how edges go
function placed(layers, room, box) {
  const widest = Math.max(...layers.map(layer => layer.length)), pad = 16, at = new Map();
  const across = box.wide + 118, spread = box.high + 22;
  if (pad * 2 + across * layers.length - 118 <= room) {
    const height = pad * 2 + spread * widest - 22;
    layers.forEach((layer, depth) => layer.forEach((stage, place) =>
      at.set(stage, {x: pad + depth * across, y: height / 2 + (place - (layer.length - 1) / 2) * spread - box.high / 2, column: 0})));
    return {at, width: pad * 2 + across * layers.length - 118, height, flat: true};
  }
  const down = box.high + 36, side = box.wide + 20, limit = Math.max(4, Math.ceil(layers.length / Math.max(1, Math.floor(room / (widest * side + 60)))));
  const most = layers.length * down <= 760 ? layers.length : Math.max(limit, Math.floor(760 / down));
  let left = pad, height = 0;
  for (let first = 0, column = 0; first < layers.length; first += most, column++) {
    const part = layers.slice(first, first + most), wide = Math.max(...part.map(layer => layer.length)) * side - 20;
    part.forEach((layer, row) => layer.forEach((stage, place) =>
      at.set(stage, {x: left + wide / 2 + (place - (layer.length - 1) / 2) * side - box.wide / 2, y: pad + row * down, column})));
    left += wide + 64;
    height = Math.max(height, pad * 2 + part.length * down - 28);
  }
  return {at, width: left - 64 + pad, height, flat: false};
}

// share: how far from the source the label is: near the end that the edge shares with no other
function way(from, to, box, flat, share) {
  if (flat) {
    const x = from.x + box.wide, y = from.y + box.high / 2, x2 = to.x - 6, y2 = to.y + box.high / 2, bend = Math.max((x2 - x) / 2, 20);
    return {path: `M${x} ${y}C${x + bend} ${y} ${x2 - bend} ${y2} ${x2} ${y2}`, tip: `M${x2} ${y2 - 4}l7 4l-7 4z`, label: [(x + x2) / 2, y + (y2 - y) * share - 5]};
  }
  const x = from.x + box.wide / 2, y = from.y + box.high, x2 = to.x + box.wide / 2, y2 = to.y - 6, tip = `M${x2 - 4} ${y2}l4 7l4 -7z`;
  if (from.column !== to.column) {
    const aisle = to.x - 26;
    return {path: `M${x} ${y}v12H${aisle}V${y2 - 8}H${x2}V${y2}`, tip, label: [(x + aisle) / 2, y + 15]};
  }
  const steps = y2 - y, bend = Math.max(steps / 2, 12);
  if (steps > box.high + 60 && Math.abs(x - x2) < box.wide / 2) {  // past the stages between
    const beside = from.x + box.wide + 8, into = to.x + box.wide;
    return {path: `M${from.x + box.wide} ${y - 12}C${beside + 26} ${y - 12} ${beside + 26} ${to.y + 12} ${into + 6} ${to.y + 12}`,
      tip: `M${into + 7} ${to.y + 8}l-7 4l7 4z`, label: [beside + 16, (y + to.y) / 2]};
  }
  return {path: `M${x} ${y}C${x} ${y + bend} ${x2} ${y2 - bend} ${x2} ${y2}`, tip, label: [x + (x2 - x) * share, (y + y2) / 2 + 4]};
}

// Both ends of an edge, moved aside: edges of one pair (payload, stream, KV blocks) run beside each other.
const beside = (ends, steps, flat) => ends.map(end => flat ? {...end, y: end.y + 14 * steps} : {...end, x: end.x + 24 * steps});

// Whether a label at this place covers nothing; then the place is taken.
function fits([x, y], taken) {
  const own = {x: x - LABEL / 2, y: y - 10, wide: LABEL, high: 12};
  if (taken.some(one => own.x < one.x + one.wide && one.x < own.x + own.wide && own.y < one.y + one.high && one.y < own.y + own.high)) return false;
  taken.push(own);
  return true;
}

const number = value => value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2).replace(/\.?0+$/, "") || "0";
export const perSecond = value => number(value) + "/s";
export function bytes(value) {
  for (const unit of ["B", "KB", "MB", "GB"]) { if (value < 1000 || unit === "GB") return `${number(value)} ${unit}`; value /= 1000; }
}

export class Graph {
  // chosen: called with the name of a stage
  constructor(svg, chosen) {
    this.svg = svg; this.chosen = chosen; this.known = ""; this.nodes = new Map(); this.labels = new Map();
  }

  place(facts) {
    const room = Math.max(this.svg.parentNode.clientWidth - 4, 280), known = JSON.stringify([facts.groups, facts.edges, facts.entry, facts.terminals, room]);
    if (known === this.known) return;
    this.known = known;
    const stages = Object.keys(facts.groups || {}), many = stages.length > 14;
    const box = many ? {wide: 150, high: 38} : {wide: 172, high: 62};
    const edges = [...(facts.entry ? [[COORDINATOR, facts.entry, "normal"]] : []), ...facts.edges];
    const layers = layersOf([COORDINATOR, ...stages], edges), {at, width, height, flat} = placed(layers, room, box), svg = this.svg;
    svg.textContent = ""; this.nodes.clear(); this.labels.clear();
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("width", width); svg.setAttribute("height", height);
    const texts = [], taken = [...at.values()].map(({x, y}) => ({x, y, wide: box.wide, high: box.high}));
    for (const [source, target, kind] of edges) {
      if (!at.has(source) || !at.has(target)) continue;
      const out = edges.filter(edge => edge[0] === source).length, into = edges.filter(edge => edge[1] === target).length;
      const shares = out > 1 && into <= 1 ? [0.95, 0.6] : into > 1 && out <= 1 ? [0.05, 0.4] : [0.5, 0.2, 0.8];
      const twins = edges.filter(edge => edge[0] === source && edge[1] === target).map(edge => edge[2]);
      const [from, to] = beside([at.get(source), at.get(target)], twins.indexOf(kind) - (twins.length - 1) / 2, flat);
      const drawn = way(from, to, box, flat, shares[0]), group = element(svg, "g"), title = element(group, "title");
      element(group, "path", {d: drawn.path, class: `edge ${kind === "normal" ? "" : kind}`});
      element(group, "path", {d: drawn.tip, class: "tip"});
      const free = shares.map(share => way(from, to, box, flat, share).label).find(label => fits(label, taken));
      texts.push([`${source}\n${target}\n${kind}`, title, free]);
    }
    for (const [stage, place] of at) this.node(stage, place, box, many, facts);
    for (const [key, title, free] of texts)
      this.labels.set(key, {title, label: free ? element(svg, "text", {x: free[0], y: free[1], "text-anchor": "middle", class: "dim label"}) : null});
  }

  node(stage, {x, y}, box, many, facts) {
    const own = stage === COORDINATOR && !(stage in (facts.groups || {}));
    const group = element(this.svg, "g", own ? {class: "node"} : {class: "node", tabindex: 0, role: "button"});
    const title = element(group, "title");
    element(group, "rect", {x, y, width: box.wide, height: box.high, rx: 7, class: "box"});
    const ends = (facts.terminals || []).includes(stage) ? " ▸" : "";
    element(group, "text", {x: x + 8, y: y + 15, class: "title"}, cut(stage, many ? 21 : 24) + ends);
    const first = element(group, "text", {x: x + 8, y: y + (many ? 29 : 31), class: "state"});
    const second = many ? null : element(group, "text", {x: x + 8, y: y + 45, class: "dim"});
    if (!own) element(group, "rect", {x: x + 8, y: y + box.high - (many ? 6 : 11), width: box.wide - 16, height: many ? 3 : 5, rx: 2, class: "track"});
    const busy = own ? null : element(group, "rect", {x: x + 8, y: y + box.high - (many ? 6 : 11), width: 0, height: many ? 3 : 5, rx: 2, class: "busy"});
    if (!own) {
      group.onclick = () => this.chosen(stage);
      group.onkeydown = event => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); this.chosen(stage); } };
    }
    this.nodes.set(stage, {group, title, first, second, busy, wide: box.wide - 16});
  }

  // stages: name → {rate, waiting, running, busy, ready}; edges: "source\ntarget\nkind" → {name, rate}; total: {rate, in_flight}
  update(stages, edges, total) {
    for (const [name, node] of this.nodes) {
      const stage = stages.get(name);
      if (!stage) { said(node.first, `${perSecond(total.rate)} · ${total.in_flight} in flight`); said(node.title, "the coordinator: clients ask here"); continue; }
      const queue = `${stage.waiting} wait · ${stage.running} run`, none = stage.ready === 0;
      if (node.second) { said(node.first, none ? "no ready instance" : `${perSecond(stage.rate)} · ${stage.ready} ready`); said(node.second, queue); }
      else said(node.first, none ? "no ready instance" : `${perSecond(stage.rate)} · ${queue}`);
      node.group.setAttribute("class", none ? "node none" : "node");
      node.busy.setAttribute("width", node.wide * Math.min(Math.max(stage.busy, 0), 1));
      const text = `${name}: ${perSecond(stage.rate)}, ${queue}, busy ${Math.round(stage.busy * 100)} %, ${stage.ready} ready, process group ${stage.group}`;
      said(node.title, text);
      if (node.group.getAttribute("aria-label") !== text) node.group.setAttribute("aria-label", text);
    }
    for (const [key, {label, title}] of this.labels) {
      const edge = edges.get(key);
      if (label) said(label, edge ? (edge.rate > 0 ? `${edge.name} ${bytes(edge.rate)}/s` : edge.name) : "");
      said(title, edge ? edge.title : "");
    }
  }
}
