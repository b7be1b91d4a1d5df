// Roofline of a step on each device, with its kernels as points.

import * as Plot from "./vendor/plot.js";
import { h, tell } from "./dom.js";
import { NOTHING, number, share } from "./format.js";
import { get, post, query } from "./server.js";
import { card, choice, completion, empty, errorBox, field, figure, table, waiting } from "./parts.js";
import { colour, drawn, legend, responsive, tips } from "./charts.js";

const LOW = 0.05; // FLOP per byte
const HIGH = 1000;
const ROOM = 8; // ratio of the lowest ceiling to the edge of the plot
const HEIGHT = 430;
const LARGEST = 1600; // area of a point with the whole step time, in square pixels
const SETTINGS = { precision: "Precision", memory_format: "Memory format" };
const BOUNDS = { compute: "compute", bandwidth: "bandwidth", launch: "launches and waiting for the host" };

export async function rooflineView({ values, signal, main }) {
  const { data } = await get("api/devices", {}, signal);
  const result = h("div", { class: "result" });
  const form = questionForm(values, data, signal, (asked) => {
    const address = `#/roofline?${query(asked)}`;
    if (location.hash !== address) history.replaceState(null, "", address);
    answer(asked, result, signal);
  });
  main.replaceChildren(h("h1", {}, "Roofline"), form, result);
  if (values.model) answer(values, result, signal);
  else
    result.replaceChildren(
      empty("What bounds a step?", "Ceilings come from a device's data sheet. The kernels of a model are points below them.",
        "trappm roofline resnet50 --batch-size 64 --device v100 --device a100"));
  return null;
}

function questionForm(values, { cards, settings }, signal, ask) {
  const problem = h("p", { class: "problem", role: "alert" });
  const form = h("form", { class: "card ask", novalidate: true },
    h("div", { class: "filters" },
      field("Devices (up to four)", "devices", values.devices ?? "", { placeholder: "v100, a100", list: "devices", autocomplete: "off", spellcheck: "false", maxlength: 200 }, "wide"),
      h("datalist", { id: "devices" }, cards.map((name) => h("option", { value: name }))),
      completion(signal),
      field("timm architecture", "model", values.model ?? "", { placeholder: "resnet50", list: "models", autocomplete: "off", spellcheck: "false", maxlength: 200 }, "wide"),
      field("Batch size", "batch_size", values.batch_size ?? "64", { inputmode: "numeric" }),
      choice("Phase", "phase", [["train", "training step"], ["infer", "inference step"]], values.phase ?? "train"),
      Object.entries(SETTINGS).map(([name, label]) => choice(label, name, [["", "as most labels"], ...settings[name].map((o) => [o, o])], values[name] ?? "")),
      h("div", { class: "buttons" }, h("button", { class: "primary" }, "Show"))),
    problem);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const asked = Object.fromEntries([...new FormData(form)].map(([k, v]) => [k, v.trim()]).filter(([, v]) => v));
    const wrong = !asked.devices ? "Name a device, such as a100."
      : !asked.model ? "Name an architecture, such as resnet50."
      : asked.batch_size && !/^[1-9][0-9]{0,8}$/.test(asked.batch_size) ? `Invalid batch size: “${asked.batch_size}”. Enter a whole number of 1 or more.` : "";
    problem.replaceChildren(wrong);
    if (!wrong) ask(asked);
  });
  return form;
}

let asking = null;

async function answer(asked, result, signal) {
  asking?.abort();
  const mine = (asking = new AbortController());
  signal.addEventListener("abort", () => mine.abort(), { once: true });
  const { devices = "", batch_size: size, ...rest } = asked;
  const names = devices.split(",").map((name) => name.trim()).filter(Boolean);
  const question = { ...rest, batch_size: Number(size ?? 1), ...(names.length > 0 && { devices: names }) };
  result.replaceChildren(waiting("Computing; a new model takes some seconds"));
  try {
    const rows = await post("v1/roofline", question, mine.signal);
    if (mine.signal.aborted) return;
    result.replaceChildren(...shown(rows));
    tell(rows.map((row) => row.step.sentence).join(" "));
  } catch (error) {
    if (!mine.signal.aborted) result.replaceChildren(errorBox(error));
  }
}

function shown(rows) {
  return [
    card("What bounds the step", rows.map(({ step }) => [h("p", {}, step.sentence), h("p", { class: "muted small" }, `Times are based on ${step.source}.`)])),
    card(`Kernels of ${rows[0].step.model} under the ceilings`, roofline(rows)),
    h("div", { class: "devices" }, rows.map(ceilings)),
    ...rows.map(({ device, step }) => card(`Largest kernels on ${device}`, kernels(step.kernels.slice(0, 15)))),
  ];
}

// Plot.

const of = (row, kind) => row.roofs.filter((roof) => roof.kind === kind);

/** Return the ceilings of a device between two intensities, as roofline/drawing.py does. */
export function lines(row, low, high) {
  const peaks = of(row, "compute");
  const levels = of(row, "bandwidth");
  const top = Math.max(...peaks.map((roof) => roof.value));
  const steepest = Math.max(...levels.map((roof) => roof.value));
  const level = [...new Set(peaks.map((roof) => roof.value))].map((value) => {
    const same = peaks.filter((roof) => roof.value === value);
    const start = Math.min(Math.max(low, (1000 * value) / steepest), high);
    return { name: `${same.map((roof) => roof.of).join(", ")} ${number(value)} TFLOP/s`, from: [start, value], to: [high, value] };
  });
  const slanted = levels.map((roof) => {
    const end = Math.max(Math.min(high, (1000 * top) / roof.value), low);
    return { name: `${roof.of} ${number(roof.value)} GB/s`, from: [low, (low * roof.value) / 1000], to: [end, (end * roof.value) / 1000], slanted: true };
  });
  return [...level, ...slanted];
}

/** Return the powers of ten between two numbers. */
const decades = (low, high) => {
  const first = Math.ceil(Math.log10(low));
  return Array.from({ length: Math.floor(Math.log10(high)) - first + 1 }, (_, i) => 10 ** (first + i));
};

function roofline(rows) {
  const points = rows.flatMap((row) => row.step.kernels);
  const low = Math.min(LOW, ...points.filter((p) => p.share > 0.002).map((p) => 0.7 * p.intensity));
  const high = Math.max(HIGH, ...points.filter((p) => p.share > 0.002).map((p) => 1.4 * p.intensity));
  const all = rows.map((row) => lines(row, low, high));
  const ends = all.flat().flatMap((line) => [line.from[1], line.to[1]]);
  const least = Math.min(...ends) / ROOM;
  const most = Math.max(...ends, ...points.map((p) => p.tflops)) * 1.5;
  const label = rows.map((row) => row.step.sentence).join(" ");
  const roofs = all.flatMap((some, at) => some.map((line) => ({ ...line, at, x1: line.from[0], y1: line.from[1], x2: line.to[0], y2: line.to[1], stroke: colour(at) })));
  const dots = rows.flatMap((row, at) => row.step.kernels.map((p) => ({
    x: p.intensity, y: p.tflops, r: 1.5 + Math.sqrt((LARGEST * p.share) / Math.PI), fill: colour(at),
    tip: `${p.name} (${p.size}), ${number(p.count)} on ${row.device}: ${share(p.share)} of the step, ${number(p.tflops, 3)} TFLOP/s in ${p.data_type}, bound by ${p.bound}`,
  })));
  const chart = responsive((width) => {
    const [left, right, top, bottom] = [52, 28, 26, 42];
    const inX = (width - left - right) / Math.log10(high / low);
    const inY = (HEIGHT - top - bottom) / Math.log10(most / least);
    const name = { stroke: "var(--surface)", strokeWidth: 7, fill: "stroke", text: "name", dy: -7, fontSize: 11.5 };
    const isNarrow = width < 560;
    return drawn(label, {
      width, height: HEIGHT, marginLeft: left, marginRight: right, marginTop: top, marginBottom: bottom,
      x: { type: "log", domain: [low, high], label: "FLOP/byte", labelArrow: "none", clamp: true, ticks: decades(low, high), tickFormat: (x) => number(x) },
      y: { type: "log", domain: [least, most], label: "TFLOP/s", labelArrow: "none", clamp: true, grid: true, ticks: decades(least, most), tickFormat: (y) => number(y) },
      r: { type: "identity" },
      marks: [
        Plot.dot(dots, { x: "x", y: "y", r: "r", fill: "fill", fillOpacity: 0.7, stroke: "var(--surface)", strokeWidth: 0.75 }),
        Plot.link(roofs, { x1: "x1", y1: "y1", x2: "x2", y2: "y2", stroke: "stroke", strokeWidth: 2, className: "roofs" }),
        Plot.text(roofs.filter((line) => line.slanted), { ...name, x: "x1", y: "y1", textAnchor: "start", dx: 8, rotate: (-180 / Math.PI) * Math.atan2(inY, inX) }),
        !isNarrow && Plot.text(roofs.filter((line) => !line.slanted), { ...name, x: (line) => line.x2 * 10 ** (-(line.at * Math.min(170, (width - 80) / rows.length)) / inX), y: "y2", textAnchor: "end" }),
        tips(dots),
      ],
    });
  });
  return figure("Points are kernels; their area is their share of the step. Kernels other than products count one operation per element. Ceilings are from data sheets.",
    h("div", {}, legend(rows.map((row, at) => [row.device, at])), chart),
    () => h("div", {}, rows.map(ceilingTable), rows.map((row) => kernels(row.step.kernels, row.device))));
}

// Tables.

const ceilingTable = (row) => table(`Ceilings of ${row.device}`, [
  { name: "of", label: "Of", header: true, cell: (roof) => `${roof.kind}: ${roof.of}` },
  { name: "value", label: "Best", numeric: true, cell: (roof) => `${number(roof.value)} ${roof.unit}` },
], row.roofs, { hideCaption: true });

function ceilings(row) {
  const { step } = row;
  return card(row.device,
    table(`What bounds the step on ${row.device}`, [
      { name: "bound", label: "Bound by", header: true, cell: ([bound]) => BOUNDS[bound] },
      { name: "share", label: "Share of the step", numeric: true, cell: ([, part]) => share(part) },
    ], Object.entries(step.shares), { hideCaption: true }),
    ceilingTable(row));
}

const kernels = (points, device = "this device") => table(`Kernels on ${device}`, [
  { name: "name", label: "Kernel", header: true },
  { name: "size", label: "Size", cell: (p) => h("span", { class: "nowrap" }, p.size) },
  { name: "count", label: "Runs", numeric: true },
  { name: "share", label: "Share of the step", numeric: true, cell: (p) => share(p.share) },
  { name: "time_ms", label: "ms", numeric: true, cell: (p) => number(p.time_ms, 3) },
  { name: "bound", label: "Bound by", cell: (p) => p.bound ?? NOTHING },
  { name: "intensity", label: "FLOP/byte", numeric: true, cell: (p) => number(p.intensity, 3) },
  { name: "tflops", label: "TFLOP/s", numeric: true, cell: (p) => number(p.tflops, 3) },
], points, { hideCaption: true });
