// Plan explorer: a model, a cluster and a plan of training; what a step would take, and what each other choice would cost.
//
// Python has predicted every plan; this file looks up the rows of those that can be chosen and draws the one that is.

const WIDEST = 16; // machines in a row of the picture
const MACHINES = 128; // that are drawn
const BAR = 24, LANE = 13; // pixels: a bar's height, a rank's in the timeline

const three = (value) => `${+(+value).toPrecision(3)}`;

class PlanExplorer extends Widget {
  constructor(model, el) {
    super(model, el, { data: "build", chosen: "draw" });
    this.device = 0;
    this.build();
  }

  build() {
    const data = (this.data = this.model.get("data")), { texts } = data;
    this.sizes = data.options.map(({ values }) => values.length);
    this.rows = undefined;
    this.drawing = svg("svg", { class: "cluster", role: "slider", tabindex: 0, "aria-valuemin": 0 });
    this.drawing.addEventListener("click", (event) => this.pick(event));
    this.fast = html("button", { type: "button", "data-action": "fastest" });
    this.fast.addEventListener("click", () => this.choose(this.best));
    this.controls = data.options.map((option, k) => (k < 2 ? this.list(option, k) : this.strip(option, k)));
    this.dp = html("b");
    const value = html("div", { class: "value" }, this.dp, html("small", {}, texts.follows)), dp = html("fieldset", {}, html("legend", {}, this.sample("dp"), texts.dp), html("div", { class: "values" }, value));
    const [model, cluster, ...plan] = this.controls.map(({ el }) => el), bar = (...parts) => html("div", { class: "controls" }, ...parts);
    this.parts = Object.fromEntries(["result", "note", "time", "memory", "links", "line"].map((name) => [name, html("div", { class: name })]));
    const { result, note, time, memory, links, line } = this.parts;
    result.setAttribute("aria-live", "polite");
    const left = html("div", {}, html("p", { class: "heading" }, texts.time), time, html("p", { class: "heading" }, texts.memory), memory);
    this.mount("steps d2lps-plans", data.title, bar(model, cluster, this.fast), bar(...plan.slice(0, 2), dp, ...plan.slice(2)), result, this.drawing, note, left, links, html("p", { class: "heading" }, texts.timeline), line);
    unpack(data.plans).then(([table]) => {
      if (data !== this.data) return;
      this.read(table);
      this.draw();
    });
  }

  // Columns of numbers to rows by plan: `state`, and where there are such `held` and `fits`.
  read({ state, why, held, fits, pictures }) {
    const columns = (all) => all.map((column) => column.split(" ").map(Number));
    Object.assign(this, { states: state.split(" ").map(Number), why, pictures });
    const rows = { held: columns(held), fits: columns(fits) };
    let possible = 0, fitting = 0;
    this.rows = this.states.map((kind) => ({
      kind, held: kind < 1 ? rows.held.map((column) => column[possible]) : [], fits: kind ? [] : rows.fits.map((column) => column[fitting]),
      at: [kind < 1 && possible++, kind || fitting++],
    }));
    const whole = this.sizes.slice(2).reduce((a, b) => a * b, 1);
    this.whole = whole;
  }

  index(chosen) { return chosen.reduce((all, i, k) => all * this.sizes[k] + i, 0); }

  // ---- controls -----------------------------------------------------------------------------------------------------

  sample(axis) {
    return svg("svg", { viewBox: "0 0 26 10", "aria-hidden": "true" }, svg("path", { class: `way axis-${this.data.axes.indexOf(axis)}`, d: "M0 5H26" }));
  }

  list({ key, name, values }, k) {
    const select = html("select", { "data-action": key }, ...values.map((value, i) => html("option", { value: i }, value)));
    select.addEventListener("change", () => this.choose(this.chosen.with(k, +select.value)));
    return { el: html("label", { class: "list" }, html("span", { class: "note" }, name), select), show: (i) => (select.value = i) };
  }

  // A value beside the other, below each what the plan would cost with it.
  strip({ key, name, values }, k) {
    const id = `plans-${Math.random().toString(36).slice(2)}`, inputs = values.map((value, i) => html("input", { type: "radio", name: id, value: i, "data-action": key }));
    const costs = values.map(() => html("small"));
    const labels = values.map((value, i) => html("label", { class: "value" }, inputs[i], html("b", {}, value), costs[i]));
    inputs.forEach((input, i) => input.addEventListener("change", () => this.choose(this.chosen.with(k, i))));
    const legend = html("legend", {}, ...(this.data.axes.includes(key) ? [this.sample(key)] : []), name);
    const show = (at) => {
      inputs[at].checked = true;
      values.forEach((value, i) => {
        const [kind, said, title] = this.cost(this.chosen.with(k, i), i === at);
        costs[i].textContent = said;
        costs[i].className = kind;
        labels[i].title = title;
        inputs[i].setAttribute("aria-label", `${name.split(":")[0]} ${value}: ${title || said}`);
      });
    };
    return { el: html("fieldset", {}, legend, html("div", { class: "values" }, ...labels)), show };
  }

  // What another plan takes beside the chosen one: its kind, in short, in full.
  cost(chosen, here) {
    const { texts } = this.data, row = this.rows[this.index(chosen)], [time] = row.fits, [now] = this.row.fits;
    if (row.kind > 0) return ["cannot", texts.cannot, fill(texts.impossible, { why: this.why[row.kind - 1] })];
    if (row.kind) return ["lacks", texts.lacks, this.lacking(row)];
    if (here || !now) return ["", fill(texts.seconds, { x: three(time) }), ""];
    const change = 100 * (time / now - 1), x = Math.abs(change) < 9.95 ? Math.abs(change).toFixed(1) : Math.abs(change).toFixed(0);
    const kind = +x === 0 ? "same" : change < 0 ? "faster" : "slower";
    return [kind, fill(texts[kind], { x }), fill(texts.seconds, { x: three(time) })];
  }

  lacking({ held }) {
    const { texts, holders, fine, clusters } = this.data, { limit } = clusters[this.chosen[1]], gb = (parts) => three((parts * limit) / fine / 1e9);
    const told = holders.map((name, i) => [texts[name === "optimizer" ? "state" : name], held[i]]).filter(([, parts]) => parts).sort((a, b) => b[1] - a[1]);
    const values = { needs: gb(held.reduce((a, b) => a + b, 0)), has: three(limit / 1e9), holders: told.map(([name, parts]) => `${name} ${gb(parts)}`).join(", ") };
    return fill(texts.oom, values);
  }

  choose(chosen) {
    this.model.set("chosen", chosen);
    this.model.save_changes();
  }

  // ---- the plan -----------------------------------------------------------------------------------------------------

  draw() {
    const wanted = this.model.get("chosen");
    this.chosen = this.sizes.map((size, k) => clamp(wanted[k] ?? 0, 0, size - 1));
    if (!this.rows) return;
    const { data, chosen } = this, number = (key) => +data.options.find((option) => option.key === key).values[chosen[data.options.findIndex((option) => option.key === key)]];
    this.cluster = data.clusters[chosen[1]];
    this.row = this.rows[this.index(chosen)];
    this.plan = { tp: number("tp"), pp: number("pp"), micro: number("micro_batch") };
    this.plan.dp = Math.max(1, Math.floor(this.cluster.devices / this.plan.tp / this.plan.pp));
    this.device = Math.min(this.device, this.cluster.devices - 1);
    const base = this.index(chosen.slice(0, 2).concat(this.sizes.slice(2).map(() => 0)));
    this.times = Array.from({ length: this.whole }, (_, i) => [this.rows[base + i].fits[0], base + i]).filter(([time]) => time).sort((a, b) => a[0] - b[0]);
    this.best = this.times.length ? this.placed(this.times[0][1]) : undefined;
    this.dp.textContent = this.plan.dp;
    this.controls.forEach(({ show }, k) => show(chosen[k]));
    const fastest = !this.best || this.row.fits[0] === this.times[0][0];
    this.fast.disabled = fastest;
    this.fast.textContent = this.best && fastest ? data.texts.is_fastest : data.texts.fastest;
    this.say();
    this.resize();
  }

  // Indices of a plan from its number.
  placed(index) {
    return this.sizes.toReversed().map((size) => { const i = index % size; index = Math.floor(index / size); return i; }).toReversed();
  }

  say() {
    const { data, row, chosen, cluster, plan } = this, { texts } = data, at = data.options.findIndex(({ key }) => key === "micro_batch");
    const fitting = data.options[at].values.filter((_, i) => this.rows[this.index(chosen.with(at, i))].kind === 0);
    const { batch, flops } = data.models[chosen[0]], [time] = row.fits, total = row.held.reduce((a, b) => a + b, 0) / data.fine;
    const values = {
      time: three(time), mfu: three((100 * flops) / (time * cluster.devices * cluster.flops)), memory: three((total * cluster.limit) / 1e9), limit: three(cluster.limit / 1e9),
      place: 1 + this.times.findIndex(([other]) => other === time), count: this.times.length, all: this.whole.toLocaleString("en"), m: batch / plan.dp / plan.micro,
      largest: fitting.at(-1) ?? texts.none, why: this.why[row.kind - 1],
    };
    const [head, more] = row.kind > 0 ? ["impossible", ""] : row.kind ? ["", "oom_place"] : ["said", "place"];
    const title = html("b", row.kind ? { class: "lost" } : {}, head ? fill(texts[head], values) : this.lacking(row));
    this.parts.result.replaceChildren(title, more && fill(texts[more], values));
    this.values = values;
  }

  resize() {
    if (!this.rows) return;
    this.drawCluster();
    this.drawTime();
    this.drawMemory();
    this.drawLinks();
    this.drawLine();
  }

  // ---- the cluster, with the groups of one device -----------------------------------------------------------------------

  // Machines from left to right, a stage of the pipeline in a row where that goes.
  place() {
    const { width, cluster: { devices, machine }, plan } = this, machines = Math.ceil(devices / machine), stage = (plan.tp * plan.dp) / machine;
    const fits = (n) => n <= machines && (stage % n === 0 || n % stage === 0);
    this.wide = Array.from({ length: Math.min(WIDEST, machines) }, (_, i) => Math.min(WIDEST, machines) - i).find((n) => n >= 4 && fits(n)) ?? Math.min(WIDEST, machines);
    this.shown = Math.min(machines, MACHINES);
    this.columns = Math.min(4, machine);
    const box = Math.min(76, (width - 2) / this.wide), gap = box > 40 ? 6 : 3;
    this.box = { w: box, gap, cell: (box - gap - 4) / this.columns, lines: Math.ceil(machine / this.columns) };
    this.box.h = this.box.cell * this.box.lines + 4 + gap;
    this.left = (width - this.wide * box) / 2;
  }

  at(device) {
    const { box, columns, cluster: { machine } } = this, m = Math.floor(device / machine), place = device % machine;
    const x = this.left + (m % this.wide) * box.w + box.gap / 2, y = Math.floor(m / this.wide) * box.h + 1;
    return { x: x + 2 + ((place % columns) + 0.5) * box.cell, y: y + 2 + (Math.floor(place / columns) + 0.5) * box.cell };
  }

  groups() {
    const { plan: { tp, dp, pp }, device } = this, along = (stride, count) => Array.from({ length: count }, (_, i) => device + (i - (Math.floor(device / stride) % count)) * stride);
    return { dp: along(tp, dp), pp: along(tp * dp, pp), tp: along(1, tp) };
  }

  drawCluster() {
    this.place();
    const { data: { texts, axes }, cluster: { devices, machine }, box, wide, shown, device } = this, height = Math.ceil(shown / wide) * box.h + 2;
    const size = box.cell - Math.max(1, box.cell * 0.16), square = (i) => { const { x, y } = this.at(i); return `M${(x - size / 2).toFixed(2)} ${(y - size / 2).toFixed(2)}h${size.toFixed(2)}v${size.toFixed(2)}h${(-size).toFixed(2)}z`; };
    const drawn = Math.min(devices, shown * machine), boxes = Array.from({ length: shown }, (_, m) => svg("rect", { class: "machine", x: this.left + (m % wide) * box.w + box.gap / 2, y: Math.floor(m / wide) * box.h + 1, width: box.w - box.gap, height: box.h - box.gap, rx: 3 }));
    const groups = this.row.kind > 0 ? {} : this.groups(), lines = [], names = [];
    for (const [axis, members] of Object.entries(groups)) {
      const seen = members.filter((i) => i < drawn);
      if (members.length < 2) continue;
      const style = `axis-${axes.indexOf(axis)}`;
      lines.push(svg("path", { class: `member ${style}`, d: seen.map(square).join("") }));
      const points = seen.map((i) => this.at(i));
      lines.push(svg("path", { class: `way ${style}`, "data-axis": axis, d: points.map(({ x, y }, i) => `${i && x > points[i - 1].x - box.w ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("") }));
      names.push(...this.name(axis, style, points));
    }
    const all = svg("path", { class: "device", d: Array.from({ length: drawn }, (_, i) => square(i)).join("") });
    this.drawing.setAttribute("viewBox", `0 0 ${this.width} ${height.toFixed(1)}`);
    this.drawing.replaceChildren(...boxes, all, ...lines, svg("path", { class: "self", d: square(device) }), ...names);
    const told = Object.entries(groups).map(([axis, { length }]) => fill(texts.group, { axis, count: length })).join(", ");
    this.drawing.setAttribute("aria-label", fill(texts.picture, { devices: devices.toLocaleString("en"), device, groups: told }));
    this.drawing.setAttribute("aria-valuemax", devices - 1);
    this.drawing.setAttribute("aria-valuenow", device);
    const part = shown * machine < devices ? ` ${fill(texts.part_of, { shown, machines: devices / machine })}` : "";
    this.parts.note.textContent = fill(texts.cluster, { devices: devices.toLocaleString("en"), machine, device }) + part;
  }

  // An axis's name, in the middle of its group, if it hides no whole machine.
  name(axis, style, points) {
    const at = Math.ceil(0.4 * points.length), { x, y } = mix(points[at - 1] ?? points[at], points[at], 0.5), apart = points.length > 1 && Math.hypot(points[at].x - points[at - 1].x, points[at].y - points[at - 1].y);
    if (apart < 2 * this.box.cell && this.box.w < 34) return [];
    const left = clamp(x, 9, this.width - 9);
    return [svg("g", { class: `token ${style}` }, svg("rect", { x: left - 9, y: y - 6.5, width: 18, height: 13, rx: 3 }), svg("text", { x: left, y: y + 3.5 }, axis))];
  }

  pick(event) {
    if (!this.rows) return;
    const { left, top, width } = this.drawing.getBoundingClientRect(), scale = this.width / width, p = { x: (event.clientX - left) * scale, y: (event.clientY - top) * scale };
    const drawn = Math.min(this.cluster.devices, this.shown * this.cluster.machine), far = (i) => { const q = this.at(i); return Math.hypot(p.x - q.x, p.y - q.y); };
    this.device = Array.from({ length: drawn }, (_, i) => i).reduce((best, i) => (far(i) < far(best) ? i : best), 0);
    this.drawCluster();
  }

  key(event) {
    const { machine, devices } = this.cluster ?? {}, by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: machine, ArrowUp: -machine }[event.key];
    if (event.target !== this.drawing || !by) return false;
    this.device = clamp(this.device + by, 0, Math.min(devices, this.shown * machine) - 1);
    this.drawCluster();
    return true;
  }

  // ---- bars ---------------------------------------------------------------------------------------------------------

  // Pieces [class, name, share of the whole width, what to say, in short] beside one another, and what each is.
  bar(pieces, label, width, ...over) {
    let x = 0;
    const drawn = pieces.flatMap(([kind, name, share, , short = name]) => {
      const w = share * width, piece = svg("rect", { class: `bar ${kind}`, x: x.toFixed(2), y: 1, width: Math.max(0, w).toFixed(2), height: BAR - 2 });
      const text = textWidth(short, 11) < w - 6 ? [svg("text", { class: `told ${kind}`, x: x + w / 2, y: BAR / 2 + 4 }, short)] : [];
      x += w;
      return w > 0.2 ? [piece, ...text] : [];
    });
    const legend = pieces.filter(([, , , said]) => said).map(([kind, name, , said]) => html("span", {}, svg("svg", { viewBox: "0 0 12 12", "aria-hidden": "true" }, svg("rect", { class: `bar ${kind}`, x: 0.5, y: 0.5, width: 11, height: 11 })), fill(this.data.texts.value, { name, value: said })));
    const said = pieces.filter(([, , , said]) => said).map(([, name, , said]) => `${name} ${said}`).join(", ");
    return [svg("svg", { viewBox: `0 0 ${width} ${BAR}`, role: "img", "aria-label": `${label}: ${said}` }, svg("rect", { class: "bed", x: 0, y: 1, width, height: BAR - 2 }), ...drawn, ...over), html("div", { class: "d2lps-legend" }, ...legend)];
  }

  nothing(part) { this.parts[part].replaceChildren(html("div", { class: "note" }, this.data.texts.unknown)); }

  kind(part) {
    const axis = this.data.axes.indexOf(part);
    return axis >= 0 ? `along axis-${axis}` : part === "optimizer" ? "optimizer-step" : part;
  }

  drawTime() {
    const { data: { parts, fine, texts }, row: { fits: [time, ...rest] } } = this;
    if (!time) return this.nothing("time");
    const pieces = parts.map((part, i) => [this.kind(part), texts[part === "dp" ? "dp_part" : part], rest[i] / fine, rest[i] && fill(texts.seconds, { x: three((rest[i] / fine) * time) }), part]);
    this.parts.time.replaceChildren(...this.bar(pieces, texts.time, this.width));
  }

  drawMemory() {
    const { data: { holders, fine, texts }, row: { held }, cluster: { limit }, width } = this, total = held.reduce((a, b) => a + b, 0) / fine;
    if (!held.length) return this.nothing("memory");
    const most = Math.max(1.02, total), pieces = holders.map((name, i) => [name, texts[name === "optimizer" ? "state" : name], held[i] / fine / most, held[i] && `${three((held[i] / fine) * limit / 1e9)} GB`]);
    const x = width / most, over = total > 1 ? [svg("rect", { class: "over", x, y: 1, width: width - x, height: BAR - 2 })] : [];
    this.parts.memory.replaceChildren(...this.bar(pieces, texts.memory, width, ...over, svg("path", { class: "limit", d: `M${x} 0V${BAR}` })));
  }

  drawLinks() {
    const { data: { axes, texts, parts }, cluster: { speeds }, row: { fits } } = this, sent = fits.slice(1 + parts.length), wide = this.width > 480 ? (this.width - 24) / 2 : this.width;
    this.parts.links.replaceChildren(...["inside", "across"].map((name, way) => {
      const bytes = axes.map((_, i) => 1e9 * sent[2 * i + way]), total = bytes.reduce((a, b) => a + b, 0), busy = total / speeds[way] / fits[0];
      const title = html("p", { class: "heading" }, texts[name]);
      if (!(total > 0)) return html("div", {}, title, html("div", { class: "note" }, fits.length ? texts.quiet : texts.unknown));
      const scale = Math.max(1, busy), pieces = axes.map((axis, i) => [this.kind(axis), axis, bytes[i] / speeds[way] / fits[0] / scale, bytes[i] && quantity(bytes[i], "B")]);
      const said = fill(texts.busy, { bytes: quantity(total, "B"), speed: `${quantity(speeds[way], "B")}/s`, share: three(100 * busy) });
      return html("div", {}, title, ...this.bar(pieces, texts[name], wide), html("div", { class: "note" }, said));
    }));
  }

  // ---- the timeline -------------------------------------------------------------------------------------------------

  drawLine() {
    const { data: { texts, unit }, width, row: { fits } } = this, picture = this.pictures[fits.at(-1)], forward = fits.at(-2);
    if (!picture) return this.nothing("line");
    const { pp, ranks, rows, backward, end, count } = picture, left = 48, x = (t) => left + (t / end) * (width - left), paths = {};
    rows.forEach((text, lane) => {
      let now = 0;
      for (const [, pause, letter] of text.matchAll(/(\d*)([A-Za-z])/g)) {
        const ahead = letter < "a", until = now + +pause + (ahead ? unit : backward), start = now + +pause;
        const key = `${ahead ? "F" : "B"}${/[Aa]/.test(letter) ? "" : " later"}`, w = Math.max(0.5, x(until) - x(start) - 0.5);
        (paths[key] ??= []).push(`M${x(start).toFixed(2)} ${lane * LANE + 1}h${w.toFixed(2)}v${LANE - 3}h${(-w).toFixed(2)}z`);
        now = until;
      }
    });
    const names = ranks.map((rank, lane) => svg("text", { x: 0, y: lane * LANE + 10 }, fill(texts.rank, { rank })));
    const drawn = svg("svg", { viewBox: `0 0 ${width} ${ranks.length * LANE + 2}`, role: "img", "aria-label": texts.timeline }, ...names, ...Object.entries(paths).map(([kind, d]) => svg("path", { class: kind, d: d.join("") })));
    const said = fill(texts.drawn, { count, m: this.values.m, forward: quantity(forward, "s"), backward: quantity((forward * backward) / unit, "s") });
    const some = ranks.length < pp ? ` ${fill(texts.drawn_some, { rows: ranks.length, pp })}` : "";
    const legend = ["F", "B", "F later"].filter((kind) => kind in paths).map((kind) => html("span", {}, svg("svg", { viewBox: "0 0 12 12", "aria-hidden": "true" }, svg("rect", { class: kind, width: 12, height: 12 })), texts[kind.split(" ").at(-1)]));
    this.parts.line.replaceChildren(drawn, html("div", { class: "d2lps-legend" }, ...legend), html("div", { class: "note" }, said + some));
  }
}

export default shownBy(PlanExplorer);
