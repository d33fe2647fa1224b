// Requests a completion through the public API and shows which drafted tokens of each round were accepted.

const at = (id) => document.getElementById(id);
const NOT_READY = 503;
const NO_KEY = 401;
const RETRY_MS = 1000;
const TOGETHER = 0.2; // an event after less than this part of the time of the rounds before it arrived with them
const MIN_BARS = 48; // the chart is at least this many rounds wide
const ENDS = { stop: "ended by the model", length: "ended at its token limit" };
const VISIBLE = { " ": "·", "\n": "⏎", "\r": "␍", "\t": "⇥" };

let key = ""; // in memory only
let running = null; // the AbortController of the completion in progress

class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function fetchApi(path, options = {}) {
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { ...options, headers }).catch((error) => {
    throw new Error(`no response from the server (${error.message})`);
  });
  if (response.ok) return response;
  const answer = await response.json().catch(() => null);
  throw new ApiError(response.status, answer?.error?.message ?? `the server answered ${response.status}`);
}

// Yields the objects of a stream of server-sent events until [DONE] or until the signal aborts.
async function* readEvents(response, signal) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the response is incomplete");
    const lines = (held + value).split("\n");
    held = lines.pop();
    for (const line of lines) {
      signal.throwIfAborted(); // events that have already arrived are dropped, too
      if (!line.startsWith("data:")) continue;
      const data = line.slice("data:".length).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

function element(name, className = "", text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}

function makeSpaceVisible(text) {
  const name = (control) => `\\x${control.charCodeAt(0).toString(16).padStart(2, "0")}`;
  return text.replace(/[\u0000-\u0020\u007f]/g, (character) => VISIBLE[character] ?? name(character));
}

function count(number, noun, nouns = `${noun}s`) {
  return `${number} ${number === 1 ? noun : nouns}`;
}

function formatMs(seconds, digits = 1) {
  return `${(seconds * 1000).toFixed(digits)} ms`;
}

// The committed tokens of a round, each with its origin: an accepted draft, or the target's own.
function listCommitted(round) {
  return round.committed.map((token, place) => ({ ...token, origin: place < round.accepted ? "accepted" : "own" }));
}

// Cuts a text into [piece, origin] per token. A character of several tokens is one piece with the last token's origin.
function cutByToken(text, tokens) {
  const before = [];
  const after = [];
  let rest = text;
  let left = [...tokens];
  while (left.length && rest.startsWith(left[0].text)) {
    const token = left.shift();
    before.push([token.text, token.origin]);
    rest = rest.slice(token.text.length);
  }
  while (left.length && rest.endsWith(left.at(-1).text)) {
    const token = left.pop();
    after.unshift([token.text, token.origin]);
    rest = rest.slice(0, rest.length - token.text.length);
  }
  return [...before, [rest, left.at(-1)?.origin ?? "own"], ...after].filter(([piece]) => piece);
}

function makeChip(token, origin) {
  const chip = element(origin === "rejected" ? "s" : "span", `chip ${origin}`, makeSpaceVisible(token.text) || "∅");
  chip.title = `token ${token.id}`;
  return chip;
}

function makeRow(number, round) {
  const chips = element("span", "chips");
  chips.append(
    ...round.drafted.slice(0, round.accepted).map((token) => makeChip(token, "accepted")),
    ...round.drafted.slice(round.accepted).map((token) => makeChip(token, "rejected")),
    ...round.committed.slice(round.accepted).map((token) => makeChip(token, "own")),
  );
  const verdict = round.prefill ? "prompt" : round.k ? `${round.accepted}/${round.k}` : "no draft";
  const row = element("li");
  row.append(
    element("span", "number", round.prefill ? "" : number),
    element("span", "verdict", verdict),
    element("span", "time"),
    chips,
  );
  return row;
}

function makeBar(place, height, className) {
  const bar = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  const box = { x: place + 0.1, y: -height, width: 0.8, height, class: className };
  for (const [name, value] of Object.entries(box)) bar.setAttribute(name, value);
  return bar;
}

// Shows one completion while it is generated.
class Display {
  constructor(prompt) {
    this.rounds = this.drafted = this.accepted = this.tokens = this.most = 0;
    this.first = this.last = null; // seconds since the request was submitted
    this.group = null; // the rows that share a time, and when the first of them began
    this.painting = false;
    at("text").replaceChildren(element("span", "prompt", prompt));
    at("rounds").replaceChildren();
    at("bars").replaceChildren();
    for (const value of document.querySelectorAll("dd")) value.textContent = value.className === "note" ? "" : "–";
  }

  add({ text, dflash }) {
    const rows = dflash.rounds.map((round) => this.addRound(round));
    if (rows.length) this.showTime(rows, dflash.seconds);
    const pieces = cutByToken(text, dflash.rounds.flatMap(listCommitted));
    at("text").append(...pieces.map(([piece, origin]) => element("span", origin, piece)));
    if (dflash.rounds.length) {
      this.last = dflash.seconds;
      this.first ??= dflash.seconds;
    }
    if (!this.painting) requestAnimationFrame(() => this.paint());
    this.painting = true;
  }

  // Rounds of one event share its time, and so do events that arrive together: the later one did not take no time.
  showTime(rows, seconds) {
    const began = this.last ?? 0;
    const together = this.group && (seconds - began) / rows.length < TOGETHER * this.group.mean;
    if (!together) this.group = { began, rows: [] };
    this.group.rows.push(...rows);
    this.group.mean = (seconds - this.group.began) / this.group.rows.length;
    const text = (this.group.rows.length > 1 ? "≈ " : "") + formatMs(this.group.mean);
    for (const row of this.group.rows) row.querySelector(".time").textContent = text;
    if (this.last === null) this.group = null; // the time of the prompt is its own
  }

  // Returns the row of the round in the list.
  addRound(round) {
    this.tokens += round.committed.length;
    if (!round.prefill) {
      at("bars").append(makeBar(this.rounds, round.k, "drafted"), makeBar(this.rounds, round.accepted, "accepted"));
      this.rounds += 1;
      this.drafted += round.k;
      this.accepted += round.accepted;
      this.most = Math.max(this.most, round.k);
    }
    const row = makeRow(this.rounds, round);
    at("rounds").append(row);
    return row;
  }

  paint() {
    this.painting = false;
    if (this.first !== null) at("first-token").textContent = formatMs(this.first);
    at("tokens").textContent = this.tokens;
    if (!this.rounds) return;
    const perToken = (this.last - this.first) / (this.tokens - 1);
    const share = this.drafted ? `, ${Math.round((100 * this.accepted) / this.drafted)}\u00a0%` : "";
    at("tau").textContent = ((this.accepted + this.rounds) / this.rounds).toFixed(2);
    at("accepted-share").textContent = `${this.accepted} of ${this.drafted} accepted${share}`;
    at("token-time").textContent = formatMs(perToken, 2);
    at("rate").textContent = `${(1 / perToken).toFixed(0)} tokens/s`;
    at("passes").textContent = `${this.tokens - 1} in ${count(this.rounds, "pass", "passes")} of the target`;
    at("bars").setAttribute("viewBox", `0 ${-this.most} ${Math.max(this.rounds, MIN_BARS)} ${this.most || 1}`);
    const words = `${this.accepted} of ${this.drafted} accepted in ${count(this.rounds, "round")}`;
    at("bars").setAttribute("aria-label", words);
  }

  close(usage) {
    this.paint();
    at("prompt-tokens").textContent = `after ${count(usage.prompt_tokens, "prompt token")}`;
  }
}

function showStatus(status, error = "") {
  at("status").textContent = status;
  at("error").textContent = error;
  at("error").hidden = !error;
}

function showError(error) {
  if (error.status !== NO_KEY) return showStatus(error.status < 500 ? "refused" : "failed", error.message);
  at("access").hidden = false;
  at("key").focus();
  showStatus("needs an API key", key && error.message); // before a key was given, this is not an error
}

async function connect() {
  try {
    const { data } = await (await fetchApi("v1/models")).json();
    showModel(data[0]);
    showStatus("ready");
  } catch (error) {
    if (error.status !== NOT_READY) return showError(error);
    showStatus(error.message);
    setTimeout(connect, RETRY_MS);
  }
}

function showModel(model) {
  at("access").hidden = true;
  at("model").textContent = `${model.id} · K ${model.dflash.k.join(", ")} · ${model.max_model_len} positions`;
  at("model").dataset.id = model.id;
  at("k").replaceChildren(new Option("auto", ""), ...model.dflash.k.map((k) => new Option(k, k)));
  at("k").value = model.dflash.k.at(-1); // auto may choose not to draft, and the page is about drafting
  at("generate").disabled = false;
}

function readRequest() {
  const [k, seed] = [at("k").value, at("seed").valueAsNumber];
  return {
    model: at("model").dataset.id,
    prompt: at("prompt").value,
    max_tokens: at("max-tokens").valueAsNumber,
    temperature: at("temperature").valueAsNumber,
    ...(k && { k: Number(k) }),
    ...(!Number.isNaN(seed) && { seed }),
    stream: true,
    stream_options: { include_usage: true },
    trace: true,
  };
}

async function generate() {
  const request = readRequest();
  const display = new Display(request.prompt);
  const stopper = new AbortController();
  setRunning(stopper);
  showStatus("generating");
  try {
    const options = { method: "POST", body: JSON.stringify(request), signal: stopper.signal };
    showStatus(await follow(await fetchApi("v1/completions", options), stopper.signal, display));
  } catch (error) {
    display.paint();
    if (stopper.signal.aborted) showStatus(`stopped after ${count(display.tokens, "token")}`);
    else showError(error);
  } finally {
    stopper.abort(); // closes the connection, however the generation ended
    setRunning(null);
  }
}

// Shows a stream until its end. Returns the status to show.
async function follow(response, signal, display) {
  let reason = null;
  for await (const { choices, usage } of readEvents(response, signal)) {
    for (const choice of choices) {
      display.add(choice);
      reason = choice.finish_reason ?? reason;
    }
    if (usage) display.close(usage);
  }
  return ENDS[reason] ?? reason;
}

function setRunning(stopper) {
  const focused = [at("generate"), at("stop")].includes(document.activeElement);
  running = stopper;
  at("generate").disabled = Boolean(stopper);
  at("stop").disabled = !stopper;
  document.body.classList.toggle("running", Boolean(stopper));
  if (focused) at(stopper ? "stop" : "generate").focus(); // a disabled button loses the focus
}

at("access").addEventListener("submit", (event) => {
  event.preventDefault();
  key = at("key").value;
  connect();
});
at("request").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!at("generate").disabled) generate();
});
at("request").addEventListener("input", () => at("error").hidden || showStatus("ready")); // it was about another request
at("stop").addEventListener("click", () => running?.abort());
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) at("request").requestSubmit();
});
connect();
