// Navigation between views by the URL fragment, so that every view has a link.

import { h, tell } from "./dom.js";
import { errorBox, waiting } from "./parts.js";
import { campaignsView } from "./campaigns.js";
import { labelsView } from "./labels.js";
import { snapshotsView } from "./snapshots.js";
import { predictView } from "./predict.js";
import { rooflineView } from "./roofline.js";

const VIEWS = {
  campaigns: { title: "Campaigns", show: campaignsView },
  labels: { title: "Labels", show: labelsView },
  snapshots: { title: "Snapshots", show: snapshotsView },
  predict: { title: "Predict", show: predictView },
  roofline: { title: "Roofline", show: rooflineView },
};

const main = document.getElementById("main");
let leave = null;
let shown = "";

/** `#/labels/12?device=a100` as {view, parts, values}. */
export function place() {
  const [path, asked = ""] = location.hash.slice(1).split("?");
  const [view = "", ...parts] = path.split("/").filter(Boolean);
  return { view, parts: parts.map(decodeURIComponent), values: Object.fromEntries(new URLSearchParams(asked)) };
}

async function show() {
  if (!place().view) return location.replace("#/predict");
  const { view, parts, values } = place();
  const known = VIEWS[view];
  leave?.abort();
  leave = new AbortController();
  const { signal } = leave;
  for (const link of document.querySelectorAll("nav [data-view]"))
    if (link.dataset.view.split(" ").includes(view)) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  document.title = known ? `${known.title} · TraPPM` : "TraPPM";
  const here = [view, ...parts].join("/");
  if (shown !== here) {
    main.replaceChildren(waiting());
    if (shown) main.focus({ preventScroll: true });
    scrollTo(0, 0);
  }
  shown = here;
  if (!known) {
    main.replaceChildren(h("h1", {}, "Page not found"), h("p", {}, h("a", { href: "#/predict" }, "Go to Predict"), "."));
    return undefined;
  }
  try {
    const content = await known.show({ parts, values, signal, main });
    if (content && !signal.aborted) main.replaceChildren(...[content].flat());
  } catch (error) {
    if (signal.aborted || error.name === "AbortError") return undefined;
    main.replaceChildren(h("h1", {}, known.title), errorBox(error));
  }
  return undefined;
}

const switcher = document.getElementById("theme");

function nameTheme() {
  const other = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  switcher.textContent = other === "dark" ? "☾ Dark" : "☀ Light";
  switcher.setAttribute("aria-label", `Switch to the ${other} theme`);
}

switcher.addEventListener("click", () => {
  const other = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("trappm-theme", other);
  document.documentElement.dataset.theme = other;
  nameTheme();
  tell(`${other} theme`);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", nameTheme);
nameTheme();

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the URL fragment names the view
  main.focus();
});
addEventListener("hashchange", show);
show();
