// Creation of elements, such as h("p", {class: "muted"}, "text", otherElement).
// Strings become text nodes and are never parsed as HTML.

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else if (value === true) element.setAttribute(name, "");
    else element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return element;
}

export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Tells people who listen instead of looking. */
export function tell(text) {
  document.getElementById("told").textContent = text;
}

let last = 0;
/** An id that no other element has. */
export const freshId = (prefix) => `${prefix}-${++last}`;
