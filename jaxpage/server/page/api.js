// Talks to the server: the API key, plain requests, and streams of events. Knows nothing about the page.

const KEY_NAME = "jaxpage-api-key";
let key = stored();

/** A refusal by the server, or an error that it sent in mid-stream. */
export class ApiError extends Error {
  constructor(message, status, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

/** Remembers the key for this tab, and for nobody else. */
export function useKey(value) {
  key = value.trim();
  try {
    sessionStorage.setItem(KEY_NAME, key);
  } catch {
    // Storage is switched off: the key lives as long as the page.
  }
}

function stored() {
  try {
    return sessionStorage.getItem(KEY_NAME) ?? "";
  } catch {
    return "";
  }
}

/**
 * The response to a request with the key; `path` is relative to the page, so that it works under any root path.
 * Throws ApiError for a refusal and TypeError if the server cannot be reached.
 */
export async function send(path, { method = "GET", body, signal } = {}) {
  const headers = new Headers();
  // A header holds bytes: other characters go out as UTF-8, which is what the server compares.
  if (key) headers.set("Authorization", `Bearer ${String.fromCharCode(...new TextEncoder().encode(key))}`);
  if (body !== undefined) headers.set("Content-Type", "application/json");
  const response = await fetch(new URL(path, document.baseURI), {
    method,
    headers,
    signal,
    body: body === undefined ? undefined : JSON.stringify(body),
    cache: "no-store",
  });
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // A proxy's answer, not ours.
  }
  return new ApiError(error.message ?? `the server answered ${response.status}`, response.status, error.param);
}

/** The objects of an event stream, until its end or its [DONE]. */
export async function* events(path, options) {
  const response = await send(path, options);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const frames = (rest + value).split("\n\n");
      rest = frames.pop();
      for (const frame of frames) {
        if (!frame.startsWith("data: ")) continue; // a comment that keeps the connection open
        const data = frame.slice("data: ".length);
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new ApiError(event.error.message, event.error.code, event.error.param);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // leaving early ends the request
  }
}
