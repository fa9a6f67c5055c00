// The settings form, and the request that they and a conversation make.

const TEXT_MAX_TOKENS = 256;
const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed", "n"];

const element = (id) => document.getElementById(id);

export class Settings {
  #form = element("settings");
  #maxModelLen = Infinity;

  constructor() {
    this.#form.addEventListener("submit", (event) => event.preventDefault());
    this.#form.addEventListener("input", () => this.#show());
    this.#show();
  }

  /** Takes what the server says about its model: its longest context, and whether it can chat. */
  useModel({ max_model_len: maxModelLen, can_chat: canChat }) {
    this.#maxModelLen = maxModelLen;
    const { max_tokens: maxTokens, mode } = this.#form.elements;
    maxTokens.max = maxModelLen;
    mode.options[0].disabled = !canChat; // without a template there is no chat
    if (!canChat) mode.value = "text";
    this.#show();
  }

  /** Whether the form can be sent; if not, the field at fault is shown. */
  check() {
    if (this.#form.checkValidity()) return true;
    this.#form.closest("details").open = true;
    return this.#form.reportValidity();
  }

  /** The path and body that ask for an answer to the last of `turns`. */
  request(turns) {
    const isChat = this.#isChat;
    const body = { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
    for (const name of NUMBERS) {
      const value = this.#form.elements[name].value;
      if (value !== "") body[name] = name === "seed" ? exactInteger(value) : Number(value);
    }
    if (!isChat) {
      body.prompt = turns.at(-1).text;
      body.max_tokens ??= Math.min(TEXT_MAX_TOKENS, this.#maxModelLen);
      return { path: "v1/completions", body };
    }
    const system = this.#form.elements.system.value;
    body.messages = turns.map(({ role, text, view }) => ({ role, content: text ?? view.text }));
    if (system.trim()) body.messages.unshift({ role: "system", content: system });
    return { path: "v1/chat/completions", body };
  }

  get #isChat() {
    return this.#form.elements.mode.value === "chat";
  }

  #show() {
    const isChat = this.#isChat;
    for (const part of this.#form.querySelectorAll("[data-only=chat]")) part.hidden = !isChat;
    element("prompt").placeholder = isChat ? "Message" : "Text to continue";
    const set = NUMBERS.filter((name) => this.#form.elements[name].value !== "");
    const shown = set.map((name) => `${name} ${this.#form.elements[name].value}`);
    if (!isChat) shown.unshift("text");
    element("settings-note").textContent = shown.join(", ");
  }
}

/** Beyond 2^53 a number would silently become another seed: it goes as text, which the server refuses by name. */
function exactInteger(value) {
  const number = Number(value);
  return Number.isSafeInteger(number) ? number : value;
}
