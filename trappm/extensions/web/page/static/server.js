// Requests to this server only, with JSON responses and readable errors.

const TOKEN = "trappm-token";

export class ServerError extends Error {
  constructor(status, detail, hint) {
    super(detail);
    this.status = status;
    this.hint = hint;
  }
}

async function request(path, options = {}) {
  const headers = new Headers(options.headers);
  const token = sessionStorage.getItem(TOKEN);
  if (token) headers.set("Authorization", `Bearer ${token}`);
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, "The server does not respond.", "Start it again with: trappm serve --open");
  }
  if (response.status === 401 && (await askForToken(Boolean(token)))) return request(path, options);
  if (!response.ok) throw await told(response);
  return response;
}

async function told(response) {
  let problem = {};
  try {
    problem = await response.json();
  } catch {
    // a response without problem details
  }
  const detail =
    typeof problem.detail === "string" ? problem.detail : problem.title ?? `The server responded with status ${response.status}.`;
  const field = /^body\.(?:\w+\.)*?(\w+): (.*); see \/openapi\.json$/.exec(detail);
  if (field) return new ServerError(response.status, `${field[1].replaceAll("_", " ")}: ${field[2]}`);
  return new ServerError(response.status, detail, problem.hint);
}

/** A server that asks for a token is given one, which this tab keeps until it is closed. */
function askForToken(wasRefused) {
  const dialog = document.createElement("dialog");
  dialog.className = "token";
  const form = document.createElement("form");
  form.method = "dialog";
  const label = document.createElement("label");
  label.textContent = wasRefused
    ? "The token is wrong. Enter the server's token:"
    : "This server requires a token:";
  const input = document.createElement("input");
  input.type = "password";
  input.required = true;
  input.autocomplete = "off";
  label.append(input);
  const button = document.createElement("button");
  button.textContent = "Continue";
  form.append(label, button);
  dialog.append(form);
  document.body.append(dialog);
  return new Promise((done) => {
    dialog.addEventListener("close", () => {
      const given = dialog.returnValue !== "" || input.value !== "";
      if (given) sessionStorage.setItem(TOKEN, input.value);
      dialog.remove();
      done(given);
    });
    dialog.addEventListener("cancel", () => {
      input.value = "";
    });
    dialog.showModal();
  });
}

export const query = (values) => {
  const kept = Object.entries(values).filter(([, v]) => v !== null && v !== undefined && v !== "");
  return new URLSearchParams(kept).toString();
};

export async function get(path, values = {}, signal = undefined) {
  const asked = query(values);
  const response = await request(asked ? `${path}?${asked}` : path, { signal });
  return { status: response.status, data: await response.json() };
}

export async function post(path, body, signal = undefined) {
  const isForm = body instanceof FormData;
  const response = await request(path, {
    method: "POST",
    body: isForm ? body : JSON.stringify(body),
    headers: isForm ? {} : { "Content-Type": "application/json" },
    signal,
  });
  return response.json();
}

/** Fetched rather than linked, so that it works with a token too. */
export async function download(path, values, name) {
  const asked = query(values);
  const response = await request(asked ? `${path}?${asked}` : path);
  const url = URL.createObjectURL(await response.blob());
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  URL.revokeObjectURL(url);
}
