// Formatting of numbers and times.

export const METRICS = {
  step_time_ms: { name: "Step time", unit: "ms" },
  memory_mib: { name: "Memory", unit: "MiB" },
  power_w: { name: "Power", unit: "W" },
  energy_j: { name: "Energy per step", unit: "J" },
};

export const NOTHING = "–";

export function number(value, digits = 4) {
  if (value === null || value === undefined) return NOTHING;
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-6 || size >= 1e9)) return value.toExponential(digits - 2);
  if (size < 1e-3) return String(Number(value.toPrecision(2)));
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}

/** Number and sign stay on one line. */
export const percent = (value, digits = 3) => {
  if (value === null || value === undefined) return NOTHING;
  return value > 0 && value < 0.01 ? "<\u00a00.01\u00a0%" : `${number(value, digits)}\u00a0%`;
};

export const share = (value) => {
  if (value === null || value === undefined) return NOTHING;
  if (value > 0 && value < 0.001) return "<\u00a00.1\u00a0%";
  if (value < 1 && value > 0.999) return ">\u00a099.9\u00a0%";
  return `${number(100 * value, 3)}\u00a0%`;
};

/** As the clock here shows it; the difference to UTC stands with it. */
export function time(text) {
  if (!text) return NOTHING;
  const date = new Date(text);
  if (Number.isNaN(date.getTime()) || date.getUTCFullYear() <= 1970) return NOTHING;
  const local = new Date(date.getTime() - 60_000 * date.getTimezoneOffset()).toISOString();
  return `${local.slice(0, 16).replace("T", " ")} ${zone(date)}`;
}

const zone = (date) => new Intl.DateTimeFormat("en-GB", { timeZoneName: "short" }).formatToParts(date).find((part) => part.type === "timeZoneName").value;

export function duration(minutes) {
  if (minutes === null || minutes === undefined) return NOTHING;
  if (minutes < 1) return minutes === 0 ? "done" : "under a minute";
  if (minutes < 100) return `${Math.round(minutes)} min`;
  if (minutes < 60 * 48) return `${number(minutes / 60, 3)} h`;
  return `${number(minutes / 1440, 3)} days`;
}

export function hours(value) {
  if (value === null || value === undefined) return NOTHING;
  if (value < 1 / 60) return `${number(value * 3600, 3)} s`;
  if (value < 1) return `${number(value * 60, 3)} min`;
  return `${number(value, 4)} h`;
}

export function bytes(value) {
  if (value < 1024) return `${value} B`;
  const units = ["KiB", "MiB", "GiB"];
  let rest = value / 1024;
  while (rest >= 1024 && units.length > 1) {
    rest /= 1024;
    units.shift();
  }
  return `${number(rest, 3)} ${units[0]}`;
}

/** Names of acquisition strategies in the terms of the field. */
export const strategyName = (name) => ({ ours: "pool-variance reduction" })[name] ?? name;

export const words = (name) => name.replaceAll("_", " ");

export const metricName = (metric) =>
  METRICS[metric] ? `${METRICS[metric].name}, ${METRICS[metric].unit}` : words(metric);
