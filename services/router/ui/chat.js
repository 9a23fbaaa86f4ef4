// A conversation over /v1/chat/completions, streamed. What the model says becomes text, never markup.
import { authorized } from "/ui/token.js";

const at = (id) => document.getElementById(id);
let history = [], answering = null;

function add(className, words) {
  const node = document.createElement("div");
  node.className = className;
  node.textContent = words;
  at("talk").append(node);
  node.scrollIntoView({ block: "end" });
  return node;
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function refusal(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `HTTP ${answer.status}`;
  }
}

async function ask(messages, signal) {
  const answer = await fetch("/v1/chat/completions", {
    method: "POST",
    signal,
    headers: authorized({ "content-type": "application/json" }),
    body: JSON.stringify({
      model: at("models").value,
      messages,
      stream: true,
      stream_options: { include_usage: true },
      max_completion_tokens: at("max_tokens").valueAsNumber || 256,
      temperature: at("temperature").valueAsNumber || 0,
    }),
  });
  if (!answer.ok) throw new Error(await refusal(answer));
  return answer;
}

function figures(startMs, firstMs, usage) {
  const totalS = (performance.now() - startMs) / 1e3;
  const words = [`TTFT ${(firstMs - startMs).toFixed(0)} ms`, `${totalS.toFixed(1)} s`];
  if (usage) words.push(`${usage.prompt_tokens} → ${usage.completion_tokens} tokens`);
  if (usage?.completion_tokens > 1) {
    const spanS = (performance.now() - firstMs) / 1e3;
    words.push(`${((usage.completion_tokens - 1) / spanS).toFixed(1)} tok/s`);
  }
  return words.join(" · ");
}

async function converse(question) {
  const mine = (answering = new AbortController());
  const said = { role: "user", content: question };
  add("said user", question);
  const bubble = add("said assistant running", "");
  const note = add("note", "");
  at("send").textContent = "Stop";
  const startMs = performance.now();
  let firstMs = startMs, usage = null, whole = "", failure = "";
  try {
    const answer = await ask([...history, said], mine.signal);
    const requestId = answer.headers.get("x-request-id") ?? "";
    for await (const chunk of events(answer.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      const piece = chunk.choices?.[0]?.delta?.content;
      if (!piece) continue;
      if (!whole) firstMs = performance.now();
      whole += piece;
      bubble.textContent = whole;
      note.textContent = requestId;
      note.scrollIntoView({ block: "end" });
    }
  } catch (error) {
    failure = error.name === "AbortError" ? "stopped" : error.message;
  }
  bubble.classList.remove("running");
  if (answering === mine) {
    answering = null;
    at("send").textContent = "Send";
    if (whole) history = [...history, said, { role: "assistant", content: whole }];
  }
  if (!whole) bubble.remove();
  note.className = failure && failure !== "stopped" ? "note bad" : "note";
  note.textContent = failure || figures(startMs, firstMs, usage);
  note.scrollIntoView({ block: "end" });
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (answering) {
    answering.abort();
    return;
  }
  const question = at("question").value.trim();
  if (!question) return;
  at("question").value = "";
  converse(question);
});
at("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!answering) at("ask").requestSubmit();
});
at("fresh").addEventListener("click", () => {
  answering?.abort();
  answering = null;
  history = [];
  at("talk").replaceChildren();
  at("send").textContent = "Send";
  at("question").focus();
});
