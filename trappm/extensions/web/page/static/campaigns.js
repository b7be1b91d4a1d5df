// List of campaigns, and progress of one campaign with live updates.

import { h, tell } from "./dom.js";
import { METRICS, NOTHING, duration, hours, metricName, number, percent, strategyName, time } from "./format.js";
import { get } from "./server.js";
import { bar, card, choice, command, empty, errorBox, facts, figure, pill, table } from "./parts.js";
import { xyChart } from "./charts.js";

const PERIOD_MS = 2000;
const IDLE_MS = 5000;

export async function campaignsView({ parts, values, signal, main }) {
  return parts.length ? one(parts[0], values, signal, main) : all(signal);
}

async function all(signal) {
  const { campaigns } = (await get("api/campaigns", {}, signal)).data;
  if (!campaigns.length)
    return [
      h("h1", {}, "Campaigns"),
      empty("No campaign yet", "A campaign measures the configurations that improve the predictor most. This one runs on the cores of this machine:", "trappm campaign launch --preset laptop"),
    ];
  const columns = [
    { name: "name", label: "Campaign", header: true, cell: (c) => h("a", { href: `#/campaigns/${c.id}` }, `${c.name} `, h("span", { class: "muted code" }, c.id)) },
    { name: "state", label: "State", cell: (c) => [pill(c.state), c.next_command && command(c.next_command)] },
    { name: "devices", label: "Labels by device", cell: (c) => Object.entries(c.devices).map(([device, n]) => h("span", { class: "device-count" }, `${device} `, h("b", {}, number(n.done)), n.failed ? h("span", { class: "muted" }, `, ${n.failed} not measured`) : "")) },
    { name: "seed", label: "Seed", numeric: true, cell: (c) => String(c.seed) },
    { name: "created_at", label: "Launched", cell: (c) => time(c.created_at) },
    { name: "finished_at", label: "Ended", cell: (c) => time(c.finished_at) },
  ];
  return [h("h1", {}, "Campaigns"), h("div", { class: "card" }, table("All campaigns, latest first", columns, campaigns, { hideCaption: true }))];
}

async function one(id, values, signal, main) {
  const path = `api/campaigns/${encodeURIComponent(id)}`;
  let chosen = values.metric ?? "step_time_ms";
  let data = (await get(path, {}, signal)).data;
  const slots = Object.fromEntries(["head", "summary", "errors", "pace", "predicted", "people", "events"].map((name) => [name, h("div", { class: `slot slot-${name}` })]));
  let drawn = {};

  /** Redraw only changed parts, so that the page does not jump. */
  function put(name, told, build) {
    const text = JSON.stringify(told);
    if (drawn[name] === text) return;
    drawn[name] = text;
    slots[name].replaceChildren(...[build()].flat().filter(Boolean));
  }

  function draw() {
    put("head", [data.state, data.next_command, data.rehearsal_on, data.snapshot], () => heading(data));
    put("summary", [data.devices, data.minutes_to_go, data.cost, data.end, data.state, data.missing, why(data)], () => summary(data));
    put("errors", [data.errors, data.targets, chosen], () => errors(data, chosen, (metric) => { chosen = metric; draw(); }));
    put("pace", [data.pace, data.devices, data.outcomes, data.state], () => pace(data));
    put("predicted", [data.predicted, chosen], () => predicted(data, chosen));
    put("people", [data.working, data.canary, data.outcomes], () => workers(data));
    put("events", [data.events, data.transfer], () => events(data));
  }

  draw();
  main.replaceChildren(slots.head, slots.summary, h("div", { class: "columns" }, slots.errors, slots.pace), h("div", { class: "columns" }, slots.predicted, slots.events), slots.people);
  follow();
  return null;

  function follow() {
    const wait = data.state === "running" ? PERIOD_MS : IDLE_MS;
    const timer = setTimeout(async () => {
      if (signal.aborted) return;
      if (!document.hidden) {
        try {
          const before = data.state;
          data = (await get(path, {}, signal)).data;
          if (data.state !== before) tell(`The campaign is ${data.state}`);
          slots.head.querySelector(".error")?.remove();
          draw();
        } catch (error) {
          if (signal.aborted) return;
          if (!slots.head.querySelector(".error")) slots.head.append(errorBox(error));
        }
      }
      follow();
    }, wait);
    signal.addEventListener("abort", () => clearTimeout(timer), { once: true });
  }
}

function heading(data) {
  return [
    h("p", { class: "crumbs" }, h("a", { href: "#/campaigns" }, "Campaigns"), " / ", data.id),
    h("h1", {}, `${data.name} `, pill(data.state), data.state === "running" && h("span", { class: "live" }, "live")),
    h("p", { class: "muted" }, [`seed ${data.seed}`, data.strategy && `strategy: ${strategyName(data.strategy)}`, data.protocol && `protocol: ${data.protocol}`, `launched ${time(data.created_at)}`, data.finished_at && `ended ${time(data.finished_at)}`].filter(Boolean).join(" · ")),
    h("p", { class: "buttons" }, h("a", { class: "button quiet", href: `#/labels?campaign=${data.id}` }, "Labels"),
      data.snapshot && h("a", { class: "button quiet", href: `#/snapshots/${data.snapshot}` }, "Snapshot")),
    data.next_command && h("div", { class: "notice" }, h("p", {}, data.state === "paused" ? "The campaign is paused. Resume it with:" : "The campaign's process has ended. All labels are stored; resume it with:"), command(data.next_command)),
    data.rehearsal_on.length > 0 && h("p", { class: "notice" }, `A rehearsal: ${data.rehearsal_on.join(", ")} is simulated. These values were not measured on a real device, and no snapshot is published.`),
  ];
}

function summary(data) {
  const ended = ["finished", "cancelled"].includes(data.state);
  const devices = Object.entries(data.devices).map(([device, n]) =>
    h("div", { class: "device-progress" },
      h("div", { class: "between" }, h("b", {}, device), h("span", {}, `${number(n.done)} of ${number(n.budget)} measured`)),
      bar(n.done, n.budget, `${device}: measured of planned`),
      h("p", { class: "muted" }, [
        n.failed && `${n.failed} could not be measured`, n.measuring && `${n.measuring} in progress`,
        !ended && `${number(n.attempts_per_minute, 3)} per minute recently`,
      ].filter(Boolean).join(" · "))));
  const cost = data.cost;
  return h("div", { class: "tiles" },
    card("Labels", devices),
    card("Time and cost", facts([
      ["Time left", ended ? null : duration(data.minutes_to_go)],
      ...["gpu", "cpu"].filter((kind) => cost[`${kind}_hours`] || cost[`${kind}_hours_to_come`]).flatMap((kind) => [
        [`${kind.toUpperCase()} time used`, hours(cost[`${kind}_hours`])],
        [`${kind.toUpperCase()} time left, expected`, ended ? null : cost[`${kind}_hours_to_come`] === null ? NOTHING : hours(cost[`${kind}_hours_to_come`])],
      ]),
      ["Cost so far", cost.money === null ? "no price in the campaign file" : number(cost.money, 4)],
      ["Remaining cost, expected", cost.money_to_come === null || ended ? null : number(cost.money_to_come, 4)],
    ])),
    card(ended ? "Result" : data.state === "failed" ? "Why it failed" : data.end?.holds ? "Why it ends" : "Expected end", ended && ending(data), outlook(data, ended)));
}

/** Return the measured and missing parts of the plan, and the command to complete it, if any. */
function ending(data) {
  const devices = Object.entries(data.devices);
  const total = (name) => devices.reduce((sum, [, n]) => sum + n[name], 0);
  const [done, planned] = ["done", "budget"].map(total);
  const measured = done === planned ? `All ${number(planned)} configurations were measured` : `${number(done)} of ${number(planned)} configurations were measured`;
  const text = `${data.state === "finished" ? "Finished" : "Cancelled; all labels are stored"}. ${measured}`;
  if (!data.missing) return h("p", {}, `${text}.`);
  const { text: missing, command: retry } = data.missing;
  return [
    h("p", {}, `${text}. ${retry ? missing.replace(retry, "").trim() : missing}`),
    retry && command(retry),
  ];
}

/** Return the message of the failed process. */
const why = (data) => (data.state === "failed" ? data.events.find((e) => e.kind === "failed")?.message : undefined);

function outlook(data, ended) {
  if (ended && !data.end?.holds) return null;
  if (why(data)) return h("p", {}, why(data));
  if (!data.end) return h("p", { class: "muted" }, "No forecast yet: no training has finished.");
  return [
    facts([["Rule", data.end.rule], ["Labels at the end", data.end.labels ?? null], ["Planned but not measured", data.end.unmeasured ?? null], ["Expected", data.end.at ? `about ${time(data.end.at)}` : null]]),
    h("p", {}, data.end.reason),
  ];
}

const known = (data) => Object.keys(METRICS).filter((m) => data.errors.some((r) => Object.values(r.devices).some((d) => m in d)));

function errors(data, chosen, choose) {
  const metrics = known(data);
  if (!metrics.length)
    return card("Error by round", empty("No evaluation yet", "The error on held-out architectures appears after the first training."));
  const metric = metrics.includes(chosen) ? chosen : metrics[0];
  const devices = [...new Set(data.errors.flatMap((r) => Object.keys(r.devices)))];
  const series = devices.map((device) => ({
    name: device,
    kind: Object.keys(data.devices).indexOf(device),
    points: data.errors.filter((r) => r.devices[device]?.[metric]).map((r) => ({
      x: r.labels[device] ?? 0, y: r.devices[device][metric].mape,
      tip: `${device}, round ${r.round}: ${percent(r.devices[device][metric].mape)} with ${r.labels[device]} labels`,
    })),
  })).filter((one) => one.points.length);
  const target = data.targets[metric];
  const caption = `Mean absolute percentage error of ${METRICS[metric].name.toLowerCase()} on held-out architectures by number of training labels.${target ? ` The target of the stop rule is ${target} %.` : ""}`;
  const rows = data.errors.flatMap((r) => Object.entries(r.devices).map(([device, by]) => ({ round: r.round, purpose: r.purpose, device, labels: r.labels[device], judged: by[metric]?.count, ...Object.fromEntries(metrics.map((m) => [m, by[m]?.mape])) })));
  const columns = [
    { name: "round", label: "Round", numeric: true }, { name: "purpose", label: "Purpose" }, { name: "device", label: "Device" },
    { name: "labels", label: "Trained on", numeric: true }, { name: "judged", label: "Evaluated on", numeric: true },
    ...metrics.map((m) => ({ name: m, label: `${METRICS[m].name}, MAPE`, numeric: true, cell: (r) => percent(r[m]) })),
  ];
  return card("Error by round",
    metrics.length > 1 && choice("Metric", "metric", metrics.map((m) => [m, METRICS[m].name]), metric, (e) => choose(e.target.value)),
    figure(caption,
      xyChart({ lines: true, zero: true, series, rules: target ? [{ y: target, name: `target ${target} %` }] : [], xLabel: "labels trained on", yLabel: "MAPE, %", label: caption }),
      () => table("Error on held-out architectures", columns, rows)));
}

function pace(data) {
  const { series, minutes_each: each } = data.pace;
  const names = Object.keys(series ?? {});
  if (!names.length) {
    const done = Object.values(data.devices).reduce((sum, n) => sum + n.done, 0);
    const attempts = Object.values(data.outcomes).flatMap(Object.values).reduce((sum, n) => sum + n, 0);
    if (attempts && !done)
      return card("Labels per minute", empty("No label yet", `None of ${number(attempts)} ${attempts === 1 ? "attempt" : "attempts"} produced a label. Their outcomes are listed below.`));
    return card("Labels per minute", done
      ? empty("No rate", `The rate needs two labels measured by this campaign. It has ${number(done)} ${done === 1 ? "label" : "labels"}, including earlier ones.`)
      : empty("Nothing measured yet", "The rate appears after two attempts.", ...(data.state === "running" ? [`trappm campaign status ${data.id} --follow`] : [])));
  }
  const lines = names.map((device) => ({
    name: device,
    kind: Object.keys(data.devices).indexOf(device),
    points: series[device].map((rate, i) => ({ x: (i + 0.5) * each, y: rate, tip: `${device}: ${number(rate, 3)} per minute` })),
  }));
  const caption = "Labels per minute by device since the first measurement.";
  return card("Labels per minute", figure(caption,
    xyChart({ lines: true, zero: true, series: lines, xLabel: "minutes since the first measurement", yLabel: "labels per minute", label: caption, dots: false }),
    () => table(caption, [{ name: "at", label: "From minute", numeric: true }, ...names.map((d) => ({ name: d, label: d, numeric: true, cell: (r) => number(r[d], 3) }))],
      series[names[0]].map((_, i) => ({ at: i * each, ...Object.fromEntries(names.map((d) => [d, series[d][i]])) })))));
}

function predicted(data, chosen) {
  const metrics = [...new Set(data.predicted.map((p) => p.metric))];
  if (!metrics.length) return card("Predicted against measured", empty("No evaluation yet", "Predictions of the evaluation set appear after the first training."));
  const metric = metrics.includes(chosen) ? chosen : metrics[0];
  const mine = data.predicted.filter((p) => p.metric === metric && p.measured > 0 && p.predicted > 0);
  const devices = [...new Set(mine.map((p) => p.device))];
  const unit = METRICS[metric].unit;
  const series = devices.map((device) => ({
    name: device,
    kind: Object.keys(data.devices).indexOf(device),
    points: mine.filter((p) => p.device === device).map((p) => ({ x: p.measured, y: p.predicted, tip: `${p.architecture} on ${device}: measured ${number(p.measured)}, predicted ${number(p.predicted)} ${unit}` })),
  }));
  const caption = `${metricName(metric)} of the evaluation set as predicted by the latest heads. Both are equal on the line.`;
  return card("Predicted against measured", figure(caption,
    xyChart({ series, xLabel: `measured, ${unit}`, yLabel: `predicted, ${unit}`, label: caption, xType: "log", yType: "log", diagonal: true }),
    () => table(caption, [{ name: "architecture", label: "Architecture" }, { name: "device", label: "Device" }, { name: "measured", label: `Measured, ${unit}`, numeric: true }, { name: "predicted", label: `Predicted, ${unit}`, numeric: true }], mine)));
}

function workers(data) {
  const working = data.working.length
    ? table("Running now", [{ name: "worker", label: "Worker", cell: (r) => h("span", { class: "code" }, r.worker) }, { name: "device", label: "Device" }, { name: "configuration", label: "Configuration" }, { name: "attempt", label: "Attempt", numeric: true }], data.working)
    : h("p", { class: "muted" }, data.state === "running" ? "No worker is measuring at the moment." : "The campaign is not running.");
  const canary = data.canary.length
    ? table("Canary: drift of each device", [
        { name: "device", label: "Device" }, { name: "host", label: "Host" }, { name: "readings", label: "Readings", numeric: true },
        { name: "failed", label: "Failed", numeric: true, cell: (r) => { const failed = r.step_times_ms.filter((ms) => ms === null).length; return failed ? h("span", { class: "bad" }, number(failed)) : number(failed); } },
        { name: "reference_ms", label: "Reference, ms", numeric: true }, { name: "last_ms", label: "Last, ms", numeric: true },
        { name: "last_drift", label: "Drift", numeric: true, cell: (r) => (r.last_drift === null ? NOTHING : percent(100 * r.last_drift)) },
        { name: "decision", label: "Decision", cell: (r) => pill(r.last_ms === null && r.decision === "ok" ? "unstable" : r.decision) }, { name: "taken_at", label: "Taken", cell: (r) => time(r.taken_at) },
      ], data.canary, { note: (r) => r.message })
    : h("p", { class: "muted" }, "No canary was measured. Configure it under canary in the campaign file.");
  const outcomes = Object.entries(data.outcomes).flatMap(([device, by]) => Object.entries(by).map(([outcome, count]) => ({ device, outcome, count })));
  return card("Workers and canaries", working, canary,
    outcomes.length > 0 && table("Attempts by outcome", [{ name: "device", label: "Device" }, { name: "outcome", label: "Outcome", cell: (r) => pill(r.outcome) }, { name: "count", label: "Attempts", numeric: true }], outcomes));
}

function events(data) {
  const transfer = Object.entries(data.transfer).flatMap(([device, by]) => Object.entries(by).map(([metric, e]) => ({ device, metric, ...e })));
  return card("Events",
    transfer.length > 0 && table("Error of transferred heads", [{ name: "device", label: "Device" }, { name: "metric", label: "Metric", cell: (r) => METRICS[r.metric]?.name ?? r.metric }, { name: "from_scratch", label: "From scratch", numeric: true, cell: (r) => percent(r.from_scratch) }, { name: "transferred", label: "Transferred", numeric: true, cell: (r) => percent(r.transferred) }], transfer),
    data.events.length
      ? h("ol", { class: "events" }, data.events.map((e) => h("li", {}, h("time", { datetime: e.at }, time(e.at)), h("b", {}, e.kind), h("span", {}, e.message))))
      : h("p", { class: "muted" }, "No events."));
}
