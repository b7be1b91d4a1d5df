// Memory breakdown of a step: parts by GPU, activations by module, peak, largest tensors.

import * as Plot from "./vendor/plot.js";
import { h } from "./dom.js";
import { number, share } from "./format.js";
import { get, post } from "./server.js";
import { card, choice, errorBox, figure, table, waiting } from "./parts.js";
import { colour, drawn, legend, responsive, tips } from "./charts.js";

// Parts in the order of the bar, each with its own color.
const PARTS = [
  "parameters", "gradients", "optimizer state", "optimizer step", "inputs", "activations", "logits", "backward pass",
  "workspaces", "fragments", "CUDA context",
];
const GIB = 1024;

/** Return a card that loads a memory breakdown; `question` is the body of `POST /v1/predict`. */
export function memoryCard(question, optimizers, signal) {
  const result = h("div", { class: "estimate" });
  let asking = null;
  const ask = async (optimizer) => {
    asking?.abort();
    const mine = (asking = new AbortController());
    signal.addEventListener("abort", () => mine.abort(), { once: true });
    result.replaceChildren(waiting("Tracing a step; this takes some seconds"));
    try {
      const answers = await post("v1/predict", { ...question, optimizer, breakdown_depth: DEPTH }, mine.signal);
      if (!mine.signal.aborted) result.replaceChildren(...shown(answers), everyCard({ ...question, optimizer }, mine.signal));
    } catch (error) {
      if (!mine.signal.aborted) result.replaceChildren(errorBox(error));
    }
  };
  const isTraining = question.phase === "train";
  ask(question.optimizer);
  return card("Memory breakdown",
    h("p", { class: "muted" }, `Simulation of PyTorch's allocator: ${question.precision}, ${question.memory_format}.`),
    isTraining && choice("Optimizer", "estimate_optimizer", optimizers.map((name) => [name, name]), question.optimizer, (event) => ask(event.target.value)),
    result);
}

function shown(answers) {
  const able = answers.filter((answer) => answer.memory_breakdown);
  const { model, memory_breakdown: breakdown } = able[0];
  const modules = tree(breakdown.modules_mib);
  return [
    h("p", {}, `The peak is in ${breakdown.moment}.`),
    parts(able),
    modules.length > 0 && treemap(modules, model),
    table("The largest tensors at the peak", [
      { name: "size_mib", label: "MiB", numeric: true, cell: (t) => number(t.size_mib) },
      { name: "part", label: "Part" },
      { name: "module", label: "Module", cell: (t) => h("code", {}, t.module || "–") },
      { name: "operator", label: "Operator", cell: (t) => h("code", {}, t.operator || "–") },
      { name: "line", label: "Line of code", cell: (t) => h("code", { class: "nowrap" }, t.line || "–") },
    ], breakdown.largest),
  ].filter(Boolean);
}

const DEPTH = 5; // levels of the module tree, enough for bert.encoder.layer.0
const NEARLY_ALL = 0.9;

const AT_ONCE = 60; // GPUs per request

/** Return a section with the fit on each GPU of the catalogue, computed when opened. */
function everyCard(question, signal) {
  const slot = h("div", {});
  const details = h("details", {}, h("summary", {}, "Does it fit? All GPUs"), slot);
  details.addEventListener("toggle", async () => {
    slot.replaceChildren(waiting("Simulating each GPU"));
    try {
      const { cards } = (await get("api/devices", {}, signal)).data;
      const rows = [];
      for (let at = 0; at < cards.length; at += AT_ONCE)
        rows.push(...(await post("v1/predict", { ...question, devices: cards.slice(at, at + AT_ONCE) }, signal)).filter((answer) => answer.verdict));
      rows.sort((a, b) => a.capacity_mib - b.capacity_mib || a.memory_mib - b.memory_mib);
      const fitting = rows.filter((answer) => answer.fits).length;
      slot.replaceChildren(
        h("p", {}, h("b", {}, `The step fits ${number(fitting)} of ${number(rows.length)} GPUs`), " (smallest memory first)."),
        table("Fit by GPU", [
          { name: "card", label: "GPU", header: true, cell: (answer) => answer.device },
          { name: "fits", label: "Fits", cell: (answer) => h("span", { class: answer.fits ? "good" : "bad" }, answer.verdict) },
          { name: "memory", label: "Memory, GiB", numeric: true, cell: (answer) => number(answer.memory_mib / GIB, 3) },
          { name: "capacity", label: "Capacity, GiB", numeric: true, cell: (answer) => number(answer.capacity_mib / GIB, 3) },
        ], rows, { hideCaption: true }));
    } catch (error) {
      if (!signal.aborted) slot.replaceChildren(errorBox(error));
    }
  }, { once: true });
  return details;
}

// Parts.

const key = (part) => part.toLowerCase().replaceAll(" ", "_"); // name of a part in the API

const gib = (mib) => `${number(mib / GIB, 3)} GiB`;

const verdict = (answer) => `${answer.verdict}: ${number(answer.memory_mib / GIB, 3)} of ${gib(answer.capacity_mib)}`;

function parts(answers) {
  const { model, batch_size } = answers[0];
  const rows = answers.map((answer) => [answer.device, { ...answer, parts_mib: answer.memory_breakdown.parts_mib }]);
  const names = PARTS.filter((name) => rows.some(([, answer]) => answer.parts_mib[key(name)]));
  const end = Math.max(...rows.flatMap(([, answer]) => [answer.memory_mib, answer.capacity_mib]));
  const label = `Memory by part: ${rows.map(([device, answer]) => `${device} ${verdict(answer)}`).join(". ")}`;
  const sizes = rows.flatMap(([device, answer]) => names.map((part) => {
    const mib = answer.parts_mib[key(part)] ?? 0;
    return { device, part, mib, fill: colour(PARTS.indexOf(part)), tip: `${part}: ${number(mib, 4)} MiB, ${share(mib / answer.memory_mib)} of the step on ${device}` };
  }));
  const chart = responsive((width) => {
    const isNarrow = width < 480;
    const row = isNarrow ? 64 : 48;
    return drawn(label, {
      width, height: rows.length * row, margin: 0, marginRight: 2, x: { axis: null, domain: [0, end] },
      y: { axis: null, domain: rows.map(([device]) => device), padding: 0 },
      marks: [
        Plot.barX(rows, { y: "0", x: (r) => r[1].capacity_mib, fill: "var(--raised)", stroke: "var(--line)", insetTop: row - 28, insetBottom: 8 }),
        Plot.barX(sizes, { y: "device", x: "mib", fill: "fill", stroke: "var(--surface)", insetTop: row - 28, insetBottom: 8, order: names, z: "part" }),
        Plot.tickX(rows, { y: "0", x: (r) => r[1].capacity_mib, stroke: "var(--text)", strokeWidth: 2, insetTop: row - 31, insetBottom: 5 }),
        Plot.text(rows, { y: "0", x: 0, text: (r) => `${r[0]}${isNarrow ? "\n" : "   "}${verdict(r[1])}`, fill: (r) => (r[1].fits ? "var(--text)" : "var(--bad)"), textAnchor: "start", lineAnchor: "top", dy: 4 - row / 2, fontSize: 13 }),
        Plot.tip(sizes, Plot.pointer(Plot.stackX({ y: "device", x: "mib", z: "part", order: names, title: "tip" }))),
      ],
    });
  }, "low stack");
  return figure(`Memory of a step of ${model} at batch ${number(batch_size)} by part. The line marks the GPU's capacity.`,
    h("div", {}, legend(names.map((name) => [name, PARTS.indexOf(name)])), chart),
    () => table("Parts in MiB", [
      { name: "part", label: "Part", header: true, cell: (name) => name },
      ...rows.map(([device, answer]) => ({ name: device, label: device, numeric: true, cell: (name) => number(answer.parts_mib[key(name)] ?? 0) })),
    ], names));
}

// Modules.

/** Return first-level modules with their children, largest first. */
function tree(sizes) {
  const under = (parent) => Object.keys(sizes).filter((name) => name.split(".").slice(0, -1).join(".") === parent)
    .map((name) => ({ name, mib: sizes[name], children: under(name) })).sort((a, b) => b.mib - a.mib);
  return under("");
}

/** Return two levels of modules; descend into a module with nearly all memory (`transformer.h`). */
function opened(modules) {
  let [within, level] = [null, modules];
  while (level[0].children.length && level[0].mib > NEARLY_ALL * sum(level)) [within, level] = [level[0], level[0].children];
  return { within, level: level.map((module) => ({ ...module, children: module.children.map((child) => ({ ...child, children: [] })) })) };
}

const sum = (modules) => modules.reduce((all, module) => all + module.mib, 0);

const HEADER = 20;
const HEIGHT = 320;

function treemap(all, model) {
  const total = sum(all);
  const { within, level: modules } = opened(all);
  const told = (module) => `${module.name}: ${number(module.mib, 4)} MiB, ${share(module.mib / total)}`;
  const label = `Activations by module: ${modules.slice(0, 5).map(told).join("; ")}`;
  const chart = responsive((width) => drawn(label, {
    width, height: HEIGHT, margin: 0,
    x: { type: "identity", axis: null }, y: { type: "identity", axis: null },
    marks: marks(tiles(modules, within?.mib ?? total, width), told),
  }), "treemap");
  const shown = within ? `, of which ${share(within.mib / total)} in ${within.name}, whose parts are shown` : "";
  return figure(`Activations of ${model} at the peak by module, ${gib(total)} in total${shown}. Gradients of activations are included.`, chart,
    () => table("Activations by module", [
      { name: "name", label: "Module", header: true, cell: (m) => h("code", {}, m.name) },
      { name: "mib", label: "MiB", numeric: true },
      { name: "share", label: "Share", numeric: true, cell: (m) => share(m.mib / total) },
    ], modules.flatMap((module) => [module, ...module.children])));
}

const LETTER = 7.2; // largest character width in the treemap's font, px

/** Return rectangles of a D3 treemap: modules with their children inside. */
function tiles(modules, total, width) {
  const large = (some) => some.filter((module) => module.mib > total / 2000);
  const root = Plot.hierarchy({ children: modules }, (module) => large(module.children))
    .each((node) => (node.value = node.data.mib ?? total));
  Plot.treemap().size([width, HEIGHT]).paddingTop((node) => (node.depth ? HEADER : 0)).paddingInner(2).paddingRight(3).paddingBottom(3)(root);
  return root.descendants().filter((node) => node.depth);
}

function marks(nodes, told) {
  const rows = nodes.map((node) => {
    const top = node.ancestors().at(-2);
    const name = node.data.name.split(".").at(-1);
    return { ...node, name, x: (node.x0 + node.x1) / 2, y: (node.y0 + node.y1) / 2, fill: colour(top.parent.children.indexOf(top)), tip: told(node.data), fits: node.y1 - node.y0 >= 16 && node.x1 - node.x0 >= name.length * LETTER + 8 };
  });
  return [
    Plot.rect(rows, { x1: "x0", x2: "x1", y1: "y0", y2: "y1", fill: "fill", fillOpacity: 0.25, stroke: "var(--surface)" }),
    Plot.text(rows.filter((row) => row.fits), { x: "x0", y: "y0", text: "name", textAnchor: "start", lineAnchor: "top", dx: 5, dy: 4 }),
    tips(rows),
  ];
}
