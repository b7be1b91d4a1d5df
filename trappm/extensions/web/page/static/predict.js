// Predictions of a step: the question form, one device in detail or several compared, several GPUs, memory.

import { h, tell } from "./dom.js";
import { METRICS, NOTHING, bytes, hours, number, percent, share, words } from "./format.js";
import { get, post, query } from "./server.js";
import { card, choice, completion, empty, errorBox, facts, field, table, waiting } from "./parts.js";
import { cellInterval } from "./charts.js";
import { memoryCard } from "./estimate.js";

const EXAMPLE = { model: "resnet50", batch_size: "64" };
const DEFAULT_DEVICE = "a100-40gb";
const SETTINGS = { precision: "Precision", memory_format: "Memory format", optimizer: "Optimizer" };
const WHOLE = ["batch_size", "input_size", "gpus", "accumulation", "epochs", "samples"];
const STRATEGIES = { ddp: "Data parallel (DDP)", fsdp: "Fully sharded (FSDP)", tp: "Tensor parallel" };
const REMARKS_SHOWN = 3;
let file = null; // chosen or dropped file, which the address cannot contain

const isCpu = (device) => device.startsWith("cpu-");
const isTransformer = (model) => model.startsWith("hf:");

export async function predictView({ values, signal, main }) {
  const snapshots = (await get("api/snapshots", {}, signal)).data.snapshots.filter((x) => !x.damage);
  const known = (await get("v1/devices", {}, signal)).data;
  const { settings, only_measured: onlyMeasured } = (await get("api/devices", {}, signal)).data;
  const result = h("div", { class: "result", "aria-live": "off" });
  const form = questionForm(values, snapshots, { ...known, onlyMeasured }, settings, signal, (asked) => {
    const address = `#/predict?${query(asked)}`;
    if (location.hash !== address) history.replaceState(null, "", address);
    answer(asked, result, settings.optimizer, signal);
  });
  main.replaceChildren(h("h1", {}, "Predict"), form, result);
  if (values.model || file) answer(values, result, settings.optimizer, signal);
  else
    result.replaceChildren(
      empty("Predict the memory and time of a step", "Enter a model name or drop an ONNX file. The model is not run, and nothing leaves this machine.",
        "trappm compare resnet50 --batch-size 64"));
  return null;
}

function questionForm(values, snapshots, known, settings, signal, ask) {
  const problem = h("p", { class: "problem", role: "alert" });
  const fileName = h("p", { class: "file-name" });
  const model = h("input", { id: "model", name: "model", value: values.model ?? "", placeholder: EXAMPLE.model, autocomplete: "off", spellcheck: "false", maxlength: 200, list: "models" });
  const picker = h("input", { type: "file", accept: ".onnx", class: "unseen", id: "file" });
  const drop = h("div", { class: "drop" },
    h("label", { class: "button quiet", for: "file" }, "Choose an ONNX file"), picker, h("span", { class: "muted" }, " or drop it here"), fileName);
  const size = field("", "input_size", values.input_size, { inputmode: "numeric", placeholder: "model default" });
  const nameSize = () => size.querySelector("span").replaceChildren(isTransformer(model.value.trim()) ? "Sequence length, tokens" : "Input size, px");
  const devices = devicePicker(known, (values.devices ?? "").split(",").filter(Boolean), () => form.elements.phase.value);
  const form = h("form", { class: "card ask", novalidate: true },
    h("div", { class: "ask-model" },
      h("label", { class: "field", for: "model" }, h("span", {}, "Model (timm name or hf:name)"), model, completion(signal)), drop),
    h("div", { class: "filters" },
      field("Batch size (per GPU)", "batch_size", values.batch_size ?? (values.model ? "" : EXAMPLE.batch_size), { inputmode: "numeric", placeholder: "model default" }),
      size,
      choice("Phase", "phase", [["train", "training step"], ["infer", "inference step"]], values.phase ?? "train"),
      field("Number of GPUs", "gpus", values.gpus, { inputmode: "numeric", placeholder: "1" }),
      devices.element,
      h("div", { class: "buttons" }, h("button", { class: "primary" }, "Predict"))),
    h("details", { class: "more", open: ["accumulation", "epochs", "samples", "carbon_g_per_kwh", "snapshot", ...Object.keys(SETTINGS)].some((n) => values[n]) },
      h("summary", {}, "Training run and settings"),
      h("div", { class: "filters" },
        field("Passes per optimizer step", "accumulation", values.accumulation, { inputmode: "numeric", placeholder: "1" }),
        field("Epochs", "epochs", values.epochs, { inputmode: "numeric", placeholder: "90" }),
        field("Samples per epoch", "samples", values.samples, { inputmode: "numeric", placeholder: "1281167" }),
        field("g CO₂ per kWh", "carbon_g_per_kwh", values.carbon_g_per_kwh, { inputmode: "decimal", placeholder: "none" }),
        Object.entries(SETTINGS).map(([name, label]) => choice(label, name, [["", "default"], ...settings[name].map((o) => [o, o])], values[name] ?? "")),
        choice("Snapshot", "snapshot", [["", "latest, then default"], ...snapshots.map((x) => [x.aliases[0] ?? x.id, x.aliases.length ? `${x.aliases.join(", ")} (${x.id.slice(0, 8)})` : x.id.slice(0, 8)])], values.snapshot ?? "", null, "wide"))),
    problem);

  const take = (chosen) => {
    file = chosen;
    fileName.replaceChildren();
    if (!file) return;
    model.value = "";
    nameSize();
    fileName.append(`${file.name}, ${bytes(file.size)} `, h("button", { type: "button", class: "link", onclick: () => { picker.value = ""; take(null); } }, "Remove"));
    tell(`${file.name} is chosen`);
  };
  picker.addEventListener("change", () => take(picker.files[0] ?? null));
  model.addEventListener("input", () => { nameSize(); if (model.value && file) take(null); });
  for (const name of ["dragenter", "dragover"]) form.addEventListener(name, (event) => { event.preventDefault(); form.classList.add("dropping"); });
  for (const name of ["dragleave", "drop"]) form.addEventListener(name, (event) => { event.preventDefault(); form.classList.remove("dropping"); });
  form.addEventListener("drop", (event) => take(event.dataTransfer.files[0] ?? null));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    devices.add();
    const given = Object.fromEntries([...new FormData(form)].filter(([, v]) => typeof v === "string" && v.trim() !== "").map(([k, v]) => [k, v.trim()]));
    const asked = { ...given, devices: devices.chosen().join(",") };
    const wrong = mistake(asked);
    problem.replaceChildren();
    for (const input of form.querySelectorAll("[aria-invalid]")) input.removeAttribute("aria-invalid");
    if (!wrong) return ask(asked);
    problem.append(wrong.text);
    const input = form.querySelector(`[name="${wrong.name}"]`);
    input.setAttribute("aria-invalid", "true");
    input.focus();
    return undefined;
  });
  nameSize();
  if (file) take(file);
  return form;
}

/** Return buttons that remove the chosen devices, and a field to add a device by name. */
function devicePicker({ devices, catalogue, onlyMeasured }, given, phase) {
  const measured = Object.keys(devices);
  const gpus = measured.filter((key) => !isCpu(key));
  const listed = [...gpus, ...catalogue.filter((key) => !measured.includes(key)), ...measured.filter(isCpu)];
  let chosen = given.length ? given : [DEFAULT_DEVICE];
  const input = h("input", { id: "device", list: "devices", placeholder: "Add a device: t4", autocomplete: "off", spellcheck: "false" });
  const chips = h("span", { class: "chips" });
  const leftOut = h("span", { class: "muted" });
  // As `trappm compare` without devices: the GPUs that were measured in this phase.
  const compareAll = () => {
    const able = gpus.filter((key) => devices[key].metrics[phase()]);
    const others = gpus.filter((key) => !able.includes(key));
    chosen = able.length ? able : chosen;
    leftOut.replaceChildren(others.length ? ` Left out: ${others.join(", ")} (${onlyMeasured[phase() === "train" ? "infer" : "train"]})` : "");
    draw();
  };
  const draw = () => chips.replaceChildren(...chosen.map((key) =>
    h("button", { type: "button", class: "chip", "aria-label": `Remove ${key}`, onclick: () => { chosen = chosen.filter((other) => other !== key); draw(); } }, `${key} ×`)));
  const add = () => {
    chosen = [...new Set([...chosen, ...input.value.split(",").map((name) => name.trim()).filter(Boolean)])];
    input.value = "";
    draw();
  };
  input.addEventListener("change", add);
  draw();
  return {
    add,
    chosen: () => (chosen.length ? chosen : [DEFAULT_DEVICE]),
    element: h("div", { class: "field devices-field" },
      h("label", { for: "device" }, "Devices"),
      h("div", { class: "picker" }, chips, input, h("datalist", { id: "devices" }, listed.map((key) => h("option", { value: key }))),
        gpus.length > 1 && h("button", { type: "button", class: "link", onclick: compareAll }, "Compare all measured GPUs"), leftOut)),
  };
}

/** Return an error that can be detected without the server, if any. */
function mistake(asked) {
  if (!asked.model && !file) return { name: "model", text: "Enter a timm architecture, such as resnet50, or choose an ONNX file." };
  if (file && !file.name.toLowerCase().endsWith(".onnx")) return { name: "model", text: `${file.name} is not an ONNX file (.onnx). Export the model with torch.onnx.export.` };
  for (const name of WHOLE)
    if (asked[name] && !/^[1-9][0-9]{0,14}$/.test(asked[name])) return { name, text: `Invalid ${words(name)}: “${asked[name]}”. Enter a whole number of 1 or more.` };
  if (asked.carbon_g_per_kwh && !/^[0-9]+(\.[0-9]+)?$/.test(asked.carbon_g_per_kwh)) return { name: "carbon_g_per_kwh", text: "The carbon intensity must be a number of grams per kWh, such as 350." };
  if (Boolean(asked.epochs) !== Boolean(asked.samples)) return { name: asked.epochs ? "samples" : "epochs", text: "A training run needs both epochs and samples per epoch." };
  if (Number(asked.gpus) > 1 && file) return { name: "gpus", text: "Multi-GPU predictions need a model name. For a file, use: trappm scale model.onnx" };
  if (Number(asked.gpus) > 1 && asked.devices.split(",").every(isCpu)) return { name: "gpus", text: "Multi-GPU predictions need at least one GPU among the devices." };
  if (Number(asked.gpus) > 1 && asked.phase === "infer") return { name: "gpus", text: "Multi-GPU predictions support only training steps." };
  return null;
}

let asking = null;

async function answer(asked, result, optimizers, signal) {
  asking?.abort();
  asking = new AbortController();
  const mine = asking;
  signal.addEventListener("abort", () => mine.abort(), { once: true });
  const { gpus, ...question } = { ...asked, devices: (asked.devices || DEFAULT_DEVICE).split(",") };
  for (const name of WHOLE) if (question[name]) question[name] = Number(question[name]);
  if (question.carbon_g_per_kwh) question.carbon_g_per_kwh = Number(question.carbon_g_per_kwh);
  result.replaceChildren(waiting("Predicting; a new model takes some seconds"));
  try {
    const told = await post(file ? "v1/compare/upload" : "v1/compare", body(question), mine.signal);
    if (mine.signal.aborted) return;
    const shared = Number(gpus) > 1 ? [sharedCard(question, Number(gpus), mine.signal)] : [];
    result.replaceChildren(...shared, ...answers(told), ...(file ? [] : [memoryOf(question, told.predictions, optimizers, mine.signal)]).filter(Boolean));
    tell(`${told.predictions.length} predictions`);
  } catch (error) {
    if (!mine.signal.aborted) result.replaceChildren(errorBox(error));
  }
}

/** Return the memory card of the same step on GPUs. */
function memoryOf(question, predictions, optimizers, signal) {
  const [first] = predictions;
  const devices = predictions.filter((p) => p.capacity_mib && !isCpu(p.device)).map((p) => p.device);
  if (!devices.length) return null;
  const settings = Object.fromEntries(Object.keys(SETTINGS).map((name) => [name, question[name] ?? first[name]]));
  const size = question.input_size ? { input_size: question.input_size } : {};
  return memoryCard({ model: first.model, phase: first.phase, batch_size: first.batch_size, accumulation: first.accumulation, ...settings, ...size, devices }, optimizers, signal);
}

function body(question) {
  if (!file) return question;
  const form = new FormData();
  const { model: _, ...rest } = question;
  form.append("question", JSON.stringify(rest));
  form.append("file", file, file.name);
  return form;
}

// One GPU.

const range = (p, metric, digits = 3) => {
  const bounds = p.intervals[metric];
  return bounds ? `${number(bounds[0], digits)} to ${number(bounds[1], digits)}` : "";
};
const largestBatch = (p) => p.largest_batch;

function answers({ predictions, best, left_out: leftOut }) {
  const [first] = predictions;
  const title = `${first.phase === "train" ? "Training" : "Inference"} step of ${first.model}, batch ${number(first.batch_size)}${first.accumulation > 1 ? `, ${number(first.accumulation)} passes` : ""}`;
  const footer = h("p", { class: "muted" }, `Snapshot ${[...new Set(predictions.map((p) => p.snapshot))].join(", ")}. Intervals cover 90 % of new architectures.`);
  const notCompared = leftOut.length > 0 && h("p", { class: "notice" }, `Left out: ${leftOut.map((row) => `${row.device} (${row.reason})`).join("; ")}.`);
  if (predictions.length === 1) return [notCompared, deviceCard(first, title), remarks(predictions), footer].filter(Boolean);
  const verdicts = Object.entries(Object.values(best ?? {})[0] ?? {}).filter(([, device]) => device);
  return [
    verdicts.length > 0 && h("div", { class: "verdicts" }, verdicts.map(([what, device]) => h("div", { class: "verdict" }, h("span", { class: "muted" }, words(what)), h("b", {}, device)))),
    card(title, comparison(predictions)),
    notCompared,
    remarks(predictions),
    h("div", { class: "devices" }, predictions.map((p) => deviceCard(p, p.device))),
    footer,
  ].filter(Boolean);
}

/** Return each remark once, with its devices. */
function remarks(predictions) {
  const about = new Map();
  for (const p of predictions) for (const text of p.remarks) about.set(text, [...(about.get(text) ?? []), p.device]);
  if (!about.size) return null;
  const lines = [...about].map(([text, devices]) =>
    h("li", {}, predictions.length > 1 && [h("b", {}, devices.length === predictions.length ? "all devices" : devices.join(", ")), ": "], text));
  const more = lines.slice(REMARKS_SHOWN);
  return card("Remarks", h("ul", { class: "remarks" }, lines.slice(0, REMARKS_SHOWN)),
    more.length > 0 && h("details", {}, h("summary", {}, `${more.length} more`), h("ul", { class: "remarks" }, more)));
}

function comparison(predictions) {
  const spans = Object.fromEntries(["step_time_ms", "memory_mib"].map((metric) => {
    const all = predictions.flatMap((p) => p.intervals[metric] ?? []).filter((x) => x > 0);
    return [metric, all.length ? [Math.min(...all), Math.max(...all)] : null];
  }));
  const measure = (metric) => (p) => {
    if (p[metric] === null) return h("span", { class: "muted" }, "not predicted");
    const bounds = p.intervals[metric];
    return h("span", { class: "measure" }, h("b", {}, number(p[metric])), h("span", { class: "muted" }, range(p, metric)), bounds && spans[metric] && cellInterval(Math.max(bounds[0], 1e-9), p[metric], bounds[1], spans[metric]));
  };
  const run = predictions.some((p) => p.run);
  const some = (value) => predictions.some((p) => value(p) !== null);
  const columns = [
    { name: "device", label: "Device", header: true, cell: (p) => h("span", { class: "nowrap" }, p.device) },
    { name: "step_time_ms", label: "Step time, ms", cell: measure("step_time_ms") },
    { name: "samples_per_s", label: "Samples/s", numeric: true, cell: (p) => number(p.samples_per_s, 4) },
    { name: "memory_mib", label: "Memory, MiB", cell: measure("memory_mib") },
    { name: "out_of_memory", label: "P(out of memory)", numeric: true, cell: (p) => (p.out_of_memory === null ? NOTHING : h("span", { class: p.out_of_memory > 0.5 ? "bad" : p.out_of_memory > 0.05 ? "unsure" : "good" }, share(p.out_of_memory))) },
    some(largestBatch) && { name: "largest_batch", label: "Largest batch", numeric: true, cell: (p) => number(largestBatch(p)) },
    some((p) => p.mig_profile) && { name: "mig_profile", label: "MIG", cell: (p) => p.mig_profile ?? NOTHING },
    some((p) => p.power_w) && { name: "power_w", label: "Power, W", numeric: true, cell: (p) => number(p.power_w, 3) },
    run && { name: "hours", label: "Training run", numeric: true, cell: (p) => hours(p.run?.hours) },
    run && { name: "usd", label: "USD (from)", numeric: true, cell: (p) => (p.run?.offers.length ? number(p.run.offers[0].usd, 4) : NOTHING) },
  ].filter(Boolean);
  return table("Predictions by device; bars show intervals on a logarithmic scale", columns, predictions, { hideCaption: true });
}

function deviceCard(p, title) {
  const run = p.run;
  const gaps = Object.entries(p.missing);
  return card(title,
    h("p", {}, p.sentence),
    h("p", { class: "muted" }, `${p.precision}, ${p.memory_format}, ${p.optimizer}`),
    facts([
      ...["step_time_ms", "memory_mib", "power_w", "energy_j"].filter((m) => p[m] !== null).map((m) => [METRICS[m].name, `${number(p[m])} ${METRICS[m].unit}${p.intervals[m] ? ` (${range(p, m)})` : ""}`]),
      ["Throughput", p.samples_per_s === null ? null : `${number(p.samples_per_s)} samples/s`],
      ["P(out of memory)", p.out_of_memory === null ? null : `${share(p.out_of_memory)} of ${number(p.capacity_mib)} MiB`],
      ["Largest batch", largestBatch(p) === null ? null : number(largestBatch(p))], ["Smallest MIG profile", p.mig_profile],
      ["Training run", run && `${hours(run.hours)} (${hours(run.low_hours)} to ${hours(run.high_hours)}), ${number(run.steps)} steps`],
      ["Energy of the run", run?.energy_kwh ? `${number(run.energy_kwh)} kWh` : null], ["CO₂ of the run", run?.co2_kg ? `${number(run.co2_kg)} kg` : null],
    ]),
    run?.offers.length > 0 && table("Offers, cheapest first", [{ name: "cloud", label: "Cloud", header: true, cell: (o) => [o.cloud, h("br"), h("span", { class: "muted small" }, "noted ", h("span", { class: "nowrap" }, o.noted))] }, { name: "usd", label: "USD", numeric: true, cell: (o) => `${number(o.usd)} (${number(o.low_usd, 3)} to ${number(o.high_usd, 3)})` }, { name: "usd_per_hour", label: "USD per hour", numeric: true }], run.offers),
    gaps.length > 0 && h("details", {}, h("summary", {}, `Not predicted (${gaps.length})`), facts(gaps.map(([name, why]) => [METRICS[name]?.name ?? words(name), why]))));
}

// Several GPUs.

/** Return a card that loads the step on several GPUs with each strategy. */
function sharedCard(question, gpus, signal) {
  const slot = h("div", {}, waiting("Predicting the shared step"));
  const names = ["model", "batch_size", "input_size", "accumulation", "snapshot", ...Object.keys(SETTINGS)];
  const asked = Object.fromEntries(names.filter((name) => question[name]).map((name) => [name, question[name]]));
  post("v1/scale", { ...asked, devices: question.devices.filter((device) => !isCpu(device)), gpus: [gpus] }, signal).then(
    ({ predictions, refused }) => slot.replaceChildren(scalingTable(predictions), h("ul", { class: "remarks muted" }, refused.map((text) => h("li", {}, text)))),
    (error) => signal.aborted || slot.replaceChildren(errorBox(error)));
  return card(`Training step on ${number(gpus)} GPUs`, slot);
}

const scalingTable = (predictions) => table("Predictions by device and strategy", [
  { name: "device", label: "Device", header: true, cell: (p) => h("span", { class: "nowrap" }, p.nodes > 1 ? `${p.nodes} nodes of ${p.gpus} ${p.device}` : p.device) },
  { name: "strategy", label: "Strategy", cell: (p) => STRATEGIES[p.strategy] ?? p.strategy },
  { name: "step_time_ms", label: "Step time, ms", numeric: true, cell: (p) => `${number(p.step_time_ms)} (${range(p, "step_time_ms")})` },
  { name: "samples_per_s", label: "Samples/s", numeric: true },
  { name: "speedup", label: "Speedup", numeric: true, cell: (p) => number(p.speedup, 3) },
  { name: "exposed_ms", label: "Communication, share of step", numeric: true, cell: (p) => percent((100 * p.exposed_ms) / p.step_time_ms, 2) },
  { name: "memory_mib", label: "Memory per GPU, MiB", numeric: true },
  { name: "fits", label: "Fits", cell: (p) => (p.fits === null ? NOTHING : h("span", { class: p.fits ? "good" : "bad" }, p.fits ? "yes" : "no")) },
  { name: "usd_per_million", label: "USD per million samples", numeric: true, cell: (p) => number(p.usd_per_million, 3) },
], predictions, { hideCaption: true });
