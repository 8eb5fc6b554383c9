// Small line charts: a name, the newest value, and the last two minutes. Pointing at one shows older values.
import { element, svg } from "./dom.js";

const WIDTH = 120; // samples, one a second, and units of the drawing
const HEIGHT = 40;

/** A chart of one or more series, `{key, name}`; the first one is the value shown large. */
export class Chart {
  constructor({ title, unit, about, format = round, series, most, wide = false }) {
    Object.assign(this, { title, unit, format, series, most });
    this.value = element("span", { class: "value" }, "–");
    this.when = element("span");
    this.top = element("span", { class: "top" });
    this.others = element("span", { class: "others" });
    this.area = svg("path", { class: "area" });
    this.lines = series.map((_, at) => svg("path", { class: `line line-${at}` }));
    this.drawing = svg("svg", {
      viewBox: `0 0 ${WIDTH - 1} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": title,
    }, this.area, ...[...this.lines].reverse());
    this.cursor = svg("path", { class: "cursor" });
    this.drawing.append(this.cursor);
    this.drawing.addEventListener("pointermove", (event) => this.pointAt(event));
    this.drawing.addEventListener("pointerleave", () => this.pointAt(null));
    this.samples = [];
    this.age = 0; // of the sample that is shown as text: the newest one, or the one pointed at
    this.node = element("figure", { class: wide ? "chart wide" : "chart" },
      element("figcaption", {}, element("span", { class: "title" }, title, this.when),
        element("span", {}, this.value, element("span", { class: "unit" }, [unit, about].filter(Boolean).join(" ")))),
      element("div", { class: "plot" }, this.drawing, this.top),
      this.others);
  }

  /** Draw samples, oldest first; a sample is an object of numbers, or null where none is known. */
  show(samples) {
    this.samples = samples;
    const columns = this.series.map(({ key }) => samples.map((sample) => sample?.[key] ?? null));
    const highest = this.most ?? niceCeiling(Math.max(0, ...columns.flat()));
    columns.forEach((column, at) => this.lines[at].setAttribute("d", path(column, highest)));
    this.area.setAttribute("d", areaUnder(columns[0], highest));
    this.top.textContent = this.format(highest);
    this.write();
    const now = this.texts(samples.at(-1));
    const named = this.series.map(({ name }, at) => `${name ?? "now"} ${now[at]} ${this.unit}`).join(", ");
    this.drawing.setAttribute("aria-label", `${this.title}: ${named}; axis to ${this.format(highest)}`);
  }

  pointAt(event) {
    if (event) {
      const { left, width } = this.drawing.getBoundingClientRect();
      this.age = Math.min(WIDTH - 1, Math.max(0, Math.round((1 - (event.clientX - left) / width) * (WIDTH - 1))));
    }
    this.cursor.setAttribute("d", event ? `M${WIDTH - 1 - this.age} 0V${HEIGHT}` : "");
    if (!event) this.age = 0;
    this.write();
  }

  /** Write the values of one sample as text. */
  write() {
    const [value, ...others] = this.texts(this.samples.at(-1 - this.age));
    this.value.textContent = value;
    this.when.textContent = this.age ? ` ${this.age} s ago` : "";
    this.others.replaceChildren(...others.map((text, at) =>
      element("span", { class: `series series-${at + 1}` }, `${this.series[at + 1].name} ${text}`)));
  }

  texts(sample) {
    return this.series.map(({ key }) => (sample?.[key] == null ? "–" : this.format(sample[key])));
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
