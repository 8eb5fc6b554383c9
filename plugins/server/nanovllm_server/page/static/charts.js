// Small line charts: a name, the newest value, and the last two minutes.
import { element, svg } from "./dom.js";

const WIDTH = 120; // samples, and units of the drawing
const HEIGHT = 40;

/** A chart of one or more series, `{key, name}`; the first one is the value shown large. */
export class Chart {
  constructor({ title, unit, format = round, series, most, wide = false }) {
    Object.assign(this, { title, unit, format, series, most });
    this.value = element("span", { class: "value" }, "–");
    this.top = element("span", { class: "top" });
    this.others = element("span", { class: "others" });
    this.area = svg("path", { class: "area" });
    this.lines = series.map((_, at) => svg("path", { class: `line line-${at}` }));
    this.drawing = svg("svg", {
      viewBox: `0 0 ${WIDTH - 1} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": title,
    }, this.area, ...[...this.lines].reverse());
    this.node = element("figure", { class: wide ? "chart wide" : "chart" },
      element("figcaption", {}, element("span", { class: "title" }, title),
        element("span", {}, this.value, element("span", { class: "unit" }, unit))),
      element("div", { class: "plot" }, this.drawing, this.top),
      this.others);
  }

  /** Draw samples, oldest first; a sample is an object of numbers, or null where none is known. */
  show(samples) {
    const columns = this.series.map(({ key }) => samples.map((sample) => sample?.[key] ?? null));
    const highest = this.most ?? niceCeiling(Math.max(0, ...columns.flat()));
    columns.forEach((column, at) => this.lines[at].setAttribute("d", path(column, highest)));
    this.area.setAttribute("d", areaUnder(columns[0], highest));
    const now = columns.map((column) => this.text(column.at(-1)));
    this.value.textContent = now[0];
    this.top.textContent = this.format(highest);
    this.others.replaceChildren(...this.series.slice(1).map(({ name }, at) =>
      element("span", { class: `series series-${at + 1}` }, `${name} ${now[at + 1]}`)));
    const named = this.series.map(({ name }, at) => `${name ?? "now"} ${now[at]} ${this.unit}`).join(", ");
    this.drawing.setAttribute("aria-label", `${this.title}: ${named}; axis to ${this.format(highest)}`);
  }

  text(value) {
    return value == null ? "–" : this.format(value);
  }
}

const place = (value, highest) => (HEIGHT - 1.5 - (Math.min(value, highest) / highest) * (HEIGHT - 3)).toFixed(2);

/** Runs of known values, each `[[x, value], …]`; the newest sample is at the right edge. */
function runs(column) {
  const found = [];
  let open = null;
  column.forEach((value, at) => {
    if (value == null) open = null;
    else if (open) open.push([at + WIDTH - column.length, value]);
    else found.push((open = [[at + WIDTH - column.length, value]]));
  });
  return found;
}

function path(column, highest) {
  return runs(column).map((run) =>
    "M" + run.map(([x, value]) => `${x} ${place(value, highest)}`).join("L") + (run.length === 1 ? "h.01" : "")).join("");
}

function areaUnder(column, highest) {
  return runs(column).map((run) =>
    `M${run[0][0]} ${HEIGHT}L` + run.map(([x, value]) => `${x} ${place(value, highest)}`).join("L") +
    `L${run.at(-1)[0]} ${HEIGHT}Z`).join("");
}

/** The first of 1, 2, 5, 10, 20, … that is not below `value`. */
function niceCeiling(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}

/** Three significant digits, and thousands as such. */
export function round(value) {
  return value.toLocaleString("en", { maximumSignificantDigits: value < 1000 ? 3 : 4 });
}
