// Drawing of requests as waterfalls. The page of a profile has it inside, the coordinator's page loads it.
// Nothing here makes markup of a text: names and messages become text nodes and attributes.

export const $ = id => document.getElementById(id);
export const ms = value => value >= 1000 ? (value / 1000).toFixed(2) + " s" : value.toFixed(value < 10 ? 2 : 1) + " ms";

export function element(parent, name, attributes, text) {
  const made = parent.namespaceURI === "http://www.w3.org/2000/svg"
    ? document.createElementNS(parent.namespaceURI, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent.appendChild(made);
  return made;
}

const palette = ["#3b7dd8", "#e07b39", "#3aa675", "#a05cc5", "#d24d57", "#1f9bb3", "#b59c1c", "#7a6a5c", "#d864a9", "#5b6cc9"];
// stages: in the order that chooses their colours
export function colours(stages) {
  const places = new Map(stages.filter(stage => stage !== "coordinator").map((stage, place) => [stage, place]));
  return stage => stage === "coordinator" ? "#8a94a3" : palette[(places.get(stage) || 0) % palette.length];
}

export const wide = svg => Math.max(svg.clientWidth, 280);  // one unit is one pixel: letters keep their size on any screen

export function axis(svg, left, width, height, total, unit) {
  const steps = width < 350 ? 2 : 5;
  for (let i = 0; i <= steps; i++) {
    const x = left + width * i / steps;
    element(svg, "line", {x1: x, x2: x, y1: 18, y2: height, class: "axis"});
    element(svg, "text", {x: x, y: 12, "text-anchor": i === steps ? "end" : "middle", class: "dim"}, unit(total * i / steps));
  }
}

const LETTER = 6.2;  // pixels of one, at most nearly
// Room for names at the left of a picture: its pixels, with 8 on both sides, and the letters that fit.
export function names(texts, total) {
  const longest = texts.reduce((most, text) => Math.max(most, text.length), 12), left = Math.min(16 + LETTER * longest, total * 0.4);
  return {left, letters: Math.floor((left - 16) / LETTER)};
}
// By characters: half of a surrogate pair is none.
export const cut = (text, most) => text.length > most ? [...text].slice(0, most - 1).join("") + "…" : text;

const looks = {queue: {height: 11, opacity: 0.35}, function: {height: 11, opacity: 0.95}, hop: {height: 5, opacity: 0.55}};

// rows: {label, stage, start, end, parts: [[part, took]]}; count: rows with those that are not given;
// first, duration: of the request, in milliseconds; colour: of a stage
export function drawWaterfall(svg, {rows, count, first, duration, colour}) {
  svg.textContent = "";
  const total = wide(svg), numbers = 66, {left, letters} = names(rows.map(row => row.label), total), width = total - left - numbers, high = 18;
  const from = Math.min(first, ...rows.slice(0, 1).map(row => row.start));
  const span = Math.max(duration - from, 0.001), height = 24 + high * (rows.length + 1);
  const place = t => left + width * Math.min(Math.max((t - from) / span, 0), 1);
  svg.setAttribute("viewBox", `0 0 ${total} ${height}`);
  axis(svg, left, width, height, span, t => ms(t + from));
  rows.forEach((row, index) => {
    const y = 24 + index * high, group = element(svg, "g"), label = row.label;
    element(group, "title", {}, `${label}\nfrom ${ms(row.start)} for ${ms(row.end - row.start)}`);
    element(group, "text", {x: 8, y: y + 11}, cut(label, letters));
    let at = row.start;
    for (const [part, took] of row.parts) {
      const look = looks[part], begin = place(at);
      at += took;
      if (took > 0 || row.parts.length === 1) element(group, "rect", {x: begin, y: y + (13 - look.height) / 2, height: look.height, rx: 2,
        width: Math.max(place(at) - begin, 1), fill: colour(row.stage), opacity: look.opacity});
    }
    element(group, "text", {x: total - 6, y: y + 11, "text-anchor": "end", class: "dim"}, ms(row.end - row.start));
  });
  if (count > rows.length) element(svg, "text", {x: 8, y: height - 6, class: "dim"}, `${count - rows.length} more are not drawn`);
}
