// Map of a campaign's pool in the embedding space: labelled, pending and next configurations.

import * as Plot from "./vendor/plot.js";
import { h, tell } from "./dom.js";
import { number, strategyName, words } from "./format.js";
import { get, query } from "./server.js";
import { card, choice, empty, errorBox, explored, facts, table, waiting } from "./parts.js";
import { COLOURS, colour, drawn, legend, responsive } from "./charts.js";

// Kinds in drawing order; `colour` is the color of the kind where families have no color.
const KINDS = {
  pool: { name: "In the pool", mark: "○", symbol: "circle", r: 2.5, colour: 8 },
  "held out": { name: "Held out for evaluation", mark: "□", symbol: "square", r: 4, colour: 8, hollow: true },
  labelled: { name: "Labelled", mark: "●", symbol: "circle", r: 5, colour: 0 },
  pending: { name: "Pending", mark: "▲", symbol: "triangle", r: 6, colour: 4 },
  wanted: { name: "Next picks", mark: "★", symbol: "star", r: 8, colour: 5 },
};
const OTHERS = COLOURS - 2; // index of the gray color
const MOST_ZOOM = 40;
const REASONS = {
  uncertainty: "Uncertainty", distance_to_nearest_label: "Distance to the nearest label",
  predicted_step_time_ms: "Predicted step time, ms", probability_of_failure: "Probability of failure",
  variance_reduction: "Variance reduction", representation: "Share of the pool represented", rank_under_random: "Rank under random sampling", strategy: "Strategy",
};
const POLL_MS = 1000;

export async function mapView({ values, signal, main }) {
  const { campaigns } = (await get("api/campaigns", {}, signal)).data;
  const title = explored("Map of the embedding space", "map");
  if (!campaigns.length)
    return [title, empty("No campaign yet", "The map shows the embeddings of a campaign's pool.", "trappm campaign launch --preset laptop")];
  const id = values.campaign ?? campaigns[0].id;
  const campaign = campaigns.find((c) => c.id === id);
  const devices = Object.keys(campaign?.devices ?? {});
  const device = values.device ?? devices[0];
  const go = (changes) => (location.hash = `#/map?${query({ campaign: id, device, ...changes })}`);
  const form = h("div", { class: "filters" },
    choice("Campaign", "campaign", campaigns.map((c) => [c.id, `${c.name} (${c.id})`]), id, (e) => go({ campaign: e.target.value, device: null }), "wide"),
    devices.length > 1 && choice("Device", "device", devices.map((d) => [d, d]), device, (e) => go({ device: e.target.value })));
  const slot = h("div", { class: "result" }, waiting("Computing the map; the first time takes some seconds"));
  main.replaceChildren(title, form, slot);
  try {
    const data = await found(id, device, signal);
    slot.replaceChildren(...shown(data));
  } catch (error) {
    if (signal.aborted) return null;
    slot.replaceChildren(errorBox(error));
  }
  return null;
}

async function found(id, device, signal) {
  for (;;) {
    const { status, data } = await get(`api/campaigns/${encodeURIComponent(id)}/map`, { device }, signal);
    if (status !== 202) return data;
    await new Promise((done) => setTimeout(done, POLL_MS));
    signal.throwIfAborted();
  }
}

function shown(data) {
  const counts = Object.fromEntries(Object.keys(KINDS).map((kind) => [kind, data.points.filter((p) => p.kind === kind).length]));
  const hidden = new Set();
  const about = h("div", { class: "about", "aria-live": "polite" });
  const map = new PoolMap(data.points, hidden, (point) => about.replaceChildren(...tellPoint(point)));
  about.replaceChildren(...tellPoint(null));
  const toggles = h("fieldset", { class: "kinds" }, h("legend", { class: "unseen" }, "Kinds of configurations to show"),
    Object.entries(KINDS).filter(([kind]) => counts[kind]).map(([kind, one]) => {
      const box = h("input", { type: "checkbox", checked: true });
      box.addEventListener("change", () => { (box.checked ? hidden.delete(kind) : hidden.add(kind)); map.draw(); });
      return h("label", {}, box, h("span", { "aria-hidden": "true" }, one.mark), ` ${one.name} (${number(counts[kind])})`);
    }));
  const key = h("div", {}, map.legend());
  const colours = choice("Color", "colour", [["family", "by family"], ["kind", "by state"]], "family", (event) => {
    map.byFamily = event.target.value === "family";
    key.replaceChildren(map.legend());
    map.draw();
  });
  const zooms = h("div", { class: "buttons" }, [["+", "Zoom in", 1.6], ["−", "Zoom out", 1 / 1.6], ["All", "Show the whole map", 0]].map(([text, label, factor]) =>
    h("button", { type: "button", class: "quiet", "aria-label": label, onclick: () => map.scale(factor) }, text)));
  const wanted = data.wanted.map((w) => ({ ...w, point: data.points.find((p) => p.configuration === w.configuration) }));
  const reasons = Object.keys(REASONS).filter((r) => wanted.some((w) => typeof w.reason[r] === "number"));
  const columns = [
    { name: "configuration", label: "Configuration", header: true, cell: (w) => h("button", { type: "button", class: "link", onclick: () => { map.choose(w.point); map.box.scrollIntoView({ block: "nearest" }); } }, w.configuration) },
    ...reasons.map((r) => ({ name: r, label: REASONS[r], numeric: true, cell: (w) => number(w.reason[r], 3) })),
  ];
  return [
    h("div", { class: "map-columns" },
      card(`The pool on ${data.device}`, 
        h("div", { class: "between wrap" }, colours, zooms), toggles,
        h("figure", {}, key, map.box, h("figcaption", {}, `First two principal components of the embeddings; strategy: ${strategyName(data.strategy)}. Point at a configuration or use the arrow keys. Zoom with + and −, Ctrl and the wheel, two fingers or a double click.`,
          data.left_out ? ` ${number(data.left_out)} configurations of the pool are not drawn.` : ""))),
      card("Configuration", about)),
    card("Next picks", wanted.length ? table("Next picks of the strategy with their reasons", columns, wanted, { hideCaption: true }) : h("p", { class: "muted" }, "The pool has no configurations left to pick.")),
  ];
}

function tellPoint(point) {
  if (!point) return [h("p", { class: "muted" }, "Point at a configuration, or enter the map with Tab and use the arrow keys.")];
  const reason = Object.entries(point.reason ?? {}).map(([name, value]) => [REASONS[name] ?? words(name), typeof value === "number" ? number(value, 3) : strategyName(String(value))]);
  return [
    h("p", { class: "about-title" }, point.configuration),
    facts([["State", KINDS[point.kind].name], ["Family", point.family], ["Round", point.round ?? null], ...reason]),
    reason.length === 0 && h("p", { class: "muted" }, point.kind === "held out" ? "Drawn uniformly; its label is only used for evaluation." : "Not selected yet."),
  ].filter(Boolean);
}

class PoolMap {
  constructor(points, hidden, onChoose) {
    this.points = points;
    this.hidden = hidden;
    this.onChoose = onChoose;
    this.chosen = null;
    this.byFamily = true;
    this.view = Plot.zoomIdentity;
    const counts = new Map();
    for (const p of points) counts.set(p.family, (counts.get(p.family) ?? 0) + 1);
    this.families = [...counts].sort((a, b) => b[1] - a[1]).map(([name]) => name);
    this.stage = h("div", { class: "stage", tabindex: 0, role: "application", "aria-roledescription": "map" });
    this.box = responsive((width) => {
      this.size = [width, Math.max(280, Math.min(560, Math.round(width * 0.62)))];
      this.zoom.extent([[0, 0], this.size]).translateExtent([[0, 0], this.size]);
      this.draw();
      return this.stage;
    }, "map");
    this.zoom = Plot.zoom().scaleExtent([1, MOST_ZOOM])
      .filter((event) => !event.button && (event.type !== "wheel" || event.ctrlKey) && (event.type !== "touchstart" || event.touches.length > 1 || this.view.k > 1))
      .on("zoom", ({ transform }) => { this.view = transform; this.draw(); });
    Plot.select(this.stage).call(this.zoom);
    this.stage.addEventListener("pointermove", (event) => this.point(event));
    this.stage.addEventListener("pointerdown", (event) => this.point(event));
    this.stage.addEventListener("keydown", (event) => this.key(event));
  }

  /** Zoom in by a factor; 0 shows the whole map. */
  scale(factor) {
    const stage = Plot.select(this.stage);
    if (factor) stage.call(this.zoom.scaleBy, factor);
    else stage.call(this.zoom.transform, Plot.zoomIdentity);
  }

  /** Give the largest families their own colors, and the others gray. */
  index(point) {
    if (!this.byFamily) return KINDS[point.kind].colour;
    const at = this.families.indexOf(point.family);
    return Math.min(at, OTHERS);
  }

  legend() {
    if (!this.byFamily) return legend([]);
    const own = this.families.slice(0, OTHERS).map((name, at) => [name, at]);
    const rest = this.families.length - own.length;
    return legend(rest > 0 ? [...own, [`${number(rest)} other families`, OTHERS]] : own);
  }

  draw() {
    if (!this.size) return;
    const [width, height] = this.size;
    const spread = (values, from, to) => {
      const low = Math.min(...values), high = Math.max(...values);
      return (v) => (high > low ? from + ((v - low) / (high - low)) * (to - from) : (from + to) / 2);
    };
    const xs = spread(this.points.map((p) => p.x), 18, width - 18);
    const ys = spread(this.points.map((p) => p.y), height - 18, 18);
    this.shown = this.points.filter((p) => !this.hidden.has(p.kind))
      .map((point) => ({ point, x: this.view.applyX(xs(point.x)), y: this.view.applyY(ys(point.y)), fill: colour(this.index(point)) }));
    const label = `Map of ${this.shown.length} configurations`;
    this.stage.setAttribute("aria-label", `${label}. Arrow keys move to the nearest configuration in that direction, + and - zoom, 0 shows all, Escape leaves it.`);
    const svg = drawn(label, {
      width, height, margin: 0, x: { type: "identity", axis: null }, y: { type: "identity", axis: null },
      marks: Object.entries(KINDS).map(([kind, { symbol, r, hollow }]) => Plot.dot(this.shown.filter((one) => one.point.kind === kind), {
        x: "x", y: "y", r, symbol, className: `kind-${kind.replace(" ", "-")}`,
        ...(hollow ? { stroke: "fill", strokeWidth: 1.25 } : { fill: "fill", stroke: "var(--surface)", strokeWidth: r > 3 ? 1 : 0 }),
      })),
    });
    this.ring = h("span", { class: "ring" });
    this.stage.replaceChildren(svg, this.ring);
    this.mark();
  }

  point(event) {
    const at = this.stage.getBoundingClientRect();
    const x = event.clientX - at.left, y = event.clientY - at.top;
    let best = null, distance = 18 ** 2;
    for (const one of this.shown) {
      const d = (one.x - x) ** 2 + (one.y - y) ** 2;
      if (d <= distance) [best, distance] = [one.point, d];
    }
    if (best && best !== this.chosen) this.choose(best);
  }

  key(event) {
    const way = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (event.key === "Escape") return this.choose(null);
    if (["+", "=", "-", "0"].includes(event.key)) return this.scale({ "-": 1 / 1.6, 0: 0 }[event.key] ?? 1.6);
    if (!way || !this.shown.length) return undefined;
    event.preventDefault();
    const from = this.shown.find((one) => one.point === this.chosen);
    if (!from) return this.choose(this.shown[this.shown.length - 1].point);
    let best = null, least = Infinity;
    for (const one of this.shown) {
      const along = (one.x - from.x) * way[0] + (one.y - from.y) * way[1];
      const across = Math.abs((one.x - from.x) * way[1]) + Math.abs((one.y - from.y) * way[0]);
      if (along > 0.01 && along + 2 * across < least) [best, least] = [one.point, along + 2 * across];
    }
    return best && this.choose(best);
  }

  choose(point) {
    this.chosen = point;
    this.mark();
    this.onChoose(point);
    if (point) tell(`${point.configuration}, ${KINDS[point.kind].name}`);
  }

  mark() {
    const one = this.shown?.find((x) => x.point === this.chosen);
    if (!this.ring) return;
    this.ring.hidden = !one;
    if (one) [this.ring.style.left, this.ring.style.top] = [`${one.x}px`, `${one.y}px`];
  }
}
