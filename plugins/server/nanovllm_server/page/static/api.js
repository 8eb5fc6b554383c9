// Requests to the server that served this page. Addresses are relative, so a proxy may add a prefix.
import { eventData } from "./sse.js";

const KEY = "api-key";
let key = "";
try {
  key = sessionStorage.getItem(KEY) ?? "";
} catch {
  // A browser that forbids storage asks for the key again after a reload.
}

export const apiKey = () => key;

/** Keep the key in this tab until it is closed. */
export function keepApiKey(value) {
  key = value.trim();
  try {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  } catch {
    // It stays in memory.
  }
}

/** An answer of the server that is an error: its status (0 within a stream), text and parameter. */
export class ServerError extends Error {
  constructor(status, error) {
    super(error?.message ?? "The server gave no reason.");
    this.status = status;
    this.param = error?.param;
  }
}

async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  const body = await response.text();
  throw new ServerError(response.status, errorOf(body) ?? { message: body.slice(0, 500) });
}

function errorOf(body) {
  try {
    const { error, detail } = JSON.parse(body);
    return error ?? (detail && { message: String(detail) });
  } catch {
    return null;
  }
}

/** The JSON that `path` answers. Raises ServerError, or TypeError if the server cannot be reached. */
export async function getJson(path) {
  return (await request(path, { cache: "no-store" })).json();
}

/** The chunks of a streamed chat completion. Raises as `getJson`, and if the stream ends early. */
export async function* chatChunks(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const data of eventData(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(0, chunk.error);
    yield chunk;
  }
  throw new ServerError(0, { message: "The connection ended before the answer was complete." });
}

/** What to tell a reader about an error: the server's own text, or that it cannot be reached. */
export function describeError(error) {
  if (error instanceof ServerError) return error.message;
  if (error instanceof TypeError) return "The server cannot be reached.";
  return String(error);
}
