// Charts as SVG, drawn at the width that there is: lines, points, bars, intervals.

import { h, s } from "./dom.js";
import { number } from "./format.js";

const MARGIN = { top: 12, right: 16, bottom: 44, left: 58 };

/** Draws again when its width changes; elements with data-tip tell it under the pointer. */
export function responsive(draw, height = 260) {
  const plot = h("div", { class: "plot" });
  const tip = h("div", { class: "tip", "aria-hidden": "true" });
  tip.hidden = true;
  const box = h("div", { class: "chart" }, plot, tip);
  let last = 0;
  new ResizeObserver(([entry]) => {
    const width = Math.floor(entry.contentRect.width);
    if (!width || width === last) return;
    last = width;
    plot.replaceChildren(draw(width, height));
  }).observe(box);
  plot.addEventListener("pointermove", (event) => {
    const mark = event.target.closest("[data-tip]");
    tip.hidden = !mark;
    if (!mark) return;
    tip.textContent = mark.dataset.tip;
    place(tip, box, event);
  });
  plot.addEventListener("pointerleave", () => (tip.hidden = true));
  return box;
}

function place(tip, box, event) {
  const around = box.getBoundingClientRect();
  const x = event.clientX - around.left;
  const y = event.clientY - around.top;
  const left = x + 14 + tip.offsetWidth > around.width ? x - tip.offsetWidth - 10 : x + 14;
  tip.style.left = `${Math.max(0, left)}px`;
  tip.style.top = `${Math.max(0, y - tip.offsetHeight - 8)}px`;
}

// Scales.

function linear([a, b], [from, to]) {
  const span = b - a || 1;
  const scale = (x) => from + ((x - a) / span) * (to - from);
  scale.ticks = (count) => niceTicks(a, b, count);
  return scale;
}

function logarithmic([a, b], range) {
  const inner = linear([Math.log10(a), Math.log10(b)], range);
  const scale = (x) => inner(Math.log10(Math.max(x, a)));
  scale.ticks = (count) => {
    const found = [];
    const decades = Math.log10(b / a);
    const steps = decades > count ? [1] : decades > 2.5 ? [1, 3] : decades > 0.8 ? [1, 2, 5] : [1, 2, 3, 5, 7];
    for (let p = Math.floor(Math.log10(a)); p <= Math.ceil(Math.log10(b)); p++)
      for (const step of steps) found.push(step * 10 ** p);
    return found.filter((x) => x >= a * 0.999 && x <= b * 1.001);
  };
  return scale;
}

function niceTicks(a, b, count) {
  const rough = (b - a) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough || 1));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((m) => m >= rough) ?? power;
  const found = [];
  for (let x = Math.ceil(a / step) * step; x <= b + step * 1e-9; x += step) found.push(Number(x.toPrecision(12)));
  return found;
}

function domain(values, { log = false, zero = false } = {}) {
  let low = Math.min(...values);
  let high = Math.max(...values);
  if (log) return low === high ? [low / 2, high * 2] : [low / 1.15, high * 1.15];
  if (zero) low = Math.min(0, low);
  if (low === high) [low, high] = [low - 1, high + 1];
  const room = (high - low) * 0.06;
  return [zero && low === 0 ? 0 : low - room, high + room];
}

/** Axes with their grid; returns the scales and the group for what is drawn. */
export function frame(width, height, { x, y, xLabel, yLabel, label, log = false, zeroY = false, xTick = number }) {
  const right = width - MARGIN.right;
  const bottom = height - MARGIN.bottom;
  const kind = log ? logarithmic : linear;
  const xs = kind(domain(x, { log }), [MARGIN.left, right]);
  const ys = kind(domain(y, { log, zero: zeroY }), [bottom, MARGIN.top]);
  const svg = s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  const axes = s("g", { class: "axes", "aria-hidden": "true" });
  for (const tick of ys.ticks(Math.max(2, Math.floor((bottom - MARGIN.top) / 44)))) {
    axes.append(
      s("line", { class: "grid", x1: MARGIN.left, x2: right, y1: ys(tick), y2: ys(tick) }),
      s("text", { x: MARGIN.left - 8, y: ys(tick) + 4, "text-anchor": "end" }, number(tick, 3)),
    );
  }
  for (const tick of xs.ticks(Math.max(2, Math.floor((right - MARGIN.left) / 80)))) {
    axes.append(
      s("line", { class: "tick", x1: xs(tick), x2: xs(tick), y1: bottom, y2: bottom + 5 }),
      s("text", { x: xs(tick), y: bottom + 19, "text-anchor": "middle" }, xTick(tick, 3)),
    );
  }
  axes.append(
    s("line", { class: "axis", x1: MARGIN.left, x2: right, y1: bottom, y2: bottom }),
    s("text", { class: "axis-name", x: (MARGIN.left + right) / 2, y: height - 6, "text-anchor": "middle" }, xLabel),
    s("text", { class: "axis-name", x: 14, y: (MARGIN.top + bottom) / 2, "text-anchor": "middle", transform: `rotate(-90 14 ${(MARGIN.top + bottom) / 2})` }, yLabel),
  );
  const marks = s("g", {});
  svg.append(axes, marks);
  return { svg, marks, xs, ys, right, bottom };
}

export const legend = (names, kinds = null) => swatches(names, names.map((_, i) => `series-${(kinds ? kinds[i] : i) % 6}`));

/** A legend with a class for each colour. */
export const swatches = (names, classes) =>
  h("ul", { class: "legend" }, names.map((name, i) => h("li", {}, h("span", { class: `swatch ${classes[i]}`, "aria-hidden": "true" }), name)));

/** series: [{name, kind (its colour), points: [{x, y, tip}]}]; targets: [{y, name}]. */
export function lineChart({ series, targets = [], xLabel, yLabel, label, xTick, height = 260, dots = true }) {
  const points = series.flatMap((one) => one.points);
  const chart = responsive((width, tall) => {
    const { svg, marks, xs, ys, right } = frame(width, tall, {
      x: points.map((p) => p.x), y: [...points.map((p) => p.y), ...targets.map((t) => t.y)], xLabel, yLabel, label, zeroY: true, xTick,
    });
    for (const target of targets)
      marks.append(
        s("line", { class: "target", x1: MARGIN.left, x2: right, y1: ys(target.y), y2: ys(target.y) }),
        s("text", { class: "target-name", x: right, y: ys(target.y) - 5, "text-anchor": "end" }, target.name),
      );
    series.forEach((one, at) => {
      const i = one.kind ?? at;
      const path = one.points.map((p, j) => `${j ? "L" : "M"}${xs(p.x)},${ys(p.y)}`).join("");
      marks.append(s("path", { class: `line series-${i % 6}`, d: path }));
      if (!dots) return;
      for (const p of one.points)
        marks.append(s("circle", { class: `dot series-${i % 6}`, cx: xs(p.x), cy: ys(p.y), r: 4, "data-tip": p.tip }));
    });
    return svg;
  }, height);
  return series.length > 1 ? h("div", {}, legend(series.map((one) => one.name), series.map((one, at) => one.kind ?? at)), chart) : chart;
}

/** Points, on logarithmic axes if asked for; `diagonal` shows where both are equal. */
export function pointChart({ series, xLabel, yLabel, label, log = false, diagonal = false, rule = null, height = 280, zeroY = false }) {
  const points = series.flatMap((one) => one.points);
  const chart = responsive((width, tall) => {
    const both = [...points.map((p) => p.x), ...points.map((p) => p.y)];
    const { svg, marks, xs, ys, right } = frame(width, tall, {
      x: diagonal ? both : points.map((p) => p.x), y: diagonal ? both : points.map((p) => p.y), xLabel, yLabel, label, log, zeroY,
    });
    if (diagonal) {
      const [a, b] = domain(both, { log });
      marks.append(s("line", { class: "diagonal", x1: xs(a), y1: ys(a), x2: xs(b), y2: ys(b) }));
    }
    if (rule) marks.append(s("line", { class: "target", x1: MARGIN.left, x2: right, y1: ys(rule.y), y2: ys(rule.y) }));
    series.forEach((one, at) => {
      const i = one.kind ?? at;
      for (const p of one.points)
        marks.append(s("circle", { class: `dot faint series-${i % 6}`, cx: xs(p.x), cy: ys(p.y), r: 4, "data-tip": p.tip }));
    });
    if (rule) marks.append(s("text", { class: "target-name", x: right, y: ys(rule.y) - 6, "text-anchor": "end" }, rule.name));
    return svg;
  }, height);
  return series.length > 1 ? h("div", {}, legend(series.map((one) => one.name), series.map((one, at) => one.kind ?? at)), chart) : chart;
}

/** A bar in a cell of a table, as long as its value. */
export function cellBar(value, largest, text) {
  const inner = h("span", { class: "cell-bar-inner", "aria-hidden": "true" });
  inner.style.width = `${largest > 0 ? Math.max(1, (100 * value) / largest) : 0}%`;
  return h("span", { class: "cell-bar" }, h("span", { class: "cell-bar-track" }, inner), h("span", { class: "cell-bar-text" }, text));
}

/** An interval with its median in a cell of a table, on a scale that all rows share. */
export function cellInterval(low, middle, high, [from, to]) {
  const at = (x) => (to > from ? (100 * (Math.log(x) - Math.log(from))) / (Math.log(to) - Math.log(from)) : 50);
  const range = h("span", { class: "interval-range" });
  range.style.left = `${at(low)}%`;
  range.style.width = `${Math.max(0.5, at(high) - at(low))}%`;
  const dot = h("span", { class: "interval-dot" });
  dot.style.left = `${at(middle)}%`;
  return h("span", { class: "interval", "aria-hidden": "true" }, range, dot);
}
