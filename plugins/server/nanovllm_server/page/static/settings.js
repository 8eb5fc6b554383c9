// The form of settings: a system prompt, the request's parameters, and the API key.
import { apiKey, keepApiKey } from "./api.js";

const form = document.getElementById("settings");
const key = document.getElementById("api-key");

/** Fill in the kept key; `keyChanged` is called after another one was entered. */
export function startSettings(keyChanged) {
  key.value = apiKey();
  key.addEventListener("change", () => {
    keepApiKey(key.value);
    keyChanged();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", (event) => {
    // The key and the system prompt are no sampling.
    event.preventDefault();
    for (const field of form.querySelectorAll("fieldset input, [name=stop]")) field.value = "";
  });
}

/** Put the focus on the field of the API key. */
export function focusKey() {
  key.focus();
}

/** The system prompt, and the parameters whose fields are filled in. */
export function readSettings() {
  const parameters = {};
  for (const field of form.querySelectorAll("fieldset input")) {
    if (field.value !== "") parameters[field.name] = field.valueAsNumber;
  }
  const stop = form.elements.stop.value.split("\n").filter((line) => line !== "");
  if (stop.length) parameters.stop = stop;
  return { system: form.elements.system.value.trim(), parameters };
}
