// One message on the page: a question, or an answer of one or several samples that grows as its chunks arrive.

const COPIED_MS = 1500;
const MIN_PAINT_MS = 30;
const PAINT_SHARE = 0.2; // of the time, for laying out text that grows: a long answer is repainted less often
const EMPTY = { newAnswer: "", newReasoning: "", numTokens: 0, finishReason: null };
let numMessages = 0;

const template = (id) => document.getElementById(id).content.firstElementChild.cloneNode(true);

export class MessageView {
  #root = template("message-template");
  #samples = [];
  #usage = null;
  #startMs = performance.now();
  #firstMs = null;
  #timer = 0;
  #delayMs = 0;

  constructor(role, { text, numSamples = 1, regenerate } = {}) {
    const isAnswer = role === "assistant";
    this.#root.classList.add(role);
    this.#root.setAttribute("aria-busy", String(isAnswer));
    this.#root.querySelector(".who").textContent = isAnswer ? "Model" : "You";
    const name = `choice-${numMessages++}`;
    for (let index = 0; index < numSamples; index++) this.#addSample(name, index, numSamples);
    if (isAnswer) this.#action("regenerate").addEventListener("click", regenerate);
    else this.#samples[0].answer.data = text;
    this.#action("copy").hidden = !isAnswer || !navigator.clipboard;
    this.#action("copy").addEventListener("click", (event) => this.#copy(event.currentTarget));
    const scroller = document.getElementById("transcript");
    scroller.append(this.#root);
    scroller.scrollTop = scroller.scrollHeight;
  }

  /** The sample with which the conversation goes on. */
  get text() {
    return this.#chosen.answer.data;
  }

  get isEmpty() {
    return this.#samples.every((sample) => !sample.answer.data && !sample.reasoning.data);
  }

  get #chosen() {
    return this.#samples.find((sample) => sample.radio.checked) ?? this.#samples[0];
  }

  /** What a screen reader says once the answer is whole. */
  spoken() {
    return this.#samples.length === 1 ? this.text : `${this.#samples.length} answers have arrived.`;
  }

  remove() {
    this.#root.remove();
  }

  /** Only the last answer can be made anew. */
  setLast(isLast) {
    this.#action("regenerate").hidden = !isLast || !this.#root.classList.contains("assistant");
  }

  /** Takes a chunk of /v1/chat/completions or /v1/completions. */
  take(chunk) {
    if (chunk.usage) this.#usage = chunk.usage;
    for (const choice of chunk.choices) {
      const sample = this.#samples[choice.index];
      if (chunk.usage) sample.numTokens = chunk.usage.completion_tokens;
      const delta = choice.delta ?? { content: choice.text };
      const reasoning = delta.reasoning_content ?? delta.reasoning;
      if (delta.content || reasoning) this.#firstMs ??= performance.now();
      if (choice.finish_reason) sample.finishReason = choice.finish_reason;
      sample.newAnswer += delta.content ?? "";
      sample.newReasoning += reasoning ?? "";
    }
    this.#timer ||= setTimeout(() => this.#paint(), this.#delayMs);
  }

  /** Puts what has arrived since the last time on the page. */
  #paint() {
    clearTimeout(this.#timer);
    this.#timer = 0;
    const startMs = performance.now();
    keepingTheEndInView(() => {
      for (const sample of this.#samples) {
        sample.answer.appendData(sample.newAnswer);
        sample.reasoning.appendData(sample.newReasoning);
        if (sample.newReasoning) sample.root.querySelector(".reasoning").hidden = false;
        sample.newAnswer = sample.newReasoning = "";
      }
    });
    this.#delayMs = Math.max(MIN_PAINT_MS, (performance.now() - startMs) / PAINT_SHARE);
  }

  /** No more chunks come; `reason` replaces the finish reason of samples that have none. */
  end(reason) {
    this.#paint();
    this.#root.setAttribute("aria-busy", "false");
    const several = this.#samples.length > 1;
    keepingTheEndInView(() => {
      for (const [index, sample] of this.#samples.entries()) {
        sample.finishReason ??= reason ?? "cut off";
        sample.facts.textContent = `${tokens(sample.numTokens)}, ${sample.finishReason}`;
        sample.facts.hidden = !several;
        sample.root.querySelector(".choose").hidden = !several;
        sample.root.querySelector(".choose span").textContent = `Go on with sample ${index + 1}`;
      }
      this.#root.querySelector(".facts").textContent = this.#facts();
      this.#root.querySelector(".facts").hidden = false;
      this.#root.querySelector(".actions").hidden = false;
    });
  }

  #facts() {
    const total = this.#samples.reduce((sum, sample) => sum + sample.numTokens, 0);
    const facts = [tokens(total)];
    if (this.#firstMs !== null) {
      const seconds = (performance.now() - this.#firstMs) / 1000;
      facts.push(`first after ${Math.round(this.#firstMs - this.#startMs)} ms`);
      // The first token of each sample came at the beginning of that time.
      if (total > this.#samples.length) facts.push(`${((total - this.#samples.length) / seconds).toFixed(1)} tokens/s`);
    }
    const prompt = this.#usage?.prompt_tokens;
    if (prompt) facts.push(`${this.#usage.prompt_tokens_details?.cached_tokens ?? 0} of ${prompt} prompt tokens cached`);
    if (this.#samples.length === 1) facts.push(this.#samples[0].finishReason);
    return facts.join(" · ");
  }

  #addSample(name, index, numSamples) {
    const root = template("sample-template");
    const [reasoning, answer] = [...root.querySelectorAll(".text")].map((box) => {
      box.append(document.createTextNode(""));
      return box.firstChild;
    });
    const radio = root.querySelector("input");
    radio.name = name;
    radio.checked = index === 0;
    if (numSamples > 1) {
      root.setAttribute("role", "group");
      root.setAttribute("aria-label", `Sample ${index + 1}`);
    }
    const facts = root.querySelector(".sample-facts");
    this.#samples.push({ root, reasoning, answer, radio, facts, ...EMPTY });
    this.#root.querySelector(".samples").append(root);
  }

  async #copy(button) {
    try {
      await navigator.clipboard.writeText(this.text);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed";
    }
    setTimeout(() => (button.textContent = "Copy"), COPIED_MS);
  }

  #action(name) {
    return this.#root.querySelector(`[data-action=${name}]`);
  }
}

function tokens(count) {
  return `${count} token${count === 1 ? "" : "s"}`;
}

/** Scrolls along with new text, unless the reader has scrolled up. */
function keepingTheEndInView(change) {
  const scroller = document.getElementById("transcript");
  const isAtEnd = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 40;
  change();
  if (isAtEnd) scroller.scrollTop = scroller.scrollHeight;
}
