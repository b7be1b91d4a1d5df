// What a step of a model costs on every device: a timm name or an ONNX file, and the answers side by side.

import { h, tell } from "./dom.js";
import { METRICS, NOTHING, bytes, hours, number, percent, share } from "./format.js";
import { get, post, query } from "./server.js";
import { card, choice, completion, empty, errorBox, facts, field, pill, table, waiting } from "./parts.js";
import { cellInterval } from "./charts.js";
import { memoryCard } from "./estimate.js";

const EXAMPLE = { model: "resnet50", batch_size: "64" };
const SETTINGS = {
  precision: ["Precision", ["fp32", "amp-fp16", "amp-bf16"]],
  memory_format: ["Memory format", ["contiguous", "channels-last"]],
  optimizer: ["Optimizer", ["sgd", "momentum", "adam", "adamw"]],
};
const WHOLE = ["batch_size", "input_size", "epochs", "samples"];
let file = null; // chosen or dropped; it cannot stand in an address

export async function predictView({ values, signal, main }) {
  const snapshots = (await get("api/snapshots", {}, signal)).data.snapshots.filter((x) => !x.damage);
  const result = h("div", { class: "result", "aria-live": "off" });
  const form = questionForm(values, snapshots, signal, (asked) => {
    const address = `#/predict?${query(asked)}`;
    if (location.hash !== address) history.replaceState(null, "", address);
    answer(asked, result, signal);
  });
  main.replaceChildren(h("h1", {}, "Predict"), form, result);
  if (values.model || file) answer(values, result, signal);
  else
    result.replaceChildren(
      empty("What does a step cost?", "Type a timm name or drop an ONNX file. Nothing is run: the heads of a snapshot answer, and nothing leaves this machine.",
        "trappm compare resnet50 --batch-size 64"));
  return null;
}

function questionForm(values, snapshots, signal, ask) {
  const problem = h("p", { class: "problem", role: "alert" });
  const fileName = h("p", { class: "file-name" });
  const model = h("input", { id: "model", name: "model", value: values.model ?? "", placeholder: EXAMPLE.model, autocomplete: "off", spellcheck: "false", maxlength: 200, list: "models" });
  const known = completion(signal);
  const picker = h("input", { type: "file", accept: ".onnx", class: "unseen", id: "file" });
  const drop = h("div", { class: "drop" },
    h("label", { class: "button quiet", for: "file" }, "Choose an ONNX file"), picker, h("span", { class: "muted" }, " or drop it here"), fileName);
  const form = h("form", { class: "card ask", novalidate: true },
    h("div", { class: "ask-model" },
      h("label", { class: "field", for: "model" }, h("span", {}, "Model: a timm name, or hf: and a transformer's"), model, known), drop),
    h("div", { class: "filters" },
      field("Batch size", "batch_size", values.batch_size ?? (values.model ? "" : EXAMPLE.batch_size), { inputmode: "numeric", placeholder: "its own" }),
      choice("Phase", "phase", [["train", "training step"], ["infer", "inference step"]], values.phase ?? "train"),
      choice("Snapshot", "snapshot", [["", "latest, then default"], ...snapshots.map((x) => [x.aliases[0] ?? x.id, x.aliases.length ? `${x.aliases.join(", ")} (${x.id.slice(0, 8)})` : x.id.slice(0, 8)])], values.snapshot ?? "", null, "wide"),
      h("div", { class: "buttons" }, h("button", { class: "primary" }, "Predict"))),
    h("details", { class: "more", open: ["epochs", "samples", "carbon_g_per_kwh", "input_size", ...Object.keys(SETTINGS)].some((n) => values[n]) },
      h("summary", {}, "A whole run, and settings"),
      h("div", { class: "filters" },
        field("Epochs", "epochs", values.epochs, { inputmode: "numeric", placeholder: "90" }),
        field("Samples an epoch", "samples", values.samples, { inputmode: "numeric", placeholder: "1281167" }),
        field("g CO₂ per kWh", "carbon_g_per_kwh", values.carbon_g_per_kwh, { inputmode: "decimal", placeholder: "not told" }),
        field("Input size, px", "input_size", values.input_size, { inputmode: "numeric", placeholder: "its own" }),
        Object.entries(SETTINGS).map(([name, [label, options]]) => choice(label, name, [["", "as most labels"], ...options.map((o) => [o, o])], values[name] ?? "")))),
    problem);

  const take = (chosen) => {
    file = chosen;
    fileName.replaceChildren();
    if (!file) return;
    model.value = "";
    fileName.append(`${file.name}, ${bytes(file.size)} `, h("button", { type: "button", class: "link", onclick: () => { picker.value = ""; take(null); } }, "Remove"));
    tell(`${file.name} is chosen`);
  };
  picker.addEventListener("change", () => take(picker.files[0] ?? null));
  model.addEventListener("input", () => model.value && file && take(null));
  for (const name of ["dragenter", "dragover"]) form.addEventListener(name, (event) => { event.preventDefault(); form.classList.add("dropping"); });
  for (const name of ["dragleave", "drop"]) form.addEventListener(name, (event) => { event.preventDefault(); form.classList.remove("dropping"); });
  form.addEventListener("drop", (event) => take(event.dataTransfer.files[0] ?? null));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const asked = Object.fromEntries([...new FormData(form)].filter(([, v]) => typeof v === "string" && v.trim() !== "").map(([k, v]) => [k, v.trim()]));
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
  if (file) take(file);
  return form;
}

/** What can be seen to be wrong before anybody is asked. */
function mistake(asked) {
  if (!asked.model && !file) return { name: "model", text: "Name a timm architecture, such as resnet50, or choose an ONNX file." };
  if (file && !file.name.toLowerCase().endsWith(".onnx")) return { name: "model", text: `${file.name} is not named as an ONNX file (.onnx); export the model with torch.onnx.export.` };
  for (const name of WHOLE)
    if (asked[name] && !/^[1-9][0-9]{0,14}$/.test(asked[name])) return { name, text: `${name.replace("_", " ")} is “${asked[name]}”; it must be a whole number of 1 or more.` };
  if (asked.carbon_g_per_kwh && !/^[0-9]+(\.[0-9]+)?$/.test(asked.carbon_g_per_kwh)) return { name: "carbon_g_per_kwh", text: "The carbon intensity must be a number of grams per kWh, such as 350." };
  if (Boolean(asked.epochs) !== Boolean(asked.samples)) return { name: asked.epochs ? "samples" : "epochs", text: "A whole run needs both epochs and samples of an epoch." };
  return null;
}

let asking = null;

async function answer(asked, result, signal) {
  asking?.abort();
  asking = new AbortController();
  const mine = asking;
  signal.addEventListener("abort", () => mine.abort(), { once: true });
  const question = { ...asked, devices: "all" };
  for (const name of WHOLE) if (question[name]) question[name] = Number(question[name]);
  if (question.carbon_g_per_kwh) question.carbon_g_per_kwh = Number(question.carbon_g_per_kwh);
  result.replaceChildren(waiting("Asking; a model that was never asked about takes some seconds"));
  try {
    const told = await post(file ? "v1/compare/upload" : "v1/compare", body(question), mine.signal);
    if (mine.signal.aborted) return;
    result.replaceChildren(...answers(told), ...(file ? [] : [memoryOf(question, told.predictions, mine.signal)]).filter(Boolean));
    tell(`${told.predictions.length} answers`);
  } catch (error) {
    if (!mine.signal.aborted) result.replaceChildren(errorBox(error));
  }
}

/** Of the same step, as labels had it where nothing else was asked for; on cards, not on cores. */
function memoryOf(question, predictions, signal) {
  const [first] = predictions;
  const devices = predictions.filter((p) => p.model === first.model && p.capacity_mib && !p.device.startsWith("cpu-")).map((p) => p.device);
  if (!devices.length) return null;
  const settings = Object.fromEntries(Object.keys(SETTINGS).map((name) => [name, question[name] ?? first[name]]));
  const size = question.input_size ? { input_size: question.input_size } : {};
  return memoryCard({ model: first.model, phase: first.phase, batch_size: first.batch_size, ...settings, ...size, devices }, signal);
}

function body(question) {
  if (!file) return question;
  const form = new FormData();
  const { model: _, ...rest } = question;
  form.append("question", JSON.stringify(rest));
  form.append("file", file, file.name);
  return form;
}

const range = (p, metric, digits = 3) => {
  const bounds = p.intervals[metric];
  return bounds ? `${number(bounds[0], digits)} to ${number(bounds[1], digits)}` : "";
};

function answers({ predictions, best }) {
  const verdict = Object.values(best ?? {})[0] ?? {};
  const told = Object.entries(verdict).filter(([, device]) => device);
  return [
    told.length > 0 && h("div", { class: "verdicts" }, told.map(([what, device]) => h("div", { class: "verdict" }, h("span", { class: "muted" }, what.replace("_", " ")), h("b", {}, device)))),
    card(`${predictions[0].phase === "train" ? "Training" : "Inference"} step of ${predictions[0].model}, batch ${number(predictions[0].batch_size)}`, comparison(predictions)),
    remarks(predictions),
    h("div", { class: "devices" }, predictions.map(deviceCard)),
    h("p", { class: "muted" }, `Snapshot ${[...new Set(predictions.map((p) => p.snapshot))].join(", ")}. Intervals hold 90 % of new architectures; bars show them on a logarithmic scale.`),
  ].filter(Boolean);
}

/** What is to be known before an answer is relied on: each remark once, with the devices that it is about. */
function remarks(predictions) {
  const about = new Map();
  for (const p of predictions) for (const text of p.remarks) about.set(text, [...(about.get(text) ?? []), p.device]);
  if (!about.size) return null;
  return card("Remarks", h("ul", { class: "remarks" }, [...about].map(([text, devices]) =>
    h("li", {}, h("b", {}, devices.length === predictions.length && devices.length > 1 ? "all devices" : devices.join(", ")), `: ${text}`))));
}

function comparison(predictions) {
  const spans = Object.fromEntries(["step_time_ms", "memory_mib"].map((metric) => {
    const all = predictions.flatMap((p) => p.intervals[metric] ?? []).filter((x) => x > 0);
    return [metric, all.length ? [Math.min(...all), Math.max(...all)] : null];
  }));
  const measure = (metric) => (p) => {
    if (p[metric] === null) return h("span", { class: "muted" }, "no head");
    const bounds = p.intervals[metric];
    return h("span", { class: "measure" }, h("b", {}, number(p[metric])), h("span", { class: "muted" }, range(p, metric)), bounds && spans[metric] && cellInterval(Math.max(bounds[0], 1e-9), p[metric], bounds[1], spans[metric]));
  };
  const run = predictions.some((p) => p.run);
  const columns = [
    { name: "device", label: "Device", header: true, cell: (p) => h("span", { class: "nowrap" }, p.device) },
    { name: "step_time_ms", label: "Step time, ms", cell: measure("step_time_ms") },
    { name: "samples_per_s", label: "Samples/s", numeric: true, cell: (p) => number(p.samples_per_s, 4) },
    { name: "memory_mib", label: "Memory, MiB", cell: measure("memory_mib") },
    { name: "out_of_memory", label: "P(out of memory)", numeric: true, cell: (p) => (p.out_of_memory === null ? NOTHING : h("span", { class: p.out_of_memory > 0.5 ? "bad" : p.out_of_memory > 0.05 ? "unsure" : "good" }, share(p.out_of_memory))) },
    { name: "largest_batch", label: "Largest batch", numeric: true, cell: (p) => number(p.largest_batch) },
    { name: "mig_profile", label: "MIG", cell: (p) => p.mig_profile ?? NOTHING },
    { name: "power_w", label: "Power, W", numeric: true, cell: (p) => number(p.power_w, 3) },
    run && { name: "hours", label: "Whole run", numeric: true, cell: (p) => hours(p.run?.hours) },
    run && { name: "usd", label: "USD, at least", numeric: true, cell: (p) => (p.run?.offers.length ? number(p.run.offers[0].usd, 4) : NOTHING) },
  ].filter((c) => c && (["device", "step_time_ms", "memory_mib"].includes(c.name) || predictions.some((p) => !["power_w", "mig_profile", "largest_batch"].includes(c.name) || p[c.name] !== null)));
  return table("Answers of all devices", columns, predictions, { hideCaption: true });
}

function deviceCard(p) {
  const run = p.run;
  const gaps = Object.entries(p.missing);
  return card(p.device,
    h("p", {}, p.sentence),
    h("p", { class: "muted" }, `in ${p.precision}, ${p.memory_format}, ${p.optimizer}`),
    facts([
      ...["step_time_ms", "memory_mib", "power_w", "energy_j"].filter((m) => p[m] !== null).map((m) => [METRICS[m].name, `${number(p[m])} ${METRICS[m].unit}${p.intervals[m] ? ` (${range(p, m)})` : ""}`]),
      ["Throughput", p.samples_per_s === null ? null : `${number(p.samples_per_s)} samples a second`],
      ["P(out of memory)", p.out_of_memory === null ? null : `${share(p.out_of_memory)} of ${number(p.capacity_mib)} MiB`],
      ["Largest batch that fits", p.largest_batch === null ? null : number(p.largest_batch)], ["Smallest MIG profile", p.mig_profile],
      ["Whole run", run && `${hours(run.hours)} (${hours(run.low_hours)} to ${hours(run.high_hours)}), ${number(run.steps)} steps`],
      ["Energy of the run", run?.energy_kwh ? `${number(run.energy_kwh)} kWh` : null], ["CO₂ of the run", run?.co2_kg ? `${number(run.co2_kg)} kg` : null],
    ]),
    run?.offers.length > 0 && table("Offers, the cheapest first", [{ name: "cloud", label: "Cloud", header: true, cell: (o) => [o.cloud, h("br"), h("span", { class: "muted small" }, "noted ", h("span", { class: "nowrap" }, o.noted))] }, { name: "usd", label: "USD", numeric: true, cell: (o) => `${number(o.usd)} (${number(o.low_usd, 3)} to ${number(o.high_usd, 3)})` }, { name: "usd_per_hour", label: "USD an hour", numeric: true }], run.offers),
    gaps.length > 0 && h("details", {}, h("summary", {}, `What is not told (${gaps.length})`), facts(gaps.map(([name, why]) => [METRICS[name]?.name ?? name.replaceAll("_", " "), why]))));
}
