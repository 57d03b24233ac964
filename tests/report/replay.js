// The replay of a section: the turns of tenants in lanes, moves of their memory, and below the tokens or
// the memory of each; of one way, and of another one beside it, by the same clock.
const at = id => document.getElementById(id);
const colours = ["#2060a8", "#c87818", "#388840", "#884898", "#a85050", "#707070"];
const native = /^(alone|driver|mps|peer)/; // ways without nvshare
const smooth = 0.2; // seconds in which tokens are counted for their rate
const stage = { list: [], shown: [], length: 0, time: 0, last: 0 }; // last: of the clock, while it plays

const seconds = x => x.toFixed(2) + " s";
const until = (t, from, to) => Math.max(0, Math.min(t, to) - from);

function element(name, props, ...children) {
	const e = Object.assign(document.createElement(name), props);
	e.append(...children);
	return e;
}

// points are what the lower picture draws of a tenant: a rate, or an amount.
function points(p, line) {
	if (!p.tokens) return line;
	const n = Math.max(1, Math.round(smooth / p.step)), sums = [0];
	for (const v of line) sums.push(sums.at(-1) + v);
	return line.map((v, i) => (sums[i + 1] - sums[Math.max(0, i + 1 - n)]) / (Math.min(n, i + 1) * p.step));
}

// curtain hides what is yet to come.
function curtain(u) {
	const { left, top, width, height } = u.bbox, x = Math.max(left, Math.min(u.valToPos(stage.time, "x", true), left + width));
	u.ctx.save();
	u.ctx.fillStyle = "rgba(255, 255, 255, 0.85)";
	u.ctx.fillRect(x, top, left + width - x, height + 2); // a line at zero, too
	u.ctx.fillStyle = "#c03028";
	u.ctx.fillRect(x - 1, top, 2, height);
	u.ctx.restore();
}

function chart(box, p, series, data, options) {
	const grid = { stroke: "#8883" }, axis = { stroke: "#404040", grid, ticks: grid, font: "12px system-ui, sans-serif" };
	const u = new uPlot({
		width: box.clientWidth, legend: { show: false }, cursor: { show: false }, padding: [8, 16, 0, 0],
		series: [{}, ...series.map(s => ({ points: { show: false }, ...s }))], hooks: { draw: [curtain] }, ...options,
		scales: { x: { time: false, range: [0, stage.length] }, y: options.y },
		axes: [{ ...axis, size: 28, values: (u, all) => all.map(v => v + " s") }, { ...axis, size: 58, ...options.left }],
	}, data, box);
	stage.charts.push({ u, box });
}

// lanes draws who had the GPU, a lane for each; below in a lane, paler, its memory moves.
function lanes(box, p) {
	const lane = (of, i, from, to) => u => {
		const path = new Path2D(), high = u.bbox.height / p.names.length, x = t => u.valToPos(t, "x", true);
		for (const [, a, b] of of.filter(([tenant]) => tenant === i)) path.rect(x(a), u.bbox.top + high * (i + from), Math.max(x(b) - x(a), 0.5), high * (to - from));
		return { fill: path };
	};
	const moves = p.moves || [], split = moves.length ? 0.55 : 0.9;
	const series = p.names.flatMap((name, i) => [
		{ width: 0, fill: colours[i % colours.length], paths: lane(p.turns, i, 0.1, split) },
		{ width: 0, fill: colours[i % colours.length] + "70", paths: lane(moves, i, 0.58, 0.9) }]);
	chart(box, p, series, [[0, stage.length], ...series.map(() => [0, 0])], {
		height: 36 + 26 * p.names.length, y: { range: [0, p.names.length] },
		left: { splits: p.names.map((name, i) => i + 0.5), values: () => p.names.map((name, i) => p.names.length - i), grid: { show: false } },
	});
}

function draw(p, most) {
	const tenants = element("ul", { className: "tenants" }), pictures = element("div");
	const title = element("span", { textContent: p.way, className: native.test(p.way) ? "other" : "" });
	at("stages").append(element("h3", {}, title, p.note ? ": " + p.note : ""), tenants, pictures);
	if (p.turns) {
		pictures.append(element("p", { className: "note", textContent: "who may use the GPU" + (p.moves ? "; paler: its memory moves" : "") }));
		lanes(pictures.appendChild(element("div")), p);
	}
	pictures.append(element("p", { className: "note", textContent: p.tokens ? "tokens/s" : "GiB on the GPU" }));
	const times = p.lines[0].map((v, i) => i * p.step);
	chart(pictures.appendChild(element("div")), p, p.lines.map((line, i) => ({ stroke: colours[i % colours.length], width: 2 })),
		[times, ...p.lines.map(line => points(p, line))], { height: 150, y: { range: [0, most] } });
	stage.shown.push({ p, tenants });
}

// tell shows the moment, in pictures and in numbers.
function tell() {
	const t = stage.time;
	at("time").value = t;
	at("clock").textContent = seconds(t) + " of " + seconds(stage.length);
	at("play").textContent = stage.last ? "Pause" : "Play";
	for (const { p, tenants } of stage.shown) {
		tenants.replaceChildren(...p.names.map((name, i) => {
			const had = (p.turns || []).filter(([tenant]) => tenant === i).reduce((sum, [, from, to]) => sum + until(t, from, to), 0);
			const moved = sign => (p.moves || []).filter(m => m[0] === i && sign * m[3] > 0).reduce((sum, [, from, to, size]) => sum + sign * size * (to > from ? until(t, from, to) / (to - from) : t >= to), 0);
			const says = [], now = Math.min(Math.floor(t / p.step), p.lines[i].length - 1);
			if (p.tokens) says.push(p.lines[i].slice(0, Math.ceil(t / p.step)).reduce((a, b) => a + b, 0) + " tokens");
			else says.push(p.lines[i][now].toFixed(1) + " GiB on the GPU");
			if (p.turns) says.push("granted for " + seconds(had));
			if (p.moves) says.push(`moved ${moved(1).toFixed(1)} GiB in, ${moved(-1).toFixed(1)} out`);
			return element("li", {}, element("span", { className: "mark", style: "background: " + colours[i % colours.length] }), `${name}: ${says.join(", ")}`);
		}));
	}
	for (const { u } of stage.charts) u.redraw(false, false);
}

// choose sets up what is to play.
function choose() {
	const here = stage.list.filter(p => p.case === at("case").value), by = id => here.find(p => p.way === at(id).value);
	const both = [by("way"), by("beside")].filter(Boolean);
	at("stages").replaceChildren();
	Object.assign(stage, { shown: [], charts: [], last: 0, length: Math.max(...both.map(p => p.seconds)) });
	stage.time = at("time").max = stage.length;
	const most = 1.05 * Math.max(1, ...both.flatMap(p => p.lines.flatMap(line => points(p, line))));
	both.forEach(p => draw(p, most));
	tell();
}

function ways() {
	const of = stage.list.filter(p => p.case === at("case").value).map(p => p.way), without = of.filter(way => native.test(way));
	const first = of.find(way => !without.includes(way)) || of[0], other = ["driver", ...without].find(way => of.includes(way) && way !== first) || "";
	options(at("way"), of.map(way => [way, way]), first);
	options(at("beside"), [["", "nothing"], ...of.map(way => [way, way])], other);
	for (const id of ["way", "beside"]) at(id).parentElement.hidden = of.length < 2;
	choose();
}

function replay(list) {
	stage.list = list;
	stage.last = 0;
	at("replay").hidden = !list.length;
	if (!list.length) return;
	const cases = [...new Set(list.map(p => p.case))];
	options(at("case"), cases.map(name => [name, name]), cases[0]);
	ways();
}

function frame(now) {
	if (!stage.last) return;
	stage.time = Math.min(stage.time + (now - stage.last) / 1000 * at("speed").value, stage.length);
	stage.last = stage.time < stage.length ? now : 0;
	tell();
	requestAnimationFrame(frame);
}

options(at("speed"), [["0.1", "0.1"], ["0.25", "0.25"], ["1", "1"], ["4", "4"]], "1");
at("case").addEventListener("change", ways);
at("way").addEventListener("change", choose);
at("beside").addEventListener("change", choose);
at("time").addEventListener("input", () => { stage.time = Number(at("time").value); stage.last = 0; tell(); });
at("play").addEventListener("click", () => {
	if (!stage.last && stage.time >= stage.length) stage.time = 0;
	stage.last = stage.last ? 0 : performance.now();
	tell();
	requestAnimationFrame(frame);
});
addEventListener("resize", () => stage.charts?.forEach(({ u, box }) => u.setSize({ width: box.clientWidth, height: u.height })));
