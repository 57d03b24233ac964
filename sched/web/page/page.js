// SPDX-License-Identifier: Apache-2.0
"use strict";

const minute = 60000, day = 1440;
const $ = (id) => document.getElementById(id);
let past = { gpus: {}, hours: [] }, present = null;

// el makes an element; texts come from tenants too, so they are never markup.
function el(name, props = {}, ...children) {
  const e = Object.assign(document.createElement(name), props);
  e.append(...children);
  return e;
}

// colour is the same for a name as long as the page is open; the next name's is far off.
const hues = new Map();
function colour(name) {
  if (!hues.has(name)) hues.set(name, (hues.size * 137.5 + 210) % 360);
  return `hsl(${hues.get(name)} 60% 50%)`;
}

const percent = (x) => `${Math.round(x * 1000) / 10} %`;
function size(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (n >= 1024 && i < units.length - 1) { n /= 1024; i++; }
  return `${n >= 10 || i === 0 ? Math.round(n) : Math.round(n * 10) / 10} ${units[i]}`;
}

function canvas(cls, height, draw) {
  const c = el("canvas", { className: cls, width: 1000, height });
  c.style.height = height + "px";
  draw(c.getContext("2d"), 1000, height);
  return c;
}

// turns draws who had the GPU over the last minute. Each tenant has a lane: turns are
// shorter than a point of the screen, and slices are at the same time.
function turns(g) {
  const from = present.time - minute, lane = 14;
  const names = [...new Set(g.segments.map((s) => s.tenant))].sort();
  return canvas("turns", Math.max(names.length, 1) * lane, (ctx, w) => {
    for (const s of g.segments) {
      const x = Math.max((s.from - from) / minute, 0) * w, end = ((s.to || present.time) - from) / minute * w;
      ctx.fillStyle = colour(s.tenant);
      ctx.fillRect(x, names.indexOf(s.tenant) * lane + 1, Math.max(end - x, 0.5), lane - 2);
    }
  });
}

// history draws the parts of each minute of the last day.
function history(g) {
  const now = Math.floor(present.time / minute);
  return canvas("day", 90, (ctx, w, h) => {
    for (const p of past.gpus[g.uuid] || []) {
      const x = (1 - (now - p.minute + 1) / day) * w;
      let y = h;
      for (const name of Object.keys(p.tenants).sort()) {
        const part = Math.min(p.tenants[name], 1) * h;
        ctx.fillStyle = colour(name);
        ctx.fillRect(x, y - part, Math.max(w / day, 1), part);
        y -= part;
      }
    }
  });
}

const ways = { turns: "tenants take turns", slices: "tenants share by the GPU's time slices", driver: "tenants run at the same time" };

function gpu(g) {
  const s = el("section", { className: "gpu" },
    el("h2", { textContent: `GPU ${g.index}  ${g.name}` }),
    el("p", { textContent: `${size(g.reserved)} of ${size(g.memory)} reserved, ${g.promised} % of the time promised` }),
    el("p", { className: "why", textContent: `${ways[g.way] || "one tenant at a time"}${g.reason ? ": " + g.reason : ""}` }));
  const rows = el("tbody");
  for (const t of g.tenants) {
    const mark = el("span", { className: "mark" });
    mark.style.background = colour(t.name);
    rows.append(el("tr", { className: t.state },
      el("td", {}, mark, t.name), el("td", { textContent: t.state }),
      el("td", { textContent: percent(t.got) + (t.core_limit ? ` of ${t.core_limit} %` : "") }),
      el("td", { textContent: percent(t.waited) }),
      el("td", { textContent: size(t.memory) + (t.memory_limit ? ` of ${size(t.memory_limit)}` : "") + (t.away ? `, ${size(t.away)} away` : "") }),
      el("td", { textContent: t.out_of_memory || "" })));
  }
  s.append(el("table", {}, el("thead", {}, el("tr", {}, ...["Tenant", "State", "Gets", "Waited", "Memory", "Out of memory"].map((x) => el("th", { textContent: x })))), rows));
  if (g.others) {
    const o = g.others;
    s.append(el("p", { textContent: `others: ${o.tenants || 0} tenants, ${o.holding || 0} holding, ${o.waiting || 0} waiting, ${percent((o.got_permille || 0) / 1000)} of the time` }));
  }
  s.append(el("p", { className: "scale", textContent: "the last minute" }), turns(g), el("p", { className: "scale", textContent: "the last 24 hours" }), history(g));
  return s;
}

function fits() {
  const want = Number($("want-memory").value) * 2 ** 30, core = Number($("want-core").value);
  $("fits").replaceChildren(...present.gpus.map((g) => {
    const free = Math.max(g.memory - g.taken, 0), time = Math.max(100 - g.promised, 0);
    let text = `GPU ${g.index}: fits (${size(free)} and ${time} % free)`;
    if (want > g.memory) text = `GPU ${g.index}: never, it has ${size(g.memory)}`;
    else if (core > time) text = `GPU ${g.index}: no, only ${time} % of its time is not promised`;
    else if (want > free) text = g.swaps ? `GPU ${g.index}: fits with swapping (${size(free)} free)` : `GPU ${g.index}: no, only ${size(free)} is free`;
    return el("li", { textContent: text });
  }));
}

function show() {
  const problems = [...present.problems], numbered = (n) => n === 1 ? "1 problem" : `${n} problems`;
  const n = problems.length + present.hidden_problems;
  if (present.hidden_problems) problems.push(`${numbered(present.hidden_problems)} that only root may read`);
  $("health").textContent = present.error ? `no answer: ${present.error}`
    : `${n === 0 ? "OK" : numbered(n)}. Scheduler ${present.version}, ${present.clients} processes`
      + (present.view ? `; only ${present.view} is named` : "");
  $("problems").replaceChildren(...problems.map((p) => el("li", { textContent: p })));
  $("gpus").replaceChildren(...present.gpus.map(gpu));
  $("hours").tBodies[0].replaceChildren(...past.hours.map((h) => el("tr", {},
    el("td", { textContent: h.namespace || "outside Kubernetes" }), el("td", { textContent: h.gpu_hours.toFixed(3) }))));
  fits();
}

async function ask(path) {
  const r = await fetch(path);
  if (!r.ok) throw new Error(await r.text());
  return r.json();
}

let asked = 0;
async function refresh() {
  try {
    if (Date.now() - asked > 30000) { past = await ask("api/history"); asked = Date.now(); }
    present = await ask("api/now");
    show();
  } catch (e) {
    $("health").textContent = `no answer: ${e.message}`;
  }
  setTimeout(refresh, 2000);
}

for (const id of ["want-memory", "want-core"]) $(id).addEventListener("input", () => present && fits());
refresh();
