// The conversation: its messages are here, and their views follow them.
import { announce, element } from "./dom.js";
import { chatChunks, describeError, ServerError } from "./api.js";
import { Answer, fitHeight, sends, UserMessage } from "./message.js";

const EXAMPLES = [
  "What is 457 + 386?",
  "Sort: tree apple moon cat",
  "Write a story about a fox named Mia, the forest and a kite.",
];
const NEAR_END = 48; // pixels from the end within which new text keeps the end in view

const byId = (id) => document.getElementById(id);

/** `settings()` returns the system prompt and the request's parameters; `model()` the chosen model. */
export class Chat {
  constructor({ settings, model }) {
    Object.assign(this, { settings, model });
    this.messages = []; // {role, content, view}; answers have state, note and error too
    this.running = null; // the AbortController of the answer that is being written
    this.prompt = byId("prompt");
    this.scroller = byId("scroll");
    this.atEnd = true;
    this.listen();
    this.update();
  }

  listen() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("new-chat").addEventListener("click", () => this.clear());
    byId("latest").addEventListener("click", () => this.toEnd());
    this.prompt.addEventListener("input", () => fitHeight(this.prompt));
    this.prompt.addEventListener("keydown", (event) => this.key(event));
    this.scroller.addEventListener("scroll", () => this.scrolled(), { passive: true });
    byId("examples").replaceChildren(...EXAMPLES.map((text) =>
      element("li", {}, element("button", { type: "button", onclick: () => this.ask(text) }, text))));
  }

  key(event) {
    if (sends(event)) this.send();
    else if (event.key === "ArrowUp" && !this.prompt.value) this.lastOf("user")?.view.edit();
    else return;
    event.preventDefault();
  }

  send() {
    if (this.running || !this.prompt.value.trim()) return;
    const text = this.prompt.value;
    this.prompt.value = "";
    fitHeight(this.prompt);
    this.ask(text);
  }

  /** Add a question to the conversation, and have it answered. */
  ask(content) {
    const message = { role: "user", content };
    message.view = new UserMessage(message, { edited: (text) => this.resend(message, text) });
    this.add(message);
    return this.answer();
  }

  resend(message, text) {
    this.cutFrom(message);
    this.prompt.focus();
    return this.ask(text);
  }

  again(message) {
    this.cutFrom(message);
    this.prompt.focus();
    return this.answer();
  }

  /** Stop the answer that is being written; what there is of it stays. */
  stop() {
    this.running?.abort();
  }

  clear() {
    if (this.messages.length) this.cutFrom(this.messages[0]);
    this.prompt.focus();
  }

  lastOf(role) {
    return this.messages.findLast((message) => message.role === role);
  }

  add(message) {
    this.messages.push(message);
    byId("messages").append(message.view.node);
    this.update();
    this.toEnd();
  }

  cutFrom(message) {
    this.stop();
    for (const cut of this.messages.splice(this.messages.indexOf(message))) cut.view.node.remove();
    this.update();
  }

  update() {
    byId("welcome").hidden = this.messages.length > 0;
    byId("new-chat").disabled = this.messages.length === 0;
    // Focus follows from one button to the other, for one of them is hidden.
    const [shown, hidden] = this.running ? [byId("stop"), byId("send")] : [byId("send"), byId("stop")];
    const focused = document.activeElement === hidden;
    shown.hidden = false;
    hidden.hidden = true;
    if (focused) shown.focus();
  }

  async answer() {
    const { system, parameters } = this.settings();
    const history = this.messages.filter(({ content }) => content).map(({ role, content }) => ({ role, content }));
    if (system) history.unshift({ role: "system", content: system });
    const message = { role: "assistant", content: "", state: "streaming" };
    message.view = new Answer(message, { again: () => this.again(message) });
    this.add(message);

    const controller = (this.running = new AbortController());
    this.update();
    announce("Answering");
    const body = { model: this.model(), messages: history, ...parameters };
    try {
      message.note = await this.stream(message, chatChunks(body, controller.signal));
      message.state = "done";
    } catch (error) {
      if (controller.signal.aborted) Object.assign(message, { state: "stopped", note: "Stopped" });
      else Object.assign(message, { state: "failed", error: errorText(error) });
    }
    if (this.running === controller) this.running = null;
    this.update();
    if (!this.messages.includes(message)) return; // It was cut while it was written.
    message.view.show();
    this.follow();
    if (message.state !== "failed") announce(`${message.note}. ${message.view.plainText}`);
  }

  /** Take in the chunks of an answer, show it at most once a frame, and return a note about it. */
  async stream(message, chunks) {
    const asked = performance.now();
    let first, last, usage, reason, frame;
    for await (const chunk of chunks) {
      usage = chunk.usage ?? usage;
      const [choice] = chunk.choices ?? [];
      reason = choice?.finish_reason ?? reason;
      if (!choice?.delta?.content) continue;
      last = performance.now();
      first ??= last;
      message.content += choice.delta.content;
      frame ??= requestAnimationFrame(() => {
        frame = undefined;
        message.view.show();
        this.follow();
      });
    }
    return noteOf({ asked, first, last, tokens: usage?.completion_tokens, reason });
  }

  toEnd() {
    this.atEnd = true;
    this.follow();
  }

  follow() {
    if (this.atEnd) this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    this.atEnd = scrollHeight - scrollTop - clientHeight < NEAR_END;
    byId("latest").hidden = this.atEnd;
  }
}

function noteOf({ asked, first, last, tokens, reason }) {
  const parts = [];
  if (tokens !== undefined) parts.push(`${tokens} token${tokens === 1 ? "" : "s"}`);
  if (first !== undefined) parts.push(`first after ${Math.round(first - asked)} ms`);
  if (tokens > 1 && last > first) parts.push(`${Math.round((tokens - 1) / ((last - first) / 1000))} tokens/s`);
  if (reason === "length") parts.push("cut at max tokens");
  return parts.join(" · ");
}

function errorText(error) {
  const status = error instanceof ServerError && error.status ? ` (${error.status})` : "";
  return { title: `No answer${status}`, text: describeError(error) };
}
