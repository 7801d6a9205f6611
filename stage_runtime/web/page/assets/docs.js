// `/openapi.json` for people: each route with what it takes and what it answers, without a script of another host.

import {$, element} from "./drawing.js";
import {Unauthorised, forgetKey, json, keepKey, mustAsk, said, takeKeyOfAddress} from "./stream.js";

let all = null;

function named(schema) {
  if (!schema) return "";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return [...new Set(schema.anyOf.map(named))].filter(Boolean).join(" | ");
  if (schema.type === "array") return `${named(schema.items) || "any"}[]`;
  if (schema.enum) return schema.enum.map(one => JSON.stringify(one)).join(" | ");
  if ("const" in schema) return JSON.stringify(schema.const);
  return Array.isArray(schema.type) ? schema.type.join(" | ") : schema.type || "any";
}

function body(place, schema) {
  const type = schema && schema.$ref ? all.components.schemas[schema.$ref.split("/").pop()] : schema;
  if (!type || !type.properties) return;
  const table = element(element(place, "div", {class: "wide"}), "table");
  for (const [name, one] of Object.entries(type.properties)) {
    const row = element(table, "tr");
    element(row, "td", {}, name + ((type.required || []).includes(name) ? "" : "?"));
    element(row, "td", {class: "soft"}, named(one));
    element(row, "td", {class: "soft"}, "default" in one ? JSON.stringify(one.default) : "");
  }
}

function show() {
  const wanted = $("filter").value.trim().toLowerCase(), place = $("routes");
  place.textContent = "";
  for (const [path, methods] of Object.entries(all.paths)) for (const [method, route] of Object.entries(methods)) {
    if (!`${path} ${method} ${route.summary}`.toLowerCase().includes(wanted)) continue;
    element(place, "dt", {}, `${method.toUpperCase()} ${path}`);
    const shown = element(place, "dd");
    element(shown, "p", {}, route.summary + (route.security && !route.security.length ? " (without a key)" : ""));
    for (const [media, {schema}] of Object.entries(route.requestBody ? route.requestBody.content : {})) {
      const details = element(shown, "details");
      element(details, "summary", {}, `takes ${media}: ${named(schema)}`);
      body(details, schema);
    }
    for (const [status, {content}] of Object.entries(route.responses)) for (const [media, {schema}] of Object.entries(content || {})) {
      if (status === "default") continue;
      const details = element(shown, "details");
      element(details, "summary", {}, `${status} ${media}: ${named(schema)}`);
      body(details, schema);
    }
  }
}

async function open() {
  try {
    all = await json("/openapi.json");
    $("main").hidden = false; $("login").hidden = true;
    said($("name"), `Routes of ${all.info.title}`);
    show();
    document.body.dataset.ready = "yes";
  } catch (error) {
    if (error instanceof Unauthorised) { lock(error.message); return; }
    $("main").hidden = false; $("login").hidden = true;
    said($("routes"), error.message);
  }
}

function lock(why) {
  forgetKey();
  $("routes").textContent = ""; $("main").hidden = true; $("login").hidden = false;
  said($("login-why"), why || "This pipeline is behind an API key. It stays in this tab.");
  $("key").focus();
}

$("filter").oninput = show;
$("login").onsubmit = event => { event.preventDefault(); keepKey($("key").value.trim()); $("key").value = ""; open(); };
window.onhashchange = () => { if (takeKeyOfAddress()) open(); };
takeKeyOfAddress();
if (mustAsk()) lock(""); else open();
