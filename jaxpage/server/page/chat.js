// The conversation: sends it, streams the answers in, and can stop, repeat and forget. Model text is only ever text.

import { ApiError, events } from "./api.js";
import { MessageView } from "./message.js";

const element = (id) => document.getElementById(id);

export class Chat {
  #settings;
  #turns = [];
  #running = null;
  #onKeyNeeded;

  /** `settings` says how to ask; `onKeyNeeded` is called when the server wants a key. */
  constructor(settings, onKeyNeeded) {
    this.#settings = settings;
    this.#onKeyNeeded = onKeyNeeded;
    const prompt = element("prompt");
    prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      element("composer").requestSubmit();
    });
    element("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    element("stop").addEventListener("click", () => this.stop());
    element("clear").addEventListener("click", () => this.clear());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
    });
  }

  /** Ends the answer that is streaming, if one is. */
  stop() {
    this.#running?.abort();
  }

  /** Forgets the conversation. */
  clear() {
    this.stop();
    for (const turn of this.#turns) turn.view.remove();
    this.#turns = [];
    document.querySelectorAll("#transcript .error").forEach((error) => error.remove());
    this.#refresh();
    element("prompt").focus();
  }

  #submit() {
    const text = element("prompt").value;
    if (this.#running || !text.trim() || !this.#settings.check()) return;
    element("prompt").value = "";
    this.#turns.push({ role: "user", text, view: new MessageView("user", { text }) });
    this.#answer();
  }

  #regenerate() {
    if (this.#running || !this.#settings.check()) return;
    this.#turns.pop().view.remove();
    this.#answer();
  }

  async #answer() {
    document.querySelectorAll("#transcript .error").forEach((error) => error.remove());
    const asked = this.#turns.at(-1);
    const { path, body } = this.#settings.request(this.#turns);
    const view = new MessageView("assistant", { numSamples: body.n ?? 1, regenerate: () => this.#regenerate() });
    this.#turns.push({ role: "assistant", view });
    this.#running = new AbortController();
    this.#refresh();
    announce("The model is answering.");
    try {
      for await (const chunk of events(path, { method: "POST", body, signal: this.#running.signal })) view.take(chunk);
      view.end();
      announce(view.spoken());
    } catch (error) {
      const stopped = error.name === "AbortError";
      view.end(stopped ? "stopped" : "cut off");
      if (stopped) announce("Stopped.");
      else this.#fail(error, asked, view);
    } finally {
      this.#running = null;
      this.#refresh();
    }
  }

  /** Shows what went wrong. A question without any answer goes back to where it was written. */
  #fail(error, asked, view) {
    if (view.isEmpty) {
      this.#turns = this.#turns.filter((turn) => turn !== asked && turn.view !== view);
      view.remove();
      asked.view.remove();
      if (!element("prompt").value) element("prompt").value = asked.text;
    }
    if (error.status === 401) {
      this.#onKeyNeeded();
      return;
    }
    const message = document.createElement("p");
    message.className = "error";
    message.setAttribute("role", "alert");
    message.textContent = error instanceof ApiError ? error.message : "The server cannot be reached.";
    element("transcript").append(message);
    message.scrollIntoView({ block: "nearest" });
  }

  #refresh() {
    const isRunning = this.#running !== null;
    const hadFocus = [element("send"), element("stop")].includes(document.activeElement);
    element("send").hidden = isRunning;
    element("stop").hidden = !isRunning;
    if (hadFocus) element(isRunning ? "stop" : "prompt").focus(); // a hidden button loses it
    element("clear").disabled = this.#turns.length === 0;
    element("welcome").hidden = this.#turns.length > 0;
    this.#turns.forEach((turn, place) => turn.view.setLast(place === this.#turns.length - 1 && !isRunning));
  }
}

function announce(text) {
  element("announcer").textContent = text;
}
