// The pool of a campaign in the embedding space: what is labelled, what waits, what is wanted next.

import { h, s, tell } from "./dom.js";
import { number, words } from "./format.js";
import { get, query } from "./server.js";
import { card, choice, empty, errorBox, facts, table, waiting } from "./parts.js";

const KINDS = {
  pool: { name: "In the pool", path: circle(2.5) },
  "held out": { name: "Held out for evaluation", path: square(2.6) },
  labelled: { name: "Labelled", path: circle(5) },
  pending: { name: "Waits to be measured", path: "M0,-6.5L6,5H-6Z" },
  wanted: { name: "Wanted next", path: star(8) },
};
const REASONS = {
  uncertainty: "Uncertainty", distance_to_nearest_label: "Distance to the nearest label",
  predicted_step_time_ms: "Predicted step time, ms", probability_of_failure: "Probability of failure",
  variance_reduction: "How much it teaches", representation: "How much of the pool it stands for", rank_under_random: "Rank under a random draw", strategy: "Strategy",
};
const POLL_MS = 1000;

function circle(r) { return `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0`; }
function square(r) { return `M${-r},${-r}H${r}V${r}H${-r}Z`; }
function star(r) {
  const points = Array.from({ length: 10 }, (_, i) => {
    const angle = (Math.PI * i) / 5 - Math.PI / 2;
    const size = i % 2 ? r * 0.45 : r;
    return `${(size * Math.cos(angle)).toFixed(2)},${(size * Math.sin(angle)).toFixed(2)}`;
  });
  return `M${points.join("L")}Z`;
}

export async function mapView({ values, signal, main }) {
  const { campaigns } = (await get("api/campaigns", {}, signal)).data;
  const title = h("h1", {}, "Map of the embedding space");
  if (!campaigns.length)
    return [title, empty("No campaign yet", "The map shows the pool of a campaign as its encoder sees it.", "trappm campaign launch --preset laptop")];
  const id = values.campaign ?? campaigns[0].id;
  const campaign = campaigns.find((c) => c.id === id);
  const devices = Object.keys(campaign?.devices ?? {});
  const device = values.device ?? devices[0];
  const go = (changes) => (location.hash = `#/map?${query({ campaign: id, device, ...changes })}`);
  const form = h("div", { class: "filters" },
    choice("Campaign", "campaign", campaigns.map((c) => [c.id, `${c.name} (${c.id})`]), id, (e) => go({ campaign: e.target.value, device: null }), "wide"),
    devices.length > 1 && choice("Device", "device", devices.map((d) => [d, d]), device, (e) => go({ device: e.target.value })));
  const slot = h("div", { class: "result" }, waiting("Working out the map; the first time this takes some seconds"));
  main.replaceChildren(title, form, slot);
  try {
    const data = await found(id, device, signal);
    slot.replaceChildren(...drawn(data));
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

function drawn(data) {
  const counts = Object.fromEntries(Object.keys(KINDS).map((kind) => [kind, data.points.filter((p) => p.kind === kind).length]));
  const hidden = new Set();
  const about = h("div", { class: "about", "aria-live": "polite" });
  const plot = new Plot(data.points, hidden, (point) => about.replaceChildren(...tellPoint(point)));
  about.replaceChildren(...tellPoint(null));
  const toggles = h("fieldset", { class: "kinds" }, h("legend", { class: "unseen" }, "Kinds of configurations to show"),
    Object.entries(KINDS).filter(([kind]) => counts[kind]).map(([kind, one]) => {
      const box = h("input", { type: "checkbox", checked: true });
      box.addEventListener("change", () => { (box.checked ? hidden.delete(kind) : hidden.add(kind)); plot.draw(); });
      return h("label", {}, box, s("svg", { width: 18, height: 18, viewBox: "-9 -9 18 18", "aria-hidden": "true" }, s("path", { class: `kind-${kind.replace(" ", "-")}`, d: one.path })), ` ${one.name} (${number(counts[kind])})`);
    }));
  const wanted = data.wanted.map((w) => ({ ...w, point: data.points.find((p) => p.configuration === w.configuration) }));
  const reasons = Object.keys(REASONS).filter((r) => wanted.some((w) => typeof w.reason[r] === "number"));
  const columns = [
    { name: "configuration", label: "Configuration", header: true, cell: (w) => h("button", { type: "button", class: "link", onclick: () => { plot.choose(w.point); plot.box.scrollIntoView({ block: "nearest" }); } }, w.configuration) },
    ...reasons.map((r) => ({ name: r, label: REASONS[r], numeric: true, cell: (w) => number(w.reason[r], 3) })),
  ];
  return [
    h("div", { class: "map-columns" },
      card(`The pool on ${data.device}`, toggles,
        h("figure", {}, plot.box, h("figcaption", {}, `First two principal components of the embeddings; strategy ${data.strategy}. Point, or use the arrow keys.`,
          data.left_out ? ` ${number(data.left_out)} configurations of the pool are left out of the drawing.` : ""))),
      card("Configuration", about)),
    card("Most wanted now", wanted.length ? table("What the strategy would pick next, and why", columns, wanted, { hideCaption: true }) : h("p", { class: "muted" }, "Nothing is left to pick.")),
  ];
}

function tellPoint(point) {
  if (!point) return [h("p", { class: "muted" }, "Point at a configuration, or move into the map with Tab and between configurations with the arrow keys.")];
  const reason = Object.entries(point.reason ?? {}).map(([name, value]) => [REASONS[name] ?? words(name), typeof value === "number" ? number(value, 3) : String(value)]);
  return [
    h("p", { class: "about-title" }, point.configuration),
    facts([["State", KINDS[point.kind].name], ["Round", point.round ?? null], ...reason]),
    reason.length === 0 && h("p", { class: "muted" }, point.kind === "labelled" ? "Drawn uniformly, to judge by." : "Not chosen so far."),
  ].filter(Boolean);
}

class Plot {
  constructor(points, hidden, onChoose) {
    this.points = points;
    this.hidden = hidden;
    this.onChoose = onChoose;
    this.chosen = null;
    this.box = h("div", { class: "chart map" });
    this.size = [0, 0];
    new ResizeObserver(([entry]) => {
      const width = Math.floor(entry.contentRect.width);
      if (!width || width === this.size[0]) return;
      this.size = [width, Math.max(280, Math.min(560, Math.round(width * 0.62)))];
      this.draw();
    }).observe(this.box);
  }

  draw() {
    const [width, height] = this.size;
    if (!width) return;
    const had = this.box.contains(document.activeElement);
    const spread = (values, from, to) => {
      const low = Math.min(...values), high = Math.max(...values);
      return (v) => (high > low ? from + ((v - low) / (high - low)) * (to - from) : (from + to) / 2);
    };
    const xs = spread(this.points.map((p) => p.x), 18, width - 18);
    const ys = spread(this.points.map((p) => p.y), height - 18, 18);
    this.shown = this.points.filter((p) => !this.hidden.has(p.kind)).map((point) => ({ point, x: xs(point.x), y: ys(point.y) }));
    const svg = s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: "application", "aria-roledescription": "map", "aria-label": `Map of ${this.shown.length} configurations. Arrow keys move to the nearest configuration in that direction, Escape leaves it.` });
    for (const { point, x, y } of this.shown) svg.append(s("path", { class: `kind-${point.kind.replace(" ", "-")}`, d: KINDS[point.kind].path, transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})` }));
    this.ring = s("circle", { class: "ring", r: 11 });
    svg.append(this.ring);
    svg.addEventListener("pointermove", (event) => this.point(event));
    svg.addEventListener("pointerdown", (event) => this.point(event));
    svg.addEventListener("keydown", (event) => this.key(event));
    this.box.replaceChildren(svg);
    if (had) svg.focus();
    this.mark();
  }

  point(event) {
    const at = this.box.getBoundingClientRect();
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
    this.ring?.setAttribute("visibility", one ? "visible" : "hidden");
    if (one) this.ring.setAttribute("transform", `translate(${one.x} ${one.y})`);
  }
}
