// The engine's state: asked for once a second while the page is in view, and drawn.
import { describeError, getJson, ServerError } from "./api.js";
import { Chart } from "./charts.js";

const PERIOD = 1000; // milliseconds
const KEPT = 120; // samples
const percentiles = (key) => ["p50", "p90", "p99"].map((name) => ({ key: `${key}.${name}`, name }));
const percent = (value) => value.toFixed(value > 0 && value < 10 ? 1 : 0);

const CHARTS = [
  { title: "Throughput", unit: "tokens/s", series: [{ key: "tokens_per_second" }], wide: true },
  { title: "Running", unit: "requests", series: [{ key: "running", name: "running" }, { key: "waiting", name: "waiting" }] },
  { title: "Step", unit: "ms", series: [{ key: "step_ms" }] },
  { title: "First token", unit: "ms", about: "median", series: percentiles("first_token_ms") },
  { title: "Between tokens", unit: "ms", about: "median", series: percentiles("inter_token_ms") },
  { title: "KV blocks", unit: "% used", series: [{ key: "kv_usage" }], format: percent, most: 100 },
  { title: "Prefix hits", unit: "% of tokens", series: [{ key: "prefix_hit_rate" }], format: percent, most: 100 },
];

const byId = (id) => document.getElementById(id);
const charts = CHARTS.map((chart) => new Chart(chart));
const samples = [];
let timer;
let lacksKey = false;
let onKeyNeeded;

/** Draw the empty charts and begin to ask; `keyNeeded` is called when the server starts to want a key. */
export function startLive(keyNeeded) {
  onKeyNeeded = keyNeeded;
  byId("charts").replaceChildren(...charts.map(({ node }) => node));
  document.addEventListener("visibilitychange", poll);
  poll();
}

async function poll() {
  clearTimeout(timer);
  if (document.hidden) return;
  try {
    take(await getJson("live"));
  } catch (error) {
    fail(error);
  }
  clearTimeout(timer);
  timer = setTimeout(poll, PERIOD);
}

/** One sample with one number a key: `first_token_ms.p50`, and shares as percentages. */
function flat(live) {
  const sample = {};
  for (const [key, value] of Object.entries(live)) {
    if (value && typeof value === "object") {
      for (const [inner, number] of Object.entries(value)) sample[`${key}.${inner}`] = number;
    } else {
      sample[key] = value;
    }
  }
  for (const key of ["kv_usage", "prefix_hit_rate"]) if (sample[key] != null) sample[key] *= 100;
  return sample;
}

function take(live) {
  keep(flat(live));
  lacksKey = false;
  const { running = 0, waiting = 0, problem } = live;
  const busy = `${running} running${waiting ? `, ${waiting} waiting` : ""}`;
  if (problem) showStatus("down", "Engine stuck or ended");
  else showStatus("ready", running + waiting ? busy : "Idle");
  showNotice(problem);
}

function fail(error) {
  keep(null);
  showNotice(describeError(error));
  const refused = error instanceof ServerError && [401, 403].includes(error.status);
  showStatus("down", refused ? "API key needed" : error instanceof ServerError ? "Error" : "Unreachable");
  if (refused && !lacksKey) onKeyNeeded();
  lacksKey = refused;
}

function keep(sample) {
  samples.push(sample);
  if (samples.length > KEPT) samples.shift();
  for (const chart of charts) chart.show(samples);
}

function showNotice(text) {
  byId("live-notice").textContent = text ?? "";
  byId("live-notice").hidden = !text;
}

function showStatus(state, text) {
  byId("status").dataset.state = state;
  if (byId("status-text").textContent !== text) byId("status-text").textContent = text;
}
