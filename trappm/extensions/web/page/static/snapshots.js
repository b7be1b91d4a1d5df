// Snapshots: list, aliases, and errors of their heads.

import { h } from "./dom.js";
import { METRICS, NOTHING, bytes, number, percent, time } from "./format.js";
import { get } from "./server.js";
import { card, choice, command, empty, facts, figure, table } from "./parts.js";
import { cellBar, targetRows } from "./charts.js";

export async function snapshotsView({ parts, signal, main }) {
  return parts.length ? oneOf(parts[0], signal, main) : all(signal);
}

const names = (aliases) => aliases.map((a) => h("span", { class: "pill pill-alias" }, a));
const counted = (counts) => Object.entries(counts ?? {}).map(([k, n]) => `${number(n)} ${k}`).join(", ") || NOTHING;

async function all(signal) {
  const { snapshots } = (await get("api/snapshots", {}, signal)).data;
  const columns = [
    { name: "id", label: "Snapshot", header: true, cell: (r) => (r.damage ? h("span", { class: "code" }, r.id) : h("a", { href: `#/snapshots/${r.id}`, class: "code" }, r.id)) },
    { name: "aliases", label: "Aliases", cell: (r) => names(r.aliases) },
    { name: "devices", label: "Devices", cell: (r) => (r.damage ? h("span", { class: "bad" }, r.damage) : r.devices.join(", ")) },
    { name: "training_labels", label: "Labels", cell: (r) => counted(r.training_labels) },
    { name: "campaign", label: "Campaign", cell: (r) => (r.campaign ? h("a", { href: `#/campaigns/${r.campaign}`, class: "code" }, r.campaign) : NOTHING) },
    { name: "created_at", label: "Made", cell: (r) => time(r.created_at) },
  ];
  return [
    h("h1", {}, "Snapshots"),
    h("div", { class: "card" }, table("Snapshots of this machine, the latest first; default ships with trappm", columns, snapshots, { hideCaption: true })),
    snapshots.length <= 1 && empty("No snapshots from this machine yet", "Campaigns publish snapshots. Pull a shared snapshot with:", "trappm campaign launch --preset laptop", "trappm snapshot pull latest --registry s3://bucket/snapshots"),
  ].filter(Boolean);
}

async function oneOf(name, signal, main) {
  const data = (await get(`api/snapshots/${encodeURIComponent(name)}`, {}, signal)).data;
  const { manifest } = data;
  const largest = Math.max(...data.heads.map((x) => x.mape ?? 0));
  const heads = [
    { name: "device", label: "Device", header: true }, { name: "phase", label: "Phase" },
    { name: "metric", label: "Metric", cell: (r) => METRICS[r.metric]?.name ?? r.metric },
    { name: "labels", label: "Labels", numeric: true }, { name: "count", label: "Evaluated on", numeric: true },
    { name: "mape", label: "Mean error (MAPE)", cell: (r) => (r.mape === null ? "not available" : cellBar(r.mape, largest, percent(r.mape))) },
    { name: "median_ape", label: "Median error", numeric: true, cell: (r) => percent(r.median_ape) },
    { name: "coverage", label: "In the 90 % interval", numeric: true, cell: (r) => percent(r.coverage) },
  ];
  const size = Object.values(manifest.files).reduce((sum, f) => sum + f.bytes, 0);
  const text = JSON.stringify(manifest, null, 2);
  const families = h("div", {});
  const drawFamilies = (chosen) => families.replaceChildren(familyErrors(data, chosen, drawFamilies));
  main.replaceChildren(...[
    h("p", { class: "crumbs" }, h("a", { href: "#/snapshots" }, "Snapshots"), " / ", data.id),
    h("h1", {}, "Snapshot ", h("span", { class: "code" }, data.id.slice(0, 8)), " ", names(data.aliases)),
    h("div", { class: "tiles" },
      card("Properties", facts([
        ["Created", time(manifest.created_at)], ["Size", bytes(size)], ["Source device", manifest.source_device],
        ["Campaign", manifest.campaign ? h("a", { href: `#/campaigns/${manifest.campaign}` }, manifest.campaign) : "none"],
        ["Parent", manifest.parent ? h("a", { href: `#/snapshots/${manifest.parent}`, class: "code" }, manifest.parent.slice(0, 8)) : null],
        ["Labels", counted(Object.values(manifest.training_labels?.counts ?? {}).reduce((sum, by) => { for (const [k, n] of Object.entries(by)) sum[k] = (sum[k] ?? 0) + n; return sum; }, {}))],
        ["Versions", Object.entries(manifest.versions).map(([k, v]) => `${k} ${v}`).join(", ")],
      ])),
      card("Usage", h("p", {}, "Use it on the Predict page, or with:"), command(`trappm predict resnet50 --batch-size 64 --snapshot ${data.aliases[0] ?? data.id.slice(0, 8)}`), h("p", {}, "Copy it to a folder:"), command(`trappm snapshot pull ${data.aliases[0] ?? data.id.slice(0, 8)} --to copy`), h("p", {}, h("a", { href: `#/predict?snapshot=${data.aliases[0] ?? data.id}` }, "Predict with this snapshot")))),
    card("Errors by head", table("Errors of each head on held-out architectures", heads, data.heads, { hideCaption: true }), manifest.split && h("p", { class: "muted" }, `Evaluation split: ${manifest.split}.`)),
    reliability(manifest),
    families,
    manifest.sources?.length > 0 && card("Sources", table("Published training labels", [{ name: "file", label: "File", header: true }, { name: "source", label: "Source" }, { name: "device", label: "Device" }, { name: "phase", label: "Phase" }, { name: "metric", label: "Metric", cell: (r) => METRICS[r.metric]?.name ?? r.metric }, { name: "labels", label: "Labels", numeric: true }], manifest.sources, { hideCaption: true })),
    card("Manifest", h("details", {}, h("summary", {}, "Full manifest as JSON"), h("pre", { tabindex: 0 }, text))),
  ].filter(Boolean));
  drawFamilies(null);
  return null;
}

const MIN_JUDGED = 20; // minimum number of measurements for a coverage estimate

/** Return a card with the coverage of 50 % and 90 % intervals by head. */
function reliability(manifest) {
  const order = Object.keys(METRICS);
  const rows = Object.entries(manifest.errors ?? {}).flatMap(([device, phases]) => Object.entries(phases).flatMap(([phase, metrics]) =>
    Object.entries(metrics ?? {}).filter(([, judged]) => judged?.count >= MIN_JUDGED && judged.reliability).map(([metric, { count, reliability }]) => ({ head: `${METRICS[metric]?.name ?? metric}, ${device}, ${phase}`, metric, count, reliability }))))
    .sort((a, b) => order.indexOf(a.metric) - order.indexOf(b.metric));
  if (!rows.length) return null;
  const shown = [50, 80, 90, 95];
  const says = (r, i) => percent(r.reliability[i]);
  return card("Interval coverage", figure(`Coverage of 50 % and 90 % intervals on held-out architectures, for heads evaluated on ${MIN_JUDGED} or more measurements. Points left of the dashed line are intervals that are too narrow, points right of it are too wide.`,
    targetRows({
      rows: rows.map((r) => ({ name: r.head, values: [r.reliability[50], r.reliability[90]], tip: `${r.head}, ${number(r.count)} measurements\n50 % interval: ${says(r, 50)} inside\n90 % interval: ${says(r, 90)} inside` })),
      targets: [{ at: 50, name: "50 % intervals", kind: 1 }, { at: 90, name: "90 % intervals", kind: 0 }],
      xLabel: "Measurements inside, %", label: "Coverage of 50 % and 90 % intervals by head",
    }),
    () => table("Interval coverage", [{ name: "head", label: "Head", header: true }, { name: "count", label: "Evaluated on", numeric: true }, ...shown.map((i) => ({ name: `i${i}`, label: `${i} %`, numeric: true, cell: (r) => says(r, i) }))], rows, { hideCaption: true })));
}

function familyErrors(data, chosen, choose) {
  if (!data.families.length)
    return card("Errors by family", empty("No errors by family", "The manifest of this snapshot has only errors by head. Evaluate by family with:", "python -m research evaluate --help"));
  const key = (r) => [r.device, r.phase, r.metric].filter(Boolean).join(" · ");
  const groups = [...new Set(data.families.map(key))];
  const group = groups.includes(chosen) ? chosen : groups[0];
  const rows = data.families.filter((r) => key(r) === group).sort((a, b) => b.mape - a.mape);
  const largest = Math.max(...rows.map((r) => r.mape));
  const { metric, device } = rows[0];
  return card("Errors by family",
    groups.length > 1 && choice("Head", "head", groups.map((g) => [g, g.split(" · ").map((w) => METRICS[w]?.name ?? w).join(" · ")]), group, (e) => choose(e.target.value)),
    figure(`Mean absolute percentage error of ${METRICS[metric]?.name.toLowerCase() ?? metric} on ${device}, held-out architectures, by family.`,
      table("Errors by family", [{ name: "family", label: "Family", header: true }, { name: "count", label: "Evaluated on", numeric: true }, { name: "mape", label: "Mean error (MAPE)", cell: (r) => cellBar(r.mape, largest, percent(r.mape)) }], rows, { hideCaption: true })));
}
