// Charts with Observable Plot (vendor/plot.js), drawn at the available width in the theme's colors.

import * as Plot from "./vendor/plot.js";
import { h } from "./dom.js";
import { number } from "./format.js";

const COLOURS = 11; // number of series colors in style.css
export const colour = (i) => `var(--series-${i % COLOURS})`;

/** Fill a box with `draw(width)`, again whenever its width changes. */
export function responsive(draw, kind = "") {
  const box = h("div", { class: `chart ${kind}` });
  let last = 0;
  new ResizeObserver(([entry]) => {
    const width = Math.floor(entry.contentRect.width);
    if (!width || width === last) return;
    last = width;
    box.replaceChildren(draw(width));
  }).observe(box);
  return box;
}

/** Return a Plot without its style element, which the content security policy blocks; style.css has its rules. */
export function drawn(label, options) {
  const svg = Plot.plot({ className: "plot", style: { fontSize: "12px" }, color: { type: "identity" }, ...options, marks: options.marks.filter(Boolean) });
  svg.querySelector("style")?.remove();
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  return svg;
}

/** Show a tooltip for the point nearest to the pointer; points have x, y and tip. */
export const tips = (points, options = {}) => Plot.tip(points, Plot.pointer({ x: "x", y: "y", title: "tip", maxRadius: 30, ...options }));

/** Return a legend from [[name, index of its color]]. */
export const legend = (pairs) =>
  h("ul", { class: "legend" }, pairs.map(([name, index]) => {
    const swatch = h("span", { class: "swatch", "aria-hidden": "true" });
    swatch.style.background = colour(index);
    return h("li", {}, swatch, name);
  }));

/**
 * Return a scatter or line chart.
 * series: [{name, kind (color index), points: [{x, y, tip}]}]; rules: [{y, name}]; diagonal: line at x = y.
 */
export function xyChart({ series, rules = [], xLabel, yLabel, label, xType = "linear", yType = "linear", lines = false, dots = true, diagonal = false, zero = false, height = 270 }) {
  const points = series.flatMap((one, at) => one.points.map((p) => ({ ...p, name: one.name, fill: colour(one.kind ?? at) })));
  const both = points.flatMap((p) => [p.x, p.y]);
  const ends = diagonal ? [Math.min(...both) / 1.15, Math.max(...both) * 1.15] : undefined;
  const y = [...points.map((p) => p.y), ...rules.map((rule) => rule.y)];
  const isWhole = xType === "linear" && points.every((p) => Number.isInteger(p.x));
  const across = isWhole ? Math.max(...points.map((p) => p.x)) - Math.min(...points.map((p) => p.x)) : Infinity;
  const chart = responsive((width) => drawn(label, {
    width, height, marginLeft: 56, marginBottom: 42, marginTop: 26,
    x: { type: xType, label: xLabel, labelArrow: "none", inset: 8, ticks: Math.max(1, Math.min(across, Math.floor(width / 90))), domain: ends, tickFormat: xType === "time" ? clock(points.map((p) => p.x)) : isWhole ? (x) => (Number.isInteger(x) ? number(x) : "") : undefined },
    y: { type: yType, label: yLabel, labelArrow: "none", grid: true, inset: zero ? 0 : 8, ticks: Math.floor(height / 50), domain: ends ?? (zero ? [0, 1.08 * Math.max(...y) || 1] : undefined) },
    marks: [
      diagonal && Plot.line(ends.map((x) => [x, x]), { stroke: "var(--strong-line)", strokeDasharray: "4 4" }),
      Plot.ruleY(rules, { y: "y", stroke: "var(--good)", strokeWidth: 1.5, strokeDasharray: "7 4" }),
      Plot.text(rules, { y: "y", text: "name", frameAnchor: "right", dy: -8, fill: "var(--good)", fontWeight: 600, stroke: "var(--surface)", strokeWidth: 4 }),
      lines && Plot.line(points, { x: "x", y: "y", z: "name", stroke: "fill", strokeWidth: 2.25, strokeLinejoin: "round" }),
      dots && Plot.dot(points, { x: "x", y: "y", r: 4, fill: "fill", stroke: "var(--surface)", fillOpacity: lines ? 1 : 0.75 }),
      tips(points),
    ],
  }));
  return series.length > 1 ? h("div", {}, legend(series.map((one, at) => [one.name, one.kind ?? at])), chart) : chart;
}

/**
 * Return a chart with a row per name, whose values are compared with targets: [{at, name, kind}];
 * rows: [{name, values (one for each target), tip}].
 */
export function targetRows({ rows, targets, xLabel, label }) {
  const points = rows.flatMap((row) => targets.map((target, i) => ({ ...row, x: row.values[i], target: target.at, fill: colour(target.kind) })).filter((p) => typeof p.x === "number"));
  const longest = Math.max(...rows.map((row) => row.name.length));
  const chart = responsive((width) => drawn(label, {
    width, height: 24 * rows.length + 60, marginLeft: Math.min(7 * longest + 16, width / 1.8), marginRight: 16, marginBottom: 42, marginTop: 12,
    x: { domain: [0, 100], label: xLabel, labelArrow: "none", ticks: width < 500 ? 3 : 10, grid: true },
    y: { label: null, domain: rows.map((row) => row.name), tickSize: 0 },
    marks: [
      Plot.tickX(targets, { x: "at", stroke: (t) => colour(t.kind), strokeWidth: 1.5, strokeDasharray: "5 4" }),
      Plot.ruleY(points, { x1: "target", x2: "x", y: "name", stroke: "fill", strokeWidth: 3, strokeOpacity: 0.45 }),
      Plot.dot(points, { x: "x", y: "name", r: 5, fill: "fill", stroke: "var(--surface)" }),
      Plot.tip(points, Plot.pointer({ x: "x", y: "name", title: "tip", maxRadius: 30 })),
    ],
  }));
  return h("div", {}, legend(targets.map((target) => [target.name, target.kind])), chart);
}

/** Return axis ticks with local dates, or with local times within two days. */
function clock(dates) {
  const minutes = (Math.max(...dates) - Math.min(...dates)) / 60_000;
  if (minutes < 2 * 1440) return (date) => date.toTimeString().slice(0, minutes < 10 ? 8 : 5);
  return (date) => `${date.getFullYear()}-${String(date.getMonth() + 1).padStart(2, "0")}-${String(date.getDate()).padStart(2, "0")}`;
}

/** Return a bar for a table cell, proportional to its value. */
export function cellBar(value, largest, text) {
  const inner = h("span", { class: "cell-bar-inner", "aria-hidden": "true" });
  inner.style.width = `${largest > 0 ? Math.max(1, (100 * value) / largest) : 0}%`;
  return h("span", { class: "cell-bar" }, h("span", { class: "cell-bar-track" }, inner), h("span", { class: "cell-bar-text" }, text));
}

/** Return an interval with its median for a table cell, on a scale shared by all rows. */
export function cellInterval(low, middle, high, [from, to]) {
  const at = (x) => (to > from ? (100 * (Math.log(x) - Math.log(from))) / (Math.log(to) - Math.log(from)) : 50);
  const range = h("span", { class: "interval-range" });
  range.style.left = `${at(low)}%`;
  range.style.width = `${Math.max(0.5, at(high) - at(low))}%`;
  const dot = h("span", { class: "interval-dot" });
  dot.style.left = `${at(middle)}%`;
  return h("span", { class: "interval", "aria-hidden": "true" }, range, dot);
}
