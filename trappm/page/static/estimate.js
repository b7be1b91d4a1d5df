// What takes the memory of a step: parts by card, activations by module, the peak, the largest tensors.

import { h, s } from "./dom.js";
import { number, share } from "./format.js";
import { post } from "./server.js";
import { card, choice, errorBox, figure, table, waiting } from "./parts.js";
import { responsive, swatches } from "./charts.js";

// In the order of the bar; style.css has their colours.
const PARTS = [
  "parameters", "gradients", "optimizer state", "optimizer step", "inputs", "activations", "backward pass",
  "workspaces", "fragments", "CUDA context",
];
const OPTIMIZERS = ["sgd", "momentum", "adam", "adamw"];
const ROW = 46;
const LINE = 17;
const GIB = 1024;

/** The card of an estimate, which asks by itself; `question` is that of `POST /v1/estimate`. */
export function memoryCard(question, signal) {
  const result = h("div", { class: "estimate" });
  let asking = null;
  const ask = async (optimizer) => {
    asking?.abort();
    const mine = (asking = new AbortController());
    signal.addEventListener("abort", () => mine.abort(), { once: true });
    result.replaceChildren(waiting("Tracing a step; it takes some seconds"));
    try {
      const estimate = await post("v1/estimate", { ...question, optimizer, depth: 2 }, mine.signal);
      if (!mine.signal.aborted) result.replaceChildren(...shown(estimate));
    } catch (error) {
      if (!mine.signal.aborted) result.replaceChildren(errorBox(error));
    }
  };
  const isTraining = question.phase === "train";
  ask(question.optimizer);
  return card("What takes the memory",
    h("p", { class: "muted" }, `Simulated on PyTorch's allocator, nothing learned: ${question.precision}, ${question.memory_format}.`),
    isTraining && choice("Optimizer", "estimate_optimizer", OPTIMIZERS.map((name) => [name, name]), question.optimizer, (event) => ask(event.target.value)),
    result);
}

function shown(estimate) {
  const modules = tree(estimate.modules_mib);
  return [
    h("p", {}, `The peak is in ${estimate.moment}.`),
    parts(estimate),
    modules.length > 0 && treemap(modules, estimate.model),
    table("The largest tensors at the peak", [
      { name: "size_mib", label: "MiB", numeric: true, cell: (t) => number(t.size_mib) },
      { name: "part", label: "Part" },
      { name: "module", label: "Module", cell: (t) => h("code", {}, t.module || "–") },
      { name: "operator", label: "Operator", cell: (t) => h("code", {}, t.operator || "–") },
      { name: "line", label: "Line of code", cell: (t) => h("code", { class: "nowrap" }, t.line || "–") },
    ], estimate.largest),
  ].filter(Boolean);
}

// Parts.

const gib = (mib) => `${number(mib / GIB, 3)} GiB`;

function verdict(answer) {
  const largest = answer.largest_batch === null ? "" : `; largest batch ${number(answer.largest_batch)}`;
  return `${answer.fits ? "fits" : "does not fit"}: ${number(answer.memory_mib / GIB, 3)} of ${gib(answer.capacity_mib)}${largest}`;
}

function parts({ devices, model, batch_size }) {
  const rows = Object.entries(devices);
  const names = PARTS.filter((name) => rows.some(([, answer]) => answer.parts_mib[name]));
  const end = Math.max(...rows.flatMap(([, answer]) => [answer.memory_mib, answer.capacity_mib]));
  const label = `Memory by part: ${rows.map(([device, answer]) => `${device} ${verdict(answer)}`).join(". ")}`;
  const chart = responsive((width) => {
    const isNarrow = width < 480;
    const height = rows.length * (ROW + (isNarrow ? LINE : 0));
    const svg = s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, class: "stack" });
    const at = (mib) => (mib / end) * (width - 2);
    rows.forEach(([device, answer], row) => {
      const top = (row * height) / rows.length;
      const y = isNarrow ? top + LINE : top;
      const below = isNarrow ? { x: 0, y: y + 14 } : { dx: 8 };
      svg.append(
        s("text", { class: "stack-name", x: 0, y: top + 14 }, device, s("tspan", { class: answer.fits ? "stack-good" : "stack-bad", ...below }, verdict(answer))),
        s("rect", { class: "stack-room", x: 0, y: y + 20, width: at(answer.capacity_mib), height: 18 }));
      let from = 0;
      for (const name of names) {
        const mib = answer.parts_mib[name] ?? 0;
        svg.append(s("rect", { class: `part part-${PARTS.indexOf(name)}`, x: at(from), y: y + 20, width: at(mib), height: 18, "data-tip": `${name}: ${number(mib, 4)} MiB, ${share(mib / answer.memory_mib)} of the step on ${device}` }));
        from += mib;
      }
      svg.append(s("line", { class: "stack-capacity", x1: at(answer.capacity_mib), x2: at(answer.capacity_mib), y1: y + 17, y2: y + 41 }));
    });
    return svg;
  });
  chart.classList.add("low");
  return figure(`Memory of a step of ${model} at batch ${number(batch_size)}, by what needs it; a line stands at each card's capacity.`,
    h("div", {}, swatches(names, names.map((name) => `part-${PARTS.indexOf(name)}`)), chart),
    () => table("Parts in MiB", [
      { name: "part", label: "Part", header: true, cell: (name) => name },
      ...rows.map(([device, answer]) => ({ name: device, label: device, numeric: true, cell: (name) => number(answer.parts_mib[name] ?? 0) })),
    ], names));
}

// Modules.

/** Modules of the first level with their children, the largest first; what no child has is their own. */
function tree(sizes) {
  const under = (parent) => Object.keys(sizes).filter((name) => name.split(".").slice(0, -1).join(".") === parent)
    .map((name) => ({ name, mib: sizes[name], children: under(name) })).sort((a, b) => b.mib - a.mib);
  return under("");
}

/** A squarified treemap (Bruls, Huizing, van Wijk 2000): rectangles of these sizes, as square as they get. */
export function squarified(sizes, x, y, width, height) {
  const total = sizes.reduce((sum, size) => sum + size, 0);
  const scale = (width * height) / (total || 1);
  const found = [];
  const worst = (row, side) => {
    const sum = row.reduce((a, b) => a + b, 0);
    return Math.max((side ** 2 * row[0]) / sum ** 2, sum ** 2 / (side ** 2 * row.at(-1)));
  };
  let rest = sizes.map((size) => size * scale).filter((area) => area > 0);
  while (rest.length) {
    const side = Math.min(width, height);
    let count = 1;
    while (count < rest.length && worst(rest.slice(0, count + 1), side) <= worst(rest.slice(0, count), side)) count++;
    const row = rest.slice(0, count);
    const depth = row.reduce((a, b) => a + b, 0) / side;
    let along = 0;
    for (const area of row) {
      const length = area / depth;
      found.push(width >= height ? { x, y: y + along, width: depth, height: length } : { x: x + along, y, width: length, height: depth });
      along += length;
    }
    if (width >= height) [x, width] = [x + depth, width - depth];
    else [y, height] = [y + depth, height - depth];
    rest = rest.slice(count);
  }
  return found;
}

const HEADER = 20;

function treemap(modules, model) {
  const total = modules.reduce((sum, module) => sum + module.mib, 0);
  const told = (module) => `${module.name}: ${number(module.mib, 4)} MiB, ${share(module.mib / total)}`;
  const shown = modules.filter((module) => module.mib > total / 2000);
  const label = `Activations by module: ${shown.slice(0, 5).map(told).join("; ")}`;
  const chart = responsive((width, height) => {
    const svg = s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, class: "treemap" });
    squarified(shown.map((module) => module.mib), 0, 0, width, height).forEach((box, index) => {
      const module = shown[index];
      svg.append(tile(box, module.name, told(module), `series-${index % 6}`));
      const inside = { x: box.x + 3, y: box.y + HEADER, width: box.width - 6, height: box.height - HEADER - 3 };
      const children = module.children.filter((child) => child.mib > total / 2000);
      if (!children.length || inside.width < 8 || inside.height < 8) return;
      const own = module.mib - children.reduce((sum, child) => sum + child.mib, 0);
      const sizes = [...children.map((child) => child.mib), ...(own > total / 2000 ? [own] : [])];
      squarified(sizes, inside.x, inside.y, inside.width, inside.height).forEach((place, at) => {
        const child = children[at];
        if (child) svg.append(tile(place, child.name.slice(module.name.length + 1), told(child), `inner series-${index % 6}`));
      });
    });
    return svg;
  }, 320);
  return figure(`Activations of ${model} at the peak by module, ${gib(total)} in all; gradients of activations count as well.`, chart,
    () => table("Activations by module", [
      { name: "name", label: "Module", header: true, cell: (m) => h("code", {}, m.name) },
      { name: "mib", label: "MiB", numeric: true },
      { name: "share", label: "Share", numeric: true, cell: (m) => share(m.mib / total) },
    ], modules.flatMap((module) => [module, ...module.children])));
}

const LETTER = 7.2; // its width in the treemap's type, at most

function tile({ x, y, width, height }, name, tip, kind) {
  const group = s("g", { class: kind, "data-tip": tip });
  group.append(s("rect", { class: "tile", x, y, width: Math.max(0, width), height: Math.max(0, height) }));
  if (height >= 16 && width >= name.length * LETTER + 8) group.append(s("text", { x: x + 4, y: y + 14 }, name));
  return group;
}
