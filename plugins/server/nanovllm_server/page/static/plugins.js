// The plugins in use, and why.
import { describeError, getJson } from "./api.js";
import { element } from "./dom.js";

const list = document.getElementById("plugin-list");

/** Ask the server for its plugins and show them; `choices` are lines of reasons. */
export async function showPlugins() {
  try {
    const [{ plugins, choices = [] }, version] = await Promise.all([getJson("plugins"), getJson("version")]);
    list.replaceChildren(
      element("ul", { class: "plugins" }, ...plugins.map(item)),
      ...notChosen(choices.filter((line) => !plugins.some(({ reason }) => reason === line))),
      element("p", { class: "small" }, `nanovllm ${version.version}`));
  } catch (error) {
    list.replaceChildren(element("p", { class: "notice" }, describeError(error)));
  }
}

function notChosen(lines) {
  if (!lines.length) return [];
  return [element("h3", {}, "Not chosen"),
    element("ul", { class: "choices" }, ...lines.map((line) => element("li", {}, line)))];
}

function item({ kind, name, distribution, version, reason }) {
  return element("li", {},
    element("div", { class: "plugin-head" },
      element("span", { class: "kind" }, kind), element("strong", {}, name)),
    element("div", { class: "small" }, [distribution, version].filter(Boolean).join(" ")),
    reason ? element("p", {}, reason.replace(`${kind}: `, "")) : null);
}
