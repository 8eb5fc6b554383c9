// One message of the conversation on the page. It shows what it is given and holds no state of its own.
import { copyButton, element, iconButton } from "./dom.js";
import { showMarkdown } from "./markdown.js";

/** Shows a message of the user: `{content}`; `edited(text)` is called when its reader sends it anew. */
export class UserMessage {
  constructor(message, { edited }) {
    this.message = message;
    this.edited = edited;
    this.node = element("li", { class: "message user" });
    this.show();
  }

  show() {
    const { content } = this.message;
    this.node.replaceChildren(
      element("h3", { class: "hidden" }, "You"),
      element("div", { class: "bubble" }, content),
      element("div", { class: "actions" },
        iconButton("edit", "Edit", () => this.edit()), copyButton("Copy message", () => content)));
  }

  edit() {
    const area = element("textarea", { "aria-label": "Edit message", rows: "1" });
    area.value = this.message.content;
    const cancel = () => {
      this.show();
      this.node.querySelector("button").focus();
    };
    const send = () => area.value.trim() && this.edited(area.value);
    area.addEventListener("input", () => fitHeight(area));
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") cancel();
      else if (sends(event)) send();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    this.node.replaceChildren(element("form", { class: "edit", onsubmit: (event) => { event.preventDefault(); send(); } },
      area,
      element("div", { class: "edit-buttons" },
        element("button", { type: "button", class: "plain", onclick: cancel }, "Cancel"),
        element("button", { class: "primary" }, "Send"))));
    fitHeight(area);
    area.focus();
  }
}

/** Shows an answer: `{content, state, note, error}`, where state is streaming, done, stopped or failed. */
export class Answer {
  constructor(message, { again }) {
    this.message = message;
    this.text = element("div", { class: "text" });
    this.note = element("span", { class: "note" });
    this.error = element("div", { class: "error", role: "alert", hidden: true });
    this.actions = element("div", { class: "actions", hidden: true },
      this.note, copyButton("Copy answer", () => message.content), iconButton("again", "Answer again", again));
    this.node = element("li", { class: "message answer", "aria-busy": "true" },
      element("h3", { class: "hidden" }, "Model"), this.text, this.error, this.actions);
    this.show();
  }

  show() {
    const { content, state, note, error } = this.message;
    const streaming = state === "streaming";
    showMarkdown(this.text, content);
    this.node.dataset.state = state;
    this.node.setAttribute("aria-busy", streaming);
    this.actions.hidden = streaming;
    this.note.textContent = note ?? "";
    if (error && this.error.hidden) {
      this.error.hidden = false;
      this.error.replaceChildren(element("strong", {}, error.title), element("p", {}, error.text));
    }
  }

  /** The text as it reads, without its marks. */
  get plainText() {
    return this.text.innerText;
  }
}

/** Whether a key press in a text area sends it; not while an input method composes a character. */
export function sends(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing;
}

/** Make a text area as high as its text; the style sheet limits it. */
export function fitHeight(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + area.offsetHeight - area.clientHeight}px`;
}
