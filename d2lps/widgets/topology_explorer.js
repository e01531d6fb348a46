// Topology explorer: a machine, the load that an all-reduce puts on its links, and what a missing cable changes.
//
// Python has simulated the whole machine and every variant without a cable; this file only draws `data`.

const WIDEST = 5; // pixels of the fastest link
const PAD = 14;


const percent = (load) => `${+(load / 10).toPrecision(load < 100 ? 2 : 3)} %`;

const numbers = (text) => text && text.split(" ").map(Number);
const family = (name) => name.replace(/[\d.]+$/, "");

// A square, a hexagon or a bar with round ends, around (x, y).
function shape(kind, x, y, half, wide = 0) {
  const attributes = { class: `node ${kind}` };
  if (kind === "host") {
    const corners = [0, 1, 2, 3, 4, 5].map((k) => `${x + 1.2 * half * Math.sin((k * Math.PI) / 3)} ${y - 1.2 * half * Math.cos((k * Math.PI) / 3)}`);
    return svg("path", { ...attributes, d: `M${corners.join("L")}Z` });
  }
  const w = wide / 2 || half * (kind === "switch" ? 1.3 : 1), h = kind === "switch" ? half * 0.75 : half;
  return svg("rect", { ...attributes, x: x - w, y: y - h, width: 2 * w, height: 2 * h, rx: kind === "switch" ? h : half * 0.2 });
}

class Explorer extends Widget {
  constructor(model, el) {
    super(model, el, { data: "build", machine: "draw", algorithm: "draw", removed: "draw", src: "draw", dst: "draw" });
    this.focus = 0; // the cable that the keyboard is at
    this.build();
  }

  build() {
    const data = (this.data = this.model.get("data"));
    this.texts = data.texts;
    this.drawing = svg("svg", { class: "picture", role: "group" });
    this.signs = html("div", { class: "d2lps-legend" });
    this.lines = Object.fromEntries(["result", "hottest", "route", "about"].map((name) => [name, html("div", { class: name })]));
    this.lines.result.setAttribute("aria-live", "polite");
    this.drawn = undefined;
    this.mount("topology", data.title, this.controls(), this.drawing, this.signs, ...Object.values(this.lines));
  }

  resize() { this.draw(); }

  controls() {
    const { data, texts } = this;
    this.selects = Object.fromEntries(["machine", "algorithm", "src", "dst"].map((name) => {
      const select = html("select", { "data-action": name });
      select.addEventListener("change", () => this.choose({ ...(name === "machine" ? { removed: -1, src: -1, dst: -1 } : {}), [name]: +select.value }));
      return [name, select];
    }));
    const { machine, algorithm, src, dst } = this.selects;
    machine.append(...data.machines.map(({ name }, i) => html("option", { value: i }, name)));
    algorithm.append(...data.algorithms.map((name, i) => html("option", { value: i }, name)));
    this.restore = html("button", { type: "button", "data-action": "restore" }, texts.restore);
    this.restore.addEventListener("click", () => this.choose({ removed: -1 }));
    const bar = html("div", { class: "controls" }); // what leaves no choice is not asked for
    if (data.machines.length > 1) bar.append(html("label", {}, texts.machine, machine));
    if (data.algorithms.length > 1) bar.append(html("label", {}, texts.algorithm, algorithm));
    const ends = html("span", {}, html("label", {}, texts.from, src), html("label", {}, texts.to, dst));
    return html("div", {}, bar, html("div", { class: "controls" }, ends, this.restore));
  }

  legend() {
    const { texts, machine } = this, kinds = new Set(machine.nodes.map(({ kind }) => kind));
    const items = ["device", "host", "switch"].filter((kind) => kinds.has(kind))
      .map((kind) => html("span", {}, svg("svg", { viewBox: "0 0 18 16", "aria-hidden": "true" }, shape(kind, 9, 8, 6)), texts[kind]));
    const scale = html("span", {}, "0", html("i"), `100 % ${texts.utilization}`);
    this.signs.replaceChildren(...items, html("span", {}, html("i", { class: "none" }), texts.idle), scale);
  }

  // Places in pixels.
  place() {
    const { width, machine } = this, inner = clamp(machine.aspect * (width - 2 * PAD), 190, 460), room = width - 4 * PAD;
    const sides = machine.nodes.flatMap(({ x, bar = 0 }) => [x - bar / 2, x + bar / 2]), low = Math.min(...sides), span = Math.max(...sides) - low || 1;
    const wide = Math.min(room / span, 1.25 * Math.max(inner / machine.aspect, 0.6 * room));
    this.height = inner + 2 * PAD;
    this.at = machine.nodes.map(({ x, y }) => ({ x: width / 2 + (x - low - span / 2) * wide, y: PAD + (1 - y / machine.aspect) * inner }));
    this.scale = { x: wide, y: inner / machine.aspect };
    const free = this.at.filter((_, i) => machine.nodes[i].bar === undefined), row = machine.nodes.length > 24 ? 0.38 : 0.34;
    const nearest = Math.min(60, ...free.flatMap((p, i) => free.slice(0, i).map((q) => Math.hypot(p.x - q.x, p.y - q.y))));
    this.half = clamp(row * nearest, 4, 17);
    this.fastest = Math.max(...machine.cables.map(({ bandwidth }) => bandwidth));
    this.small = new Set(machine.nodes.filter((_, i) => this.font(i) < 7.5).map(({ name }) => family(name))); // "12" says enough
  }

  // How large a name can be written on its node.
  font(i) {
    const { name, bar } = this.machine.nodes[i];
    return bar !== undefined ? 12 : Math.min(12, (2 * this.half_of(i) - 3) / (0.6 * name.split("/").at(-1).length));
  }

  draw() {
    const { data, model } = this, had = this.drawing.contains(document.activeElement);
    this.machine = data.machines[clamp(model.get("machine"), 0, data.machines.length - 1)];
    const { machine } = this;
    this.removed = machine.cables[model.get("removed")] ? model.get("removed") : -1;
    this.algorithm = clamp(model.get("algorithm"), 0, data.algorithms.length - 1);
    const run = (machine.runs[this.removed + 1] ?? machine.runs[0])[this.algorithm];
    this.run = { ...run, load: run.load && numbers(run.load), bytes: run.bytes && numbers(run.bytes) };
    this.ends = ["src", "dst"].map((name) => ([undefined, "switch"].includes(machine.nodes[model.get(name)]?.kind) ? -1 : model.get(name)));
    if (this.drawn !== machine) this.legend(); // other shapes
    this.drawn = machine;
    const pair = this.ends.join(" ");
    const way = machine.changed[this.removed]?.[pair];
    this.way = numbers(way === undefined ? machine.routes[pair] : way);
    this.focus = Math.min(this.focus, machine.cables.length - 1);
    this.place();
    this.cables = machine.cables.map((cable, k) => this.cable(cable, k));
    this.drawing.setAttribute("viewBox", `0 0 ${this.width} ${Math.round(this.height)}`);
    this.drawing.setAttribute("aria-label", fill(this.texts.picture, { name: machine.name }));
    const above = this.cables.toSorted((one, other) => (one === this.cables[this.removed]) - (other === this.cables[this.removed]));
    this.drawing.replaceChildren(...machine.boxes.map((box) => this.box(box)), ...this.route(), ...above, ...this.tips, ...machine.nodes.map((_, i) => this.node(i)));
    if (had) this.cables[this.focus]?.focus({ preventScroll: true });
    this.show();
  }

  half_of(i) {
    const { bar } = this.machine.nodes[i];
    return bar !== undefined ? (bar * this.scale.x) / 2 : this.half * (this.machine.nodes[i].kind === "switch" ? 1.3 : 1);
  }

  // The shade behind a rack, a pod or a machine, with its name below.
  box({ name, nodes }) {
    const left = Math.min(...nodes.map((i) => this.at[i].x - this.half_of(i))) - 5, right = Math.max(...nodes.map((i) => this.at[i].x + this.half_of(i))) + 5;
    const top = Math.min(...nodes.map((i) => this.at[i].y)) - this.half - 7, bottom = Math.max(...nodes.map((i) => this.at[i].y)) + this.half + 6;
    return svg("g", { class: "box" }, svg("rect", { x: left, y: top, width: right - left, height: bottom - top, rx: 6 }), svg("text", { x: (left + right) / 2, y: bottom + 12 }, name));
  }

  node(i) {
    const { name, kind, bar } = this.machine.nodes[i], { x, y } = this.at[i], end = kind !== "switch";
    const short = name.split("/").at(-1), room = 2 * this.half_of(i) - 3, size = this.font(i), number = short.match(/[\d.]+$/)?.[0] ?? "";
    const [text, font] = this.small.has(family(name)) ? [number, Math.min(11, room / (0.6 * number.length || 1))] : [short, size];
    const group = svg("g", { class: `${end ? "end" : ""} ${this.ends.includes(i) ? "chosen" : ""}`, "data-node": i }, svg("title", {}, name), shape(kind, x, y, bar !== undefined ? 15 : this.half, bar && bar * this.scale.x));
    if (this.ends.includes(i)) group.querySelector(".node").style.strokeWidth = clamp(this.half / 4, 2, 3.5);
    if (text) group.append(svg("text", { x, y: y + font * 0.36, style: `font-size: ${font.toFixed(1)}px` }, text));
    if (end) group.addEventListener("click", () => this.pick(i));
    return group;
  }

  // Where a cable meets a node: a bar straight above or below the other end.
  meet(i, other) {
    if (this.machine.nodes[i].bar === undefined) return this.at[i];
    const half = this.half_of(i) - 8, { x, y } = this.at[i];
    return { x: clamp(this.at[other].x, x - half, x + half), y };
  }

  // Start and end of a link, `shift` pixels to the right of its direction.
  line(src, dst, shift) {
    const start = this.meet(src, dst), end = this.meet(dst, src), length = Math.hypot(end.x - start.x, end.y - start.y) || 1;
    const dx = (-(end.y - start.y) / length) * shift, dy = ((end.x - start.x) / length) * shift;
    return [start, end].map((p) => ({ x: p.x + dx, y: p.y + dy }));
  }

  path([start, end]) {
    return `M${start.x.toFixed(1)} ${start.y.toFixed(1)}L${end.x.toFixed(1)} ${end.y.toFixed(1)}`;
  }

  thick(bandwidth) {
    return Math.max(1.2, Math.min(WIDEST, this.half * 0.36) * Math.sqrt(bandwidth / this.fastest));
  }

  cable({ ends: [a, b], links, bandwidth }, k) {
    const middle = this.line(a, b, 0), thick = this.thick(bandwidth), gone = k === this.removed;
    const group = svg("g", { class: "cable", "data-cable": k, role: "button", tabindex: k === this.focus ? 0 : -1, "aria-label": this.describe(k), "aria-pressed": gone });
    group.append(svg("path", { class: "reach", d: this.path(middle) }));
    if (gone) {
      const { x, y } = mix(...middle, 0.5);
      group.append(svg("path", { class: "gone", d: this.path(middle) }), svg("path", { class: "cross", d: `M${x - 6} ${y - 6}l12 12m0 -12l-12 12` }));
    } else {
      [[a, b], [b, a]].forEach(([src, dst], way) => {
        const load = links[way] < 0 ? undefined : this.run.load?.[links[way]] ?? 0;
        if (load === undefined) return;
        const stroke = load ? `color-mix(in oklab, var(--hot) ${load / 10}%, var(--cold))` : "var(--idle)";
        const line = this.line(src, dst, thick / 2 + 0.6);
        if (load && this.half > 8) group.append(this.tip("head", line, thick * 1.5, `fill: ${stroke}`));
        group.append(svg("path", { class: "lane", d: this.path(line), style: `stroke: ${stroke}; stroke-width: ${load ? thick : Math.min(thick, 1.2)}` }));
      });
    }
    group.addEventListener("click", () => { this.focus = k; this.choose({ removed: gone ? -1 : k }); });
    group.addEventListener("pointermove", () => this.tell(k)); // not pointerenter, which a new drawing under a resting mouse causes
    group.addEventListener("focus", () => { this.focus = k; this.tell(k); });
    group.addEventListener("pointerleave", () => this.tell(-1));
    return group;
  }

  // An arrowhead behind the middle of a line.
  tip(name, [start, end], size, style = "") {
    const { x, y } = mix(start, end, 0.6), angle = (Math.atan2(end.y - start.y, end.x - start.x) * 180) / Math.PI;
    return svg("path", { class: name, style, d: `M${size} 0L${-size * 0.8} ${size * 0.8}V${-size * 0.8}Z`, transform: `translate(${x} ${y}) rotate(${angle})` });
  }

  // The chosen route, under the cables, and a tip on each of its links.
  route() {
    this.tips = [];
    const { way, machine } = this;
    return (way ?? []).slice(1).map((dst, step) => {
      const src = way[step], cable = machine.cables.find(({ ends }) => ends.includes(src) && ends.includes(dst)), thick = this.thick(cable.bandwidth);
      const line = this.line(src, dst, thick / 2 + 0.6);
      this.tips.push(this.tip("tip", line, clamp(this.half * 0.6, 5, 8)));
      return svg("path", { class: "way", d: this.path(line), "stroke-width": thick + 9 });
    });
  }

  // The words below the picture, and the state of the controls.
  show() {
    const { machine, data, texts, removed, run, selects } = this, name = (i) => machine.nodes[i].name, values = {
      bytes: quantity(data.nbytes, "B"), n: machine.nodes.filter(({ kind }) => kind === "device").length, algorithm: data.algorithms[this.algorithm],
    };
    const whole = machine.runs[0][this.algorithm], cable = removed < 0 ? "" : this.title(removed), said = [];
    said.push(whole.lost ? fill(texts.impossible, { ...values, pair: whole.lost }) : fill(texts.whole, { ...values, time: quantity(whole.seconds, "s") }));
    if (removed >= 0 && run.lost) said.push(fill(texts.no_run, { cable, pair: run.lost }));
    else if (removed >= 0) {
      const more = Math.round(100 * (run.seconds / whole.seconds - 1)), change = more ? `${more > 0 ? "+" : "−"}${Math.abs(more)} %` : texts.same;
      said.push(fill(texts.without, { cable, time: quantity(run.seconds, "s"), change }));
    }
    this.lines.result.replaceChildren(...said.map((line, i) => html("div", [whole, run][i].lost ? { class: "lost" } : {}, line)));
    this.lines.hottest.textContent = this.busiest();
    for (const [key, value] of [["machine", data.machines.indexOf(machine)], ["algorithm", this.algorithm]]) selects[key].value = value;
    ["src", "dst"].forEach((key, which) => {
      const options = machine.nodes.map(({ kind }, i) => (kind === "switch" ? null : html("option", { value: i }, name(i)))).filter(Boolean);
      selects[key].replaceChildren(html("option", { value: -1 }, texts.nobody), ...options);
      selects[key].value = this.ends[which];
    });
    this.restore.disabled = removed < 0;
    this.lines.route.textContent = this.told();
    this.tell(this.drawing.contains(document.activeElement) ? this.focus : -1);
  }

  // Three of the links with the highest load, and how many more there are.
  busiest() {
    const { machine, texts, run: { load = [] } } = this, most = Math.max(0, ...load);
    if (!most) return "";
    const ends = machine.cables.flatMap(({ ends, links }) => [{ link: links[0], ends }, { link: links[1], ends: [...ends].reverse() }]);
    const busy = ends.filter(({ link }) => load[link] === most).sort((one, other) => one.link - other.link);
    const named = busy.slice(0, 3).map(({ ends }) => ends.map((i) => machine.nodes[i].name).join(texts.arrow));
    if (busy.length > 3) named.push(fill(texts.others, { n: busy.length - 3 }));
    return fill(texts.busiest, { links: named.join(texts.and), load: percent(most) });
  }

  // The route in words.
  told() {
    const { ends: [src, dst], machine, texts, way } = this, name = (i) => machine.nodes[i].name;
    if (src < 0 || dst < 0) return "";
    if (src === dst) return texts.to_itself;
    if (!way) return fill(texts.no_path, { src: name(src), dst: name(dst) });
    const links = way.slice(1).map((b, k) => machine.cables.find(({ ends }) => ends.includes(way[k]) && ends.includes(b)));
    return fill(links.length === 1 ? texts.direct : texts.path, {
      nodes: way.map(name).join(texts.arrow), n: links.length,
      latency: quantity(links.reduce((sum, { latency }) => sum + latency, 0), "s"), bandwidth: quantity(Math.min(...links.map(({ bandwidth }) => bandwidth)), "B/s"),
    });
  }

  title(k) {
    return this.machine.cables[k].ends.map((i) => this.machine.nodes[i].name).join(" – ");
  }

  describe(k) {
    const { texts, machine, run } = this, { ends: [a, b], links, bandwidth, latency } = machine.cables[k], cable = this.title(k);
    if (k === this.removed) return `${fill(texts.gone, { cable })} ${texts.restore_hint}`;
    const carried = [[a, b], [b, a]].map(([src, dst], way) => run.bytes && links[way] >= 0 && fill(texts.carried, {
      src: machine.nodes[src].name, dst: machine.nodes[dst].name, bytes: quantity(run.bytes[links[way]], "B"), load: percent(run.load[links[way]]),
    })).filter(Boolean).join(texts.and);
    const speed = fill(texts.cable, { cable, bandwidth: quantity(bandwidth, "B/s"), latency: quantity(latency, "s") });
    return [speed, carried && `${carried}.`, texts.remove_hint].filter(Boolean).join(" ");
  }

  tell(k) {
    this.lines.about.textContent = k < 0 ? this.texts.hint : this.describe(k);
  }

  // The first device that is clicked is where the route begins, the second where it ends.
  pick(i) {
    const [src, dst] = this.ends;
    this.choose(src < 0 || dst >= 0 ? { src: i, dst: -1 } : { dst: i });
  }

  choose(values) {
    for (const [name, value] of Object.entries(values)) this.model.set(name, value);
    this.model.save_changes();
  }

  key({ key, target }) {
    const count = this.cables.length, step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[key];
    if (key === "Escape") this.choose({ removed: -1 });
    else if (!this.drawing.contains(target)) return false;
    else if (step) {
      this.cables[this.focus].setAttribute("tabindex", -1);
      this.focus = (this.focus + step + count) % count;
      this.cables[this.focus].setAttribute("tabindex", 0);
      this.cables[this.focus].focus();
    } else if (key === "Enter" || key === " ") this.choose({ removed: this.focus === this.removed ? -1 : this.focus });
    else return false;
    return true;
  }
}

export default shownBy(Explorer);
