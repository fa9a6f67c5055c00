// The engine's side of the page: follows /live and shows what it says.

import { ApiError, events, send } from "./api.js";
import { BlockMap } from "./block_map.js";
import { Sparkline } from "./sparkline.js";

const RATE_WINDOW_S = 1;
const STALE_AFTER_MS = 3000;
const GIVE_UP_AFTER_MS = 20000;
const RETRY_MS = 1500;
const LABEL_EVERY_MS = 5000;

const element = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en");

export class LiveView {
  #map = new BlockMap(element("map"), element("map-note"));
  #line = new Sparkline(element("rate-line"));
  #rows = new Map();
  #history = [];
  #lastEventMs = 0;
  #labelledMs = 0;
  #wake = () => {};
  #abort = null;
  #onModel;
  #onKeyNeeded;
  #needsKey = false;

  /** `onModel` learns what the model is; `onKeyNeeded` is called when the server wants a key: `retry` then goes on. */
  constructor({ onModel, onKeyNeeded }) {
    this.#onModel = onModel;
    this.#onKeyNeeded = onKeyNeeded;
    // Who does not look costs the engine nothing.
    document.addEventListener("visibilitychange", () => (document.hidden ? this.#abort?.abort() : this.#wake()));
    element("reset").addEventListener("click", () => this.#resetCache());
    setInterval(() => this.#watchdog(), 1000);
    this.#run();
  }

  /** Connects at once instead of after a while. */
  retry() {
    this.#needsKey = false;
    this.#wake();
  }

  async #run() {
    for (;;) {
      while (document.hidden || this.#needsKey) await this.#pause();
      await this.#follow();
      await this.#pause(RETRY_MS);
    }
  }

  /** Waits for `retry`, for the page to be looked at, or for the time to pass. */
  #pause(milliseconds) {
    return new Promise((resolve) => {
      this.#wake = resolve;
      if (milliseconds !== undefined) setTimeout(resolve, milliseconds);
    });
  }

  async #follow() {
    this.#abort = new AbortController();
    this.#history = [];
    this.#lastEventMs = performance.now();
    try {
      for await (const event of events("live", { signal: this.#abort.signal })) {
        this.#lastEventMs = performance.now();
        this.#show(event);
      }
      setStatus("lost", "the server has ended");
    } catch (error) {
      if (document.hidden) return;
      if (!(error instanceof ApiError)) setStatus("lost", "no connection");
      else if (error.status === 401) this.#askForKey();
      else setStatus("dead", error.message);
    } finally {
      this.#abort = null;
    }
  }

  #askForKey() {
    setStatus("lost", "API key needed");
    this.#needsKey = true;
    this.#onKeyNeeded();
  }

  /** A step may take seconds, and a connection may die without a word. */
  #watchdog() {
    const silence = performance.now() - this.#lastEventMs;
    if (!this.#abort || silence < STALE_AFTER_MS) return;
    setStatus("busy", "no news for a while"); // without a count: a screen reader says it each time it changes
    if (silence > GIVE_UP_AFTER_MS) this.#abort.abort();
  }

  async #resetCache() {
    try {
      await send("reset_prefix_cache", { method: "POST" });
    } catch (error) {
      if (error.status === 401) this.#askForKey();
      else setStatus("lost", error instanceof ApiError ? error.message : "no connection");
    }
  }

  #show(event) {
    setStatus(event.is_draining ? "busy" : "live", event.is_draining ? "shutting down" : "live");
    setText("model", event.model.name);
    this.#onModel(event.model);
    const { blocks, totals } = event;
    const inUse = blocks.used + blocks.shared;
    this.#showRate(event);
    setText("num-running", number.format(event.num_running));
    setText("max-running", `of ${number.format(event.max_num_seqs)}`);
    setText("num-waiting", number.format(event.num_waiting));
    setText("in-use", percent(inUse, blocks.usable));
    setText("hit-rate", totals.prefix_queried_tokens ? percent(totals.prefix_hit_tokens, totals.prefix_queried_tokens) : "–");
    for (const state of ["free", "cached", "used", "shared"]) setText(`count-${state}`, number.format(blocks[state]));
    const shown = [...event.running, ...event.waiting];
    this.#map.update(event.map, event.block_size, shown);
    this.#labelMap(inUse, blocks);
    this.#showRequests(shown, event.num_running + event.num_waiting);
    this.#showTotals(event);
  }

  #showRate({ time, totals }) {
    this.#history.push({ time, tokens: totals.generated_tokens });
    while (this.#history.length > 2 && time - this.#history[1].time >= RATE_WINDOW_S) this.#history.shift();
    const [first] = this.#history;
    if (time <= first.time) return;
    const rate = (totals.generated_tokens - first.tokens) / (time - first.time);
    setText("rate", rate >= 100 ? number.format(Math.round(rate)) : rate.toFixed(1));
    this.#line.add(rate);
  }

  /** In words for a screen reader, at a pace at which one can listen. */
  #labelMap(inUse, { usable, cached, shared }) {
    const now = performance.now();
    if (this.#labelledMs && now - this.#labelledMs < LABEL_EVERY_MS) return;
    this.#labelledMs = now;
    const label = `Map of ${usable} KV blocks: ${inUse} in use, ${shared} of them shared, ${cached} cached for reuse`;
    element("map").setAttribute("aria-label", label);
  }

  #showRequests(requests, total) {
    const body = element("requests");
    const ids = new Set(requests.map((each) => each.id));
    for (const [id, row] of this.#rows) {
      if (ids.has(id)) continue;
      row.remove();
      this.#rows.delete(id);
    }
    for (const [place, request] of requests.entries()) {
      const row = this.#rows.get(request.id) ?? this.#newRow(request.id);
      // Moving a row that is in its place would take the focus from it.
      if (body.children[place] !== row) body.insertBefore(row, body.children[place] ?? null);
      fillRow(row, request);
    }
    const hidden = total - requests.length;
    const note = hidden > 0 ? `and ${number.format(hidden)} more` : "Nothing runs.";
    setText("requests-note", note);
    element("requests-note").hidden = hidden <= 0 && requests.length > 0;
  }

  #newRow(id) {
    const row = element("request-template").content.firstElementChild.cloneNode(true);
    const button = row.querySelector("button");
    button.textContent = id;
    button.title = "Outlines its blocks in the map";
    for (const type of ["pointerenter", "focusin", "click"]) row.addEventListener(type, () => this.#map.highlight(id));
    for (const type of ["pointerleave", "focusout"]) row.addEventListener(type, () => this.#map.highlight(null));
    this.#rows.set(id, row);
    return row;
  }

  #showTotals({ totals, host_blocks: host }) {
    const preemptions = totals.swap_preemptions + totals.recompute_preemptions;
    const parts = [
      `${number.format(totals.finished)} finished`,
      `${number.format(totals.prompt_tokens)} prompt and ${number.format(totals.generated_tokens)} generated tokens`,
      `${number.format(totals.copied_blocks)} copies on write`,
      `${number.format(preemptions)} preemptions`,
    ];
    setText("totals", `Since the start: ${parts.join(", ")}.`);
    element("host").hidden = host.used === 0 && totals.swap_preemptions === 0;
    setText("host", `In host memory: ${number.format(host.used)} of ${number.format(host.total)} blocks, swapped out.`);
  }
}

function fillRow(row, request) {
  const done = request.computed_tokens < request.prompt_tokens ? `${request.computed_tokens}/` : "";
  const texts = {
    state: request.state,
    prompt: `${done}${request.prompt_tokens}`,
    output: `${request.output_tokens}`,
    blocks: `${request.num_blocks}`,
    age: `${request.age.toFixed(request.age < 10 ? 1 : 0)} s`,
  };
  for (const [name, text] of Object.entries(texts)) {
    const cell = row.querySelector(`.${name}`);
    if (cell.textContent !== text) cell.textContent = text;
  }
  row.dataset.state = request.state;
  row.title = request.cached_tokens ? `${request.cached_tokens} prompt tokens came from the cache` : "";
}

function setStatus(state, text) {
  element("status").dataset.state = state;
  setText("status", text);
}

function setText(id, text) {
  const target = element(id);
  if (target.textContent !== text) target.textContent = text;
}

function percent(part, whole) {
  const value = whole ? (100 * part) / whole : 0;
  return `${value > 0 && value < 9.95 ? value.toFixed(1) : Math.round(value)} %`;
}
