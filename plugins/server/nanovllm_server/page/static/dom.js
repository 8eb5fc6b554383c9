// Small helpers for the document. Text becomes a node as text only: no module of this page sets markup.

/** An element with properties (`class`, `on*` and attributes) and children; strings become text. */
export function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child != null));
  return node;
}

const SVG = "http://www.w3.org/2000/svg";

/** An SVG element with attributes and children. */
export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** One of the icons at the top of index.html. */
export function icon(name) {
  return svg("svg", { class: "icon", "aria-hidden": "true" }, svg("use", { href: `#icon-${name}` }));
}

/** A button that shows an icon and has a name. */
export function iconButton(name, label, onclick) {
  return element("button", { type: "button", class: "tool", "aria-label": label, title: label, onclick },
    icon(name));
}

/** Have a screen reader say `text` when it is idle. */
export function announce(text) {
  document.getElementById("announcer").replaceChildren(text);
}

/** Copy text. Browsers offer the clipboard to pages on loopback or TLS only; others take the old way. */
export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = element("textarea", { class: "hidden", "aria-hidden": "true" });
  const focused = document.activeElement;
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
  focused?.focus();
}

/** A button that copies what `text()` returns, and shows for a moment that it did. */
export function copyButton(label, text) {
  const button = iconButton("copy", label, async () => {
    await copyText(text());
    button.replaceChildren(icon("check"));
    announce("Copied");
    setTimeout(() => button.replaceChildren(icon("copy")), 1500);
  });
  return button;
}
