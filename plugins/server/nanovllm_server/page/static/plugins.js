// What is loaded in the engine, and why.
import { describeError, getJson } from "./api.js";
import { element } from "./dom.js";

const list = document.getElementById("plugin-list");

/** Ask the server for its plugins and show them. */
export async function showPlugins() {
  try {
    const [{ plugins, choices = [] }, version] = await Promise.all([getJson("plugins"), getJson("version")]);
    list.replaceChildren(
      element("ul", { class: "plugins" }, ...plugins.map(item)),
      ...(choices.length ? [element("h3", {}, "Choices"), element("ul", { class: "choices" },
        ...choices.map((choice) => element("li", {}, choice)))] : []),
      element("p", { class: "small" }, `nanovllm ${version.version}`));
  } catch (error) {
    list.replaceChildren(element("p", { class: "notice" }, describeError(error)));
  }
}

function item({ kind, name, distribution, version, reason }) {
  return element("li", {},
    element("div", { class: "plugin-head" },
      element("span", { class: "kind" }, kind), element("strong", {}, name)),
    element("div", { class: "small" }, [distribution, version].filter(Boolean).join(" ")),
    reason ? element("p", {}, reason) : null);
}
