// Asks the router for its state each second and draws it. Data becomes text by textContent only.
import { askForToken, authorized, whenGiven } from "/ui/token.js";

const PERIOD_MS = 1000, LONGEST_WAIT_MS = 15000, TIMEOUT_MS = 5000;
const BLOCKS = ["used", "leased", "quarantined", "cached", "free"];
const STAGES = ["admit", "queue", "prefill", "first_token", "second_token", "decode"];
const LIFE = ["received", "admitted", "prefilling", "prefilled", "transferring", "decoding"];
const ROLES = ["prefill", "decode", "mixed"];
const at = (id) => document.getElementById(id);

function make(tag, className = "", ...inside) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...inside.map((part) => (part instanceof Node ? part : document.createTextNode(String(part)))));
  return node;
}

const text = (value) => make("td", "", value);
const id = (value) => make("td", "id", value);
const number = (value) => make("td", "n", value);

function show(parent, rows, columns, otherwise) {
  if (!rows.length) {
    const cell = make("td", "none", otherwise);
    cell.colSpan = columns;
    rows = [make("tr", "", cell)];
  }
  at(parent).replaceChildren(...rows);
}

function bar(parts, kind = "") {
  const whole = parts.reduce((sum, [, value]) => sum + value, 0);
  const node = make("div", `bar ${kind}`);
  for (const [name, value] of parts) {
    if (value <= 0) continue;
    const piece = make("i", name);
    piece.style.width = `${(100 * value) / whole}%`;
    node.append(piece);
  }
  node.title = parts.map(([name, value]) => `${name} ${kind ? milliseconds(value) : value}`).join("   ");
  return node;
}

function legend(where, names) {
  at(where).replaceChildren(...names.map((name) => make("span", "", make("i", name), name.replace("_", " "))));
}

function milliseconds(value) {
  if (value >= 1e3) return `${(value / 1e3).toFixed(value < 1e4 ? 2 : 1)} s`;
  return `${value < 10 ? value.toFixed(1) : value.toFixed(0)} ms`;
}

function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let place = 0;
  while (value >= 1000 && place < units.length - 1) { value /= 1000; place += 1; }
  return `${value < 10 && place ? value.toFixed(1) : value.toFixed(0)} ${units[place]}`;
}

// Tokens a second of a worker, from the counters of two of its reports and the times of these.
const lastReports = new Map();

function keyOf(worker) {
  return `${worker.worker_id}/${worker.incarnation}`;
}

function rates(worker) {
  const key = keyOf(worker);
  const before = lastReports.get(key);
  if (before && worker.reported_s === before.reported_s) return before.rates;
  let found = { prefill: 0, decode: 0 };
  if (before && before.reported_s !== null) {
    const span = worker.reported_s - before.reported_s;
    found = {
      prefill: (worker.prefilled_tokens - before.prefilled_tokens) / span,
      decode: (worker.generated_tokens - before.generated_tokens) / span,
    };
  }
  lastReports.set(key, { ...worker, rates: found });
  return found;
}

function drawPools(workers) {
  const pools = ROLES.map((role) => [role, workers.filter((worker) => worker.role === role)]);
  const total = (pool, what) => pool.reduce((sum, worker) => sum + what(worker), 0);
  at("pools").replaceChildren(...pools.filter(([, pool]) => pool.length).map(([role, pool]) => {
    const flow = total(pool, (w) => (role === "prefill" ? w.rates.prefill : w.rates.decode));
    const stock = total(pool, (w) => w.blocks.leased * w.block_bytes);
    const room = total(pool, (w) => (w.blocks.free + w.blocks.cached) * w.block_bytes);
    return make("div", "pool",
      make("div", "name", `${role} · ${pool.length} ${pool.length === 1 ? "worker" : "workers"}`),
      make("div", "", make("b", "", flow.toFixed(0)), " tok/s"),
      make("div", "quiet", `${total(pool, (w) => w.running)} running · ${total(pool, (w) => w.waiting)} waiting`),
      make("div", "quiet", `stock ${bytes(stock)} · headroom ${bytes(room)}`));
  }));
}

// The share that no new sequence could take; cached blocks could be evicted for it.
function blocks(counts) {
  const held = counts.used + counts.leased + counts.quarantined;
  const share = counts.total ? (100 * held) / counts.total : 0;
  const words = `${share > 0 && share < 10 ? share.toFixed(1) : share.toFixed(0)} %`;
  return make("td", "", make("div", "blocks", bar(BLOCKS.map((name) => [name, counts[name]])), make("span", "", words)));
}

function drawWorkers(workers) {
  show("workers", workers.map((w) => make("tr", "",
    id(w.worker_id), text(w.role), make("td", w.state === "ready" ? "ok" : "wait", w.state),
    number(w.running), number(w.waiting), blocks(w.blocks), number(w.open_leases), number(w.outstanding_reads), number(w.decode_step_ms ? w.decode_step_ms.toFixed(1) : "–"),
    number(w.rates.prefill.toFixed(0)), number(w.rates.decode.toFixed(0)))), 11, "no worker is known yet");
}

function stage(name) {
  const place = LIFE.indexOf(name);
  const steps = make("span", "steps", ...LIFE.map((_, index) => make("i", index <= place ? "past" : "")));
  return make("td", "", make("span", "stage", steps, name));
}

function drawRequests(requests, all) {
  at("more").textContent = all > requests.length ? `the ${requests.length} oldest of ${all}` : "";
  show("requests", requests.map((r) => make("tr", "",
    id(r.request_id), stage(r.state), number(r.attempt), number(milliseconds(r.age_ms)), number(r.tokens_sent),
    id(r.prefill_worker || "–"), id(r.decode_worker || "–"))), 7, "no request is in flight");
}

function drawTraces(traces) {
  show("traces", traces.map((t) => {
    const end = make("td", t.state === "finished" ? "ok" : "bad", t.state);
    end.title = t.error;
    return make("tr", "",
      id(t.request_id), end, number(`${t.prompt_tokens} → ${t.completion_tokens}`),
      number(t.completion_tokens ? milliseconds(t.ttft_ms) : "–"), number(t.tpot_ms ? milliseconds(t.tpot_ms) : "–"),
      number(t.kv_read ? bytes(t.kv_read.bytes) : "–"), number(milliseconds(t.e2e_ms)),
      make("td", "", bar(STAGES.map((name) => [name, t.stages_ms[name]]), "stages")));
  }), 8, "no request has ended yet");
}

function drawModels(models) {
  const select = at("models");
  const names = models.map((model) => model.name);
  if (names.join("\n") === Array.from(select.options, (option) => option.value).join("\n")) return;
  const chosen = select.value;
  select.replaceChildren(...names.map((name) => new Option(name, name)));
  if (names.includes(chosen)) select.value = chosen;
  at("model").textContent = names.join(", ");
}

function draw(state) {
  const workers = state.workers.map((worker) => ({ ...worker, rates: rates(worker) }));
  const known = new Set(workers.map(keyOf));
  for (const key of lastReports.keys()) if (!known.has(key)) lastReports.delete(key);
  const { active_requests: active, queued_requests: queued, ended } = state.router;
  const ends = Object.entries(ended).filter(([, count]) => count).map(([name, count]) => `${count} ${name}`);
  at("counts").textContent = [`${active} in flight`, `${queued} queued`, ...ends].join(" · ");
  drawModels(state.models);
  drawPools(workers);
  drawWorkers(workers);
  drawRequests(state.requests, active);
  drawTraces(state.traces);
  if (state.unready) say("bad", state.unready);
  else if (state.stale) say("wait", "registry out of reach: last known view");
  else say("ok", "serving");
}

function say(kind, words) {
  at("status").className = kind;
  if (at("status").textContent !== words) at("status").textContent = words;
}

let asking = null, timer = 0, failures = 0;

async function look() {
  clearTimeout(timer);
  asking?.abort();
  const mine = (asking = new AbortController());
  const limit = setTimeout(() => mine.abort(), TIMEOUT_MS);
  try {
    const answer = await fetch("/ui/state", { signal: mine.signal, cache: "no-store", headers: authorized() });
    askForToken(answer.status === 401 || answer.status === 403);
    if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
    draw(await answer.json());
    failures = 0;
  } catch (error) {
    if (mine !== asking) return;
    failures += 1;
    say("bad", `the router does not answer (${error.name === "AbortError" ? "too slow" : error.message})`);
  } finally {
    clearTimeout(limit);
  }
  if (mine !== asking || document.hidden) return;
  timer = setTimeout(look, Math.min(LONGEST_WAIT_MS, PERIOD_MS * 2 ** failures * (failures ? 1 + Math.random() : 1)));
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) look();
  else clearTimeout(timer);
});
addEventListener("pagehide", () => { clearTimeout(timer); const last = asking; asking = null; last?.abort(); });
addEventListener("pageshow", (event) => { if (event.persisted) look(); });
whenGiven(() => { failures = 0; look(); });
legend("legend", BLOCKS);
legend("stages", STAGES);
look();
