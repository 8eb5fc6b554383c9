// Server-sent events from a fetch response. EventSource cannot send a body or a key.

/** The `data` of each event of a response, in order; ends at the end of the stream. */
export async function* eventData(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r?\n/);
      rest = lines.pop();
      yield* lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
    }
  } finally {
    // A reader that stops early closes the connection, so the server ends the request.
    await reader.cancel().catch(() => {});
  }
}
