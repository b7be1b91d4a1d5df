// Label table with filters, sorting and pages, and a dialog with the raw samples of a label.

import { h } from "./dom.js";
import { METRICS, NOTHING, metricName, number, percent, time, words } from "./format.js";
import { download, get, query } from "./server.js";
import { card, choice, empty, errorBox, facts, field, figure, pill, table, waiting } from "./parts.js";
import { xyChart } from "./charts.js";

const SELECTS = { device: "Device", family: "Family", phase: "Phase", provenance: "Provenance", precision: "Precision", memory_format: "Memory format", optimizer: "Optimizer", execution: "Execution", metric: "Has metric", outcome: "Attempt outcome", campaign: "Campaign" };
const SIZES = [["25", "25"], ["50", "50"], ["100", "100"], ["200", "200"]];
const MANY = 4; // number of filters that are always visible

const unit = (name) => METRICS[name]?.unit;

export async function labelsView({ values, signal, main }) {
  const { label, ...asked } = values;
  const title = h("h1", {}, asked.outcome ? "Attempts" : "Labels");
  const names = (await get("api/labels/names", {}, signal)).data;
  if (!names.device.length)
    return [title, empty("No label yet", "A campaign measures labels, and published ones can be imported:", "trappm campaign launch --preset laptop", "trappm labels import labels.parquet")];
  const go = (changes) => (location.hash = `#/labels?${query({ ...asked, page: null, ...changes })}`);
  const result = h("div", { class: "result" }, waiting());
  const before = document.activeElement?.name;
  const opened = main.querySelector(".more")?.open || Object.keys(asked).some((k) => Object.keys(SELECTS).indexOf(k) >= MANY);
  main.replaceChildren(title, filters(asked, names, go, opened), result);
  if (before) main.querySelector(`[name="${CSS.escape(before)}"]`)?.focus();
  try {
    const { data } = await get("api/labels", asked, signal);
    result.replaceChildren(...rows(data, asked, go));
  } catch (error) {
    if (signal.aborted) return null;
    result.replaceChildren(errorBox(error));
  }
  if (label) await openLabel(label, signal, () => go({ page: asked.page }));
  return null;
}

function filters(asked, names, go, opened) {
  const pick = (name) => choice(SELECTS[name], name, [["", "all"], ...names[name].map((n) => [n, n])], asked[name] ?? "", (e) => go({ [name]: e.target.value, sort: name === "outcome" ? null : asked.sort }));
  const [first, more] = [Object.keys(SELECTS).slice(0, MANY), Object.keys(SELECTS).slice(MANY)];
  const form = h("form", { class: "filters", role: "search", "aria-label": "Filter labels" },
    field("Architecture", "architecture", asked.architecture, { list: "architectures", placeholder: "resnet50 or resnet*", autocomplete: "off", spellcheck: "false" }, "wide"),
    h("datalist", { id: "architectures" }, names.architecture.slice(0, 2000).map((a) => h("option", { value: a }))),
    first.map(pick),
    field("Batch size", "batch_size", asked.batch_size, { type: "number", min: 1, max: 1000000, placeholder: "all" }),
    field("Where", "where", asked.where, { placeholder: "step_time_ms > 100", autocomplete: "off", spellcheck: "false" }, "wide"),
    h("div", { class: "buttons" }, h("button", {}, "Filter"), h("a", { class: "button quiet", href: "#/labels" }, "Clear")),
    h("details", { class: "more", open: opened }, h("summary", {}, "More filters"),
      h("div", { class: "filters" }, more.map(pick),
        field("Input size, px or tokens", "input_size", asked.input_size, { type: "number", min: 1, max: 1000000, placeholder: "all" }),
        field("Columns", "columns", asked.columns, { placeholder: "all", autocomplete: "off", spellcheck: "false" }),
        field("Protocol", "protocol", asked.protocol, { placeholder: "all", autocomplete: "off" }),
        field("Since", "since", asked.since, { placeholder: "2026-11-21 or 7d", autocomplete: "off" }),
        field("Until", "until", asked.until, { placeholder: "2026-11-21 or 1d", autocomplete: "off" }))));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    go(Object.fromEntries(new FormData(form)));
  });
  return h("div", { class: "card" }, form);
}

function rows(data, asked, go) {
  const { total, page, size } = data;
  const count = data.more_than_total ? `more than ${number(total)}` : number(total);
  const what = asked.outcome ? "attempts" : "labels";
  if (!data.rows.length)
    return [empty(page > 1 ? "No such page" : `No ${what} match the filter`, page > 1 ? "The list has become shorter." : "Widen or clear the filter.")];
  const same = ["precision", "memory_format", "optimizer", "phase", "execution", "protocol", "provenance"].filter((n) => data.rows.length > 1 && new Set(data.rows.map((r) => r[n])).size === 1);
  const hidden = new Set([...same, "fingerprint", "message", ...Object.keys(data.rows[0]).filter((n) => data.rows.every((r) => r[n] === null))]);
  const order = ["id", "architecture", "family", "batch_size", "input_size", "device", ...Object.keys(METRICS), "memory_above_mib", "outcome"];
  const shown = [...order, ...Object.keys(data.rows[0]).filter((n) => !order.includes(n))].filter((n) => n in data.rows[0] && !hidden.has(n));
  const columns = shown.map((name) => ({
    name, header: name === "id", numeric: typeof data.rows.find((r) => r[name] !== null)?.[name] === "number",
    label: name === "memory_above_mib" ? "Memory above, MiB" : unit(name) ? metricName(name) : words(name).replace(/^./, (c) => c.toUpperCase()),
    cell: (row) => {
      if (name === "id") return asked.outcome ? String(row.id) : h("a", { href: `#/labels?${query({ ...asked, label: row.id })}`, "aria-label": `Label ${row.id}: ${row.architecture ?? ""}` }, String(row.id));
      if (name.endsWith("_at")) return h("span", { class: "nowrap" }, time(row[name]));
      if (["outcome", "provenance"].includes(name)) return pill(row[name]);
      if (name === "architecture") return h("span", { class: "long" }, row.architecture);
      if (name === "device") return h("span", { class: "nowrap" }, row.device);
      return row[name] === null ? NOTHING : row[name];
    },
  }));
  const by = (asked.sort ?? "architecture").replace(/^-/, "");
  const descending = (asked.sort ?? "").startsWith("-");
  const sort = { by, descending, choose: (column) => go({ sort: column === by && !descending ? `-${column}` : column }) };
  const onRow = asked.outcome ? null : (row, event) => !event.target.closest("a") && !getSelection().toString() && (location.hash = `#/labels?${query({ ...asked, label: row.id })}`);
  const pages = Math.max(1, Math.ceil(total / size));
  const goPage = (number_) => go({ page: number_ > 1 ? number_ : null });
  const told = h("p", { class: "muted" }, "");
  const getFile = (kind) => async (event) => {
    event.target.disabled = true;
    try {
      const { page: _, size: __, ...filter } = asked;
      await download(`api/labels/download/${kind}`, filter, `labels.${kind}`);
      told.replaceChildren();
    } catch (error) {
      told.replaceChildren(errorBox(error));
    }
    event.target.disabled = false;
  };
  return [
    h("div", { class: "card" },
      h("div", { class: "between wrap" },
        h("p", {}, h("b", {}, `${count} ${what}`), same.length ? h("span", { class: "muted" }, `; all of this page: ${same.map((n) => data.rows[0][n]).filter(Boolean).join(", ")}`) : ""),
        h("div", { class: "buttons" }, h("button", { type: "button", class: "quiet", onclick: getFile("csv") }, "Download CSV"), h("button", { type: "button", class: "quiet", onclick: getFile("json") }, "Download JSON"))),
      told,
      table(`${what}, page ${page} of ${pages}`, columns, data.rows, { sort, onRow, hideCaption: true, note: (row) => row.message }),
      h("nav", { class: "between wrap", "aria-label": "Pages" },
        h("div", { class: "buttons" },
          h("button", { type: "button", class: "quiet", disabled: page <= 1, onclick: () => goPage(page - 1) }, "← Before"),
          h("span", {}, `Page ${number(page)} of ${data.more_than_total ? "many" : number(pages)}`),
          h("button", { type: "button", class: "quiet", disabled: data.rows.length < size || (!data.more_than_total && page >= pages), onclick: () => goPage(page + 1) }, "Next →")),
        choice("Rows", "size", SIZES, String(size), (e) => go({ size: e.target.value })))),
  ];
}

async function openLabel(id, signal, onClose) {
  const body = h("div", {}, waiting());
  const close = h("button", { type: "button", class: "quiet", "aria-label": "Close" }, "Close");
  const dialog = h("dialog", { class: "sheet", "aria-label": `Label ${id}` }, h("div", { class: "sheet-close" }, close), body);
  close.addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  dialog.addEventListener("close", () => {
    dialog.remove();
    if (!signal.aborted) onClose();
  });
  signal.addEventListener("abort", () => dialog.open && dialog.close(), { once: true });
  document.body.append(dialog);
  dialog.showModal();
  try {
    body.replaceChildren(...labelFacts((await get(`api/labels/${encodeURIComponent(id)}`, {}, signal)).data));
  } catch (error) {
    if (!signal.aborted) body.replaceChildren(errorBox(error));
  }
}

/** Return a chart of the runs of one configuration on one device over time. */
function runs(attempts) {
  const timed = attempts.filter((a) => a.step_time_ms && a.started_at);
  if (timed.length < 2) return null;
  const series = [...new Set(["ok", ...timed.map((a) => a.outcome)])].filter((name) => timed.some((a) => a.outcome === name)).map((name) => ({
    name,
    points: timed.filter((a) => a.outcome === name).map((a) => ({ x: new Date(a.started_at), y: a.step_time_ms, tip: `${time(a.started_at)}, ${name}: ${number(a.step_time_ms)} ms` })),
  }));
  const caption = `Step times of the ${timed.length} runs of this configuration on this device by start time.`;
  return figure(caption, xyChart({ series, lines: true, zero: true, xType: "time", xLabel: "start", yLabel: "step time, ms", label: caption, height: 200 }));
}

function labelFacts(label) {
  const m = label.measurement;
  const metrics = Object.keys(METRICS).map((name) => ({ name, value: label[name], why: name === "memory_mib" && label.memory_above_mib !== null ? `more than ${number(label.memory_above_mib)} (out of memory)` : m.missing?.[name] }));
  const samples = m.step_samples_ms ?? [];
  const caption = `Raw step times in measurement order${m.step ? `; the label is their median, ${number(m.step.median_ms)} ms` : ""}.`;
  const listed = (values) => Object.entries(values ?? {}).map(([k, v]) => [words(k), typeof v === "number" ? number(v) : String(v)]);
  return [
    h("h2", {}, `Label ${label.id}`),
    h("p", { class: "about-title" }, `${label.title}, on ${label.device}`),
    h("p", {}, pill(label.provenance), h("span", { class: "muted" }, ` by protocol ${label.protocol} · made ${time(label.created_at)}`)),
    table("Metrics", [{ name: "name", label: "Metric", header: true, cell: (r) => METRICS[r.name].name }, { name: "value", label: "Value", numeric: true, cell: (r) => (r.value === null ? NOTHING : `${number(r.value, 5)} ${METRICS[r.name].unit}`) }, { name: "why", label: "Remark", cell: (r) => (r.value === null ? (r.why ?? "the source does not tell") : "") }], metrics, { hideCaption: true }),
    samples.length > 1
      ? figure(caption, xyChart({ series: [{ name: "step", points: samples.map((y, i) => ({ x: i + 1, y, tip: `step ${i + 1}: ${number(y)} ms` })) }], rules: m.step ? [{ y: m.step.median_ms, name: "median" }] : [], xLabel: "step", yLabel: "step time, ms", label: caption, height: 230 }),
          () => table("Step times", [{ name: "i", label: "Step", numeric: true }, { name: "y", label: "Step time, ms", numeric: true }], samples.map((y, i) => ({ i: i + 1, y }))))
      : h("p", { class: "muted" }, "The source of this label has no raw samples."),
    m.step && facts([["Mean", `${number(m.step.mean_ms)} ms`], ["Interquartile range", `${number(m.step.iqr_ms)} ms`], ["95th percentile", `${number(m.step.p95_ms)} ms`], ["Forward", m.step.forward_share === null ? null : percent(100 * m.step.forward_share)], ["Backward", m.step.backward_share === null ? null : percent(100 * m.step.backward_share)], ["Optimizer", m.step.optimizer_share === null ? null : percent(100 * m.step.optimizer_share)]]),
    runs(label.attempts),
    card("Provenance", facts([["Stack", label.fingerprint], ["Worker", m.worker], ["Attempt", m.attempt_key], ["Began", time(m.started_at)], ["Took", m.duration_s ? `${number(m.duration_s, 3)} s` : null]]),
      h("details", {}, h("summary", {}, "Environment"), facts(listed(m.environment))),
      h("details", {}, h("summary", {}, `${label.attempts.length === 1 ? "One attempt" : `${label.attempts.length} attempts`} at this configuration on this device`), table("Attempts", [{ name: "id", label: "Id", numeric: true, cell: (r) => String(r.id) }, { name: "outcome", label: "Outcome", cell: (r) => pill(r.outcome) }, { name: "started_at", label: "Began", cell: (r) => time(r.started_at) }, { name: "step_time_ms", label: metricName("step_time_ms"), numeric: true }, { name: "memory_mib", label: metricName("memory_mib"), numeric: true }], label.attempts, { hideCaption: true, note: (r) => r.message }))),
  ].filter(Boolean);
}
