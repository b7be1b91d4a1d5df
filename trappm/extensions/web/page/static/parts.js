// Components shared by all views: cards, tables, states, commands, errors.

import { h, tell, freshId } from "./dom.js";
import { number } from "./format.js";
import { get } from "./server.js";

export function card(title, ...children) {
  const id = freshId("card");
  return h("section", { class: "card", "aria-labelledby": id }, h("h2", { id }, title), ...children);
}

/** A word for a state, with a colour that says the same. */
export const pill = (state) => h("span", { class: `pill pill-${state.replaceAll(" ", "-")}` }, state);

/** A command to type next, which a click copies. */
export function command(text) {
  const button = h("button", { class: "quiet copy", type: "button", "aria-label": `Copy: ${text}` }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
      tell("Copied");
    } catch {
      button.textContent = "Copying failed";
    }
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return h("div", { class: "command" }, h("code", {}, text), button);
}

export const empty = (title, text, ...commands) =>
  h("div", { class: "empty" }, h("p", { class: "empty-title" }, title), h("p", {}, text), commands.map(command));

export function errorBox(error) {
  const told = error.hint && error.message.endsWith(error.hint) ? error.message.slice(0, -error.hint.length).replace(/; $/, "") : error.message;
  tell(error.message);
  return h(
    "div",
    { class: "error", role: "alert" },
    h("p", {}, told),
    error.hint && h("p", { class: "muted" }, error.hint),
  );
}

export const waiting = (text = "Loading") =>
  h("p", { class: "waiting", role: "status" }, h("span", { class: "spinner", "aria-hidden": "true" }), ` ${text} …`);

/**
 * Return a table.
 * columns: [{name, label, numeric, cell(row), sort}]; sort: {by, descending, choose(column)};
 * note(row): long text shown below the row over the full width.
 */
export function table(caption, columns, rows, { sort = null, hideCaption = false, onRow = null, note = () => null } = {}) {
  const head = columns.map((column) => {
    const props = { scope: "col", class: column.numeric ? "numeric" : "" };
    if (!sort || column.sort === false) return h("th", props, column.label);
    const isBy = sort.by === column.name;
    if (isBy) props["aria-sort"] = sort.descending ? "descending" : "ascending";
    const mark = isBy ? (sort.descending ? " ↓" : " ↑") : "";
    return h("th", props, h("button", { type: "button", class: "sort", onclick: () => sort.choose(column.name) }, column.label, mark));
  });
  const body = rows.map((row) => {
    const cells = columns.map((column, index) => {
      const value = column.cell ? column.cell(row) : row[column.name];
      const shown = typeof value === "number" || value === null || value === undefined ? number(value) : value;
      const props = { class: column.numeric ? "numeric" : "", "data-label": column.label };
      return index === 0 && column.header ? h("th", { ...props, scope: "row" }, shown) : h("td", props, shown);
    });
    const below = note(row);
    const kind = [onRow && "clickable", below && "has-note"].filter(Boolean).join(" ");
    const line = h("tr", { class: kind || null, onclick: onRow && ((event) => onRow(row, event)) }, cells);
    return below ? [line, h("tr", { class: "note" }, h("td", { colspan: columns.length }, below))] : line;
  });
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", {}, h("caption", hideCaption ? { class: "unseen" } : {}, caption), h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)),
  );
}

/** A figure with its caption, and the same as a table for those who would rather read it. */
export function figure(caption, chart, tableOf = null) {
  const parts = [chart, h("figcaption", {}, caption)];
  if (tableOf) {
    const details = h("details", {}, h("summary", {}, "As a table"));
    details.addEventListener("toggle", () => {
      if (details.open && details.children.length === 1) details.append(tableOf());
    });
    parts.push(details);
  }
  return h("figure", {}, parts);
}

export const facts = (pairs) =>
  h("dl", { class: "facts" }, pairs.filter(([, v]) => v !== null && v !== undefined).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));

export function bar(done, total, label) {
  const portion = total ? Math.min(1, done / total) : 0;
  const inner = h("div", { class: "progress-inner" });
  inner.style.width = `${100 * portion}%`;
  return h(
    "div",
    { class: "progress", role: "progressbar", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": total, "aria-valuenow": done },
    inner,
  );
}

/** A select with its label. */
export function choice(label, name, options, value, onchange, kind = "") {
  const select = h("select", { name, onchange }, options.map(([v, text]) => h("option", { value: v }, text)));
  select.value = value ?? "";
  return h("label", { class: `field ${kind}` }, h("span", {}, label), select);
}

export function field(label, name, value, attributes = {}, kind = "") {
  return h("label", { class: `field ${kind}` }, h("span", {}, label), h("input", { name, value: value ?? "", ...attributes }));
}

/** Return autocompletion of timm names for a field with `list: "models"`. */
export function completion(signal) {
  const list = h("datalist", { id: "models" });
  get("api/models", {}, signal).then(({ data }) => list.append(...data.models.map((name) => h("option", { value: name }))), () => {});
  return list;
}
