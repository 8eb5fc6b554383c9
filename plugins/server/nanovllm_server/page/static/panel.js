// The panel beside the chat: its tabs, and whether it is open. On a narrow screen it covers the chat.

const byId = (id) => document.getElementById(id);
const tabs = [...document.querySelectorAll("[role=tab]")];
const narrow = matchMedia("(max-width: 900px)");
const toggle = byId("panel-toggle");

export function startPanel() {
  for (const tab of tabs) tab.addEventListener("click", () => select(tab));
  tabs[0].parentElement.addEventListener("keydown", moveBetweenTabs);
  toggle.addEventListener("click", () => open(!isOpen()));
  narrow.addEventListener("change", () => open(!narrow.matches));
  open(!narrow.matches);
}

const isOpen = () => document.body.dataset.panel === "open";

function open(opened) {
  document.body.dataset.panel = opened ? "open" : "closed";
  toggle.setAttribute("aria-expanded", opened);
  byId("panel").inert = !opened;
  byId("main").inert = opened && narrow.matches;
}

/** Close the panel if it covers the chat; returns whether it did. */
export function closeCover() {
  if (!isOpen() || !narrow.matches) return false;
  open(false);
  toggle.focus();
  return true;
}

/** Open the panel at the tab of this name. */
export function openTab(name) {
  open(true);
  select(byId(`tab-${name}`));
}

function select(chosen) {
  for (const tab of tabs) {
    const selected = tab === chosen;
    tab.setAttribute("aria-selected", selected);
    tab.tabIndex = selected ? 0 : -1;
    byId(tab.getAttribute("aria-controls")).hidden = !selected;
  }
}

function moveBetweenTabs(event) {
  const at = tabs.indexOf(document.activeElement);
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1 + tabs.length, Home: 0, End: tabs.length - 1 }[event.key];
  if (at < 0 || to === undefined) return;
  event.preventDefault();
  const tab = tabs[to % tabs.length];
  select(tab);
  tab.focus();
}
