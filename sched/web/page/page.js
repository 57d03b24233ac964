// SPDX-License-Identifier: Apache-2.0
"use strict";

const $ = (id) => document.getElementById(id);
let past = { gpus: {}, hours: [] }, present = null;

// el makes an element; texts come from tenants too, so they are never markup.
function el(name, props = {}, ...children) {
  const e = Object.assign(document.createElement(name), props);
  e.append(...children);
  return e;
}
const row = (cell, ...texts) => el("tr", {}, ...texts.map((t) => el(cell, {}, t)));

// colour is the same for a name as long as the page is open; the next name's is far off.
const hues = new Map();
function colour(name, light = 50) {
  if (!hues.has(name)) hues.set(name, (hues.size * 137.5 + 210) % 360);
  return `hsl(${hues.get(name)} 60% ${light}%)`;
}

const percent = (x) => `${Math.round(x * 1000) / 10} %`;
function size(n) {
  const i = Math.min(Math.floor(Math.log2(Math.max(n, 1)) / 10), 4);
  return `${Math.round(n / 1024 ** i * 10) / 10} ${["B", "KiB", "MiB", "GiB", "TiB"][i]}`;
}

const clock = (t) => t == null ? "" : new Date(t * 1000).toLocaleTimeString([], { hour12: false });

// plot draws data over time. What was zoomed stays as it is until a double-click.
function plot(box, data, series, { height, range, incrs, text }) {
  const key = series.map((s) => s.label).join("\n");
  if (box.key !== key) {
    box.chart?.destroy();
    const axis = { stroke: () => getComputedStyle(box).color, grid: { stroke: "#8883" }, ticks: { stroke: "#8883" } };
    box.chart = new uPlot({
      width: box.clientWidth, height, legend: { show: !!text }, scales: { y: { range } },
      series: [{ label: "Time", value: (u, t) => clock(t) }, ...series.map((s) => ({ width: 0, points: { show: false }, ...s }))],
      axes: [{ ...axis, space: 70, size: 30, values: (u, all) => all.map(clock) }, { ...axis, show: !!text, size: 70, incrs, values: (u, all) => all.map(text) }],
      hooks: { setSelect: [(u) => { box.zoomed = u.select.width > 0; }] },
    }, data, box);
    Object.assign(box, { key, ondblclick: () => { box.zoomed = false; } });
  }
  if (box.chart.width !== box.clientWidth) box.chart.setSize({ width: box.clientWidth, height });
  if (!box.zoomed) box.chart.setData(data);
}

// turns draws who had the GPU over the last minute, each tenant in its lane, and moves of its memory.
function turns(box, g, names) {
  const lane = (tenant, i, moves) => (u) => {
    const p = new Path2D(), x = (t) => u.valToPos(t / 1000, "x", true), high = u.bbox.height / names.length;
    for (const s of box.segments.filter((s) => s.tenant === tenant && s.moves === moves)) {
      p.rect(x(s.from), u.bbox.top + high * (i + (moves ? 0.5 : 0.1)), Math.max(x(s.to || present.time) - x(s.from), 0.5), high * (moves ? 0.4 : 0.8));
    }
    return { fill: p };
  };
  box.segments = g.segments;
  const to = present.time / 1000, series = names.flatMap((name, i) => [
    { label: name, fill: colour(name), paths: lane(name, i, false) }, { label: name, fill: colour(name, 75), paths: lane(name, i, true) }]);
  plot(box, [[to - 60, to], ...series.map(() => [0, 0])], series, { height: 48 + 16 * names.length, range: [0, 1] });
}

// stacked draws parts, each [label, colour, column], one on the other: the sums, the greatest first.
function stacked(box, times, parts, y) {
  let sum = times.map(() => 0);
  const all = parts.map(([label, fill, column]) => [label, fill, column, sum = sum.map((v, i) => v + column[i])]).reverse();
  box.columns = all.map((part) => part[2]);
  plot(box, [times, ...all.map((part) => part[3])], all.map(([label, fill]) => ({
    label, fill, paths: uPlot.paths.stepped({ align: 1 }), value: (u, v, s, i) => i == null ? "" : y.text(box.columns[s - 1][i] || 0) })), y);
}

const sections = new Map(); // by GPU: its elements, which stay
function gpu(g) {
  if (!sections.has(g.uuid)) {
    const [about, table, minute, used, memory] = ["p", "table", "div", "div", "div"].map((name) => el(name));
    minute.className = "turns";
    $("gpus").append(el("section", { className: "gpu" }, el("h2", { textContent: `GPU ${g.index}  ${g.name}` }), about, table,
      el("small", {}, "turns of the last minute; pale: memory moves"), minute, el("div", { className: "day" },
        el("div", {}, el("small", {}, "GPU time"), used), el("div", {}, el("small", {}, "memory: on the GPU, paler on the host, palest in files"), memory))));
    sections.set(g.uuid, { about, table, minute, used, memory });
  }
  const s = sections.get(g.uuid), names = [...new Set([...g.tenants.map((t) => t.name), ...g.segments.map((x) => x.tenant)])].sort();
  s.about.textContent = `${size(g.reserved)} of ${size(g.memory)} reserved, ${g.promised} % of the time promised; ${g.about}`;
  s.table.replaceChildren(row("th", "Tenant", "State", "Gets", "Waited", "Memory"), ...g.tenants.map((t) => {
    const mark = el("span", { className: "mark", style: `background: ${colour(t.name)}` }), link = el("a", { href: "api/why?tenant=" + encodeURIComponent(t.name), title: "where its time went", textContent: t.name });
    const line = row("td", "", t.state, percent(t.got) + (t.core_limit ? ` of ${t.core_limit} %` : ""), percent(t.waited),
      size(t.memory) + (t.memory_limit ? ` of ${size(t.memory_limit)}` : "") + (t.host ? `, ${size(t.host)} on the host` : "")
      + (t.file ? `, ${size(t.file)} in files` : "") + (t.out_of_memory ? `, refused ${t.out_of_memory} times` : ""));
    line.className = t.state;
    line.cells[0].append(mark, link);
    return line;
  }));
  if (names.length) turns(s.minute, g, names);
  const day = past.gpus[g.uuid] || { times: [], tenants: {} };
  const all = Object.keys(day.tenants).sort(), parts = (place, label, light) => all.map((n) => [n + label, colour(n, light), day.tenants[n][place]]);
  stacked(s.used, day.times, parts("used", "", 50), { height: 180, range: (u, low, high) => [0, Math.max(high, 1)], text: percent });
  stacked(s.memory, day.times, [...parts("gpu", "", 50), ...parts("host", ", host", 70), ...parts("file", ", files", 85)].filter((p) => p[2].some(Boolean)),
    { height: 180, range: (u, low, high) => [0, Math.max(high, g.memory)], incrs: Array.from({ length: 50 }, (x, i) => 2 ** i), text: size });
}

function fits() {
  const want = Number($("want-memory").value) * 2 ** 30, core = Number($("want-core").value);
  $("fits").replaceChildren(...present.gpus.map((g) => {
    const free = Math.max(g.memory - g.taken, 0), time = Math.max(100 - g.promised, 0);
    const fits = core > time || want > (g.swaps ? g.memory : free) ? "no" : want > free ? "fits with swapping" : "fits";
    const to = g.promises.map((p) => `${p.tenant} ${size(p.memory)}${p.core ? ` and ${p.core} %` : ""}`);
    return el("li", {}, `GPU ${g.index}: ${fits}; ${size(free)} and ${time} % of its time are not promised`, el("small", {}, to.length ? `promised or in use: ${to.join("; ")}` : "nothing is promised"));
  }));
}

function show() {
  $("health").textContent = present.health;
  $("problems").replaceChildren(...present.problems.map((p) => el("li", {}, p.text, el("small", {}, p.remedy))));
  present.gpus.forEach(gpu);
  $("hours").replaceChildren(...past.hours.map((h) => row("td", h.namespace || "outside Kubernetes", h.gpu_hours.toFixed(3))));
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

for (const event of ["input", "resize"]) addEventListener(event, () => present && show());
refresh();
