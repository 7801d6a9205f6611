// Profiles: start, stop, and the files of runs, by the profiler's routes.

import {element} from "./drawing.js";
import {Unauthorised, ask, json, reason, said} from "./stream.js";

const FORMS = [["report.html", "report?format=html", "Report"], ["perfetto.json", "report?format=perfetto", "Perfetto"], ["report.txt", "report?format=table", "Table"], ["files.tar", "", "All files"]];

export class Profiles {
  constructor(place, locked) {
    place.textContent = "";
    element(place, "p", {class: "soft"}, "Events of requests, of all processes; with torch a trace of its operations, too. A run ends by itself after a minute, unless it is stopped before.");
    const row = element(place, "div", {class: "fields"}), torch = element(element(row, "label"), "input", {type: "checkbox"});
    torch.after(" torch");
    const start = element(row, "button", {type: "button"}, "Start"), stop = element(row, "button", {type: "button"}, "Stop");
    this.note = element(row, "span", {class: "soft", role: "status"}); this.wrong = element(place, "p", {class: "error", role: "alert"});
    this.runs = element(element(place, "div", {class: "wide"}), "table"); this.locked = locked;
    start.onclick = () => this.do(start, async () => {
      const path = torch.checked ? "/start_profile" : "/start_request_profile";
      const answer = await this.post(path, {max_seconds: 60});
      said(this.note, `run ${answer.run_id} records`);
    });
    stop.onclick = () => this.do(stop, async () => { const answer = await this.post("/stop_profile", {}); said(this.note, `run ${answer.run_id} has ended`); });
    this.do(start, async () => {});
  }

  post(path, body) { return json(path, {method: "POST", body: JSON.stringify(body), headers: {"content-type": "application/json"}}); }

  async do(pressed, work) {
    pressed.disabled = true; said(this.wrong, "");
    try { await work(); await this.list(); } catch (error) {
      if (error instanceof Unauthorised) this.locked(error); else said(this.wrong, error.message);
    } finally { pressed.disabled = false; }
  }

  async list() {
    const {runs} = await json("/profiles");
    this.runs.textContent = "";
    for (const run of runs.slice(0, 20)) {
      const row = element(this.runs, "tr");
      element(row, "td", {}, run.run_id);
      element(row, "td", {class: "soft"}, Object.entries(run).filter(([key, value]) => key !== "run_id" && typeof value !== "object").map(([key, value]) => `${key} ${value}`).join(", "));
      const cell = element(row, "td");
      for (const [name, path, word] of FORMS) {
        const fetched = element(cell, "button", {type: "button", "aria-label": `${word} of ${run.run_id}`}, word);
        fetched.onclick = () => this.do(fetched, () => this.save(run.run_id, path, `${run.run_id}-${name}`));
        cell.append(" ");
      }
    }
  }

  // A link cannot send the key, so the file is fetched first.
  async save(run, path, name) {
    const answer = await ask(`/profiles/${encodeURIComponent(run)}${path && `/${path}`}`);
    if (!answer.ok) throw new Error(await reason(answer));
    const link = document.createElement("a");
    link.href = URL.createObjectURL(await answer.blob()); link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }
}
