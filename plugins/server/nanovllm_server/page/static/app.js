// The page: a chat with the server's model, and what the engine does meanwhile.
import { getJson } from "./api.js";
import { Chat } from "./chat.js";
import { startLive } from "./live.js";
import { closeCover, openTab, startPanel } from "./panel.js";
import { showPlugins } from "./plugins.js";
import { focusKey, readSettings, startSettings } from "./settings.js";

const models = document.getElementById("model");
const themeButton = document.getElementById("theme");
const systemIsDark = matchMedia("(prefers-color-scheme: dark)");

async function showModels() {
  try {
    const { data } = await getJson("v1/models");
    models.replaceChildren(...data.map(({ id }) => new Option(id)));
    models.disabled = data.length < 2;
  } catch {
    models.replaceChildren(new Option("no model", ""));
    models.disabled = true;
  }
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : systemIsDark.matches;
}

/** A choice that is the system's own is not stored, so that the page follows the system again. */
function switchTheme() {
  const dark = !isDark();
  const root = document.documentElement;
  if (dark === systemIsDark.matches) delete root.dataset.theme;
  else root.dataset.theme = dark ? "dark" : "light";
  try {
    if (root.dataset.theme) localStorage.setItem("theme", root.dataset.theme);
    else localStorage.removeItem("theme");
  } catch {
    // The choice holds until the page is closed.
  }
  showTheme();
}

const showTheme = () => themeButton.setAttribute("aria-pressed", isDark());

function askServer() {
  showModels();
  showPlugins();
}

startPanel();
startSettings(askServer);
const chat = new Chat({ settings: readSettings, model: () => models.value });
themeButton.addEventListener("click", switchTheme);
systemIsDark.addEventListener("change", showTheme);
showTheme();
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !closeCover()) chat.stop();
});
askServer();
if (matchMedia("(pointer: fine)").matches) document.getElementById("prompt").focus();
startLive(() => {
  openTab("settings");
  focusKey();
});
