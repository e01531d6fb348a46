// Planning explorer: a cluster, a pod of it, a rack, a machine, a device; what leads out of each, and what a step sends over it.
//
// Python has counted everything; this file keeps the way that a reader has gone, and draws where it leads.

const MOST = 192; // parts that are drawn
const UP = 58; // pixels above a unit, for what leads out of it

const three = (value) => (value >= 999.5 ? Math.round(value).toLocaleString("en") : `${+value.toPrecision(3)}`);

class PlanningExplorer extends Widget {
  constructor(model, el) {
    super(model, el, { data: "build", job: "draw", path: "draw" });
    this.chosen = 0;
    this.build();
  }

  build() {
    const data = (this.data = this.model.get("data")), { texts } = data;
    this.drawing = svg("svg", { class: "unit", role: "slider", tabindex: 0, "aria-valuemin": 0 });
    this.drawing.addEventListener("click", (event) => this.pick(event));
    this.select = html("select", { "data-action": "job" }, ...data.jobs.map(({ name }, i) => html("option", { value: i }, name)));
    this.select.addEventListener("change", () => this.set({ job: +this.select.value, path: [] }));
    this.way = html("nav", { class: "path", "aria-label": data.title });
    this.parts = Object.fromEntries(["result", "facts", "traffic"].map((name) => [name, html("div", { class: name })]));
    this.note = html("div", { class: "note" });
    this.parts.result.setAttribute("aria-live", "polite");
    const bar = html("div", { class: "controls" }, html("label", { class: "list" }, texts.option, this.select), this.way);
    this.mount("steps d2lps-planning", data.title, bar, this.parts.result, this.drawing, this.note, this.parts.facts, this.parts.traffic);
    this.draw();
  }

  set(values) {
    if (values.path) this.chosen = 0;
    for (const [name, value] of Object.entries(values)) this.model.set(name, value);
    this.model.save_changes();
  }

  // ---- where the reader is ------------------------------------------------------------------------------------------

  draw() {
    const { data, model } = this, { texts } = data;
    this.job = data.jobs[clamp(model.get("job"), 0, data.jobs.length - 1)];
    const { levels } = this.job, path = model.get("path").slice(0, levels.length - 1).map((i, k) => clamp(i, 0, levels[k].count - 1));
    Object.assign(this, { path, level: levels[path.length] });
    this.chosen = clamp(this.chosen, 0, this.level.count - 1);
    this.select.value = data.jobs.indexOf(this.job);
    const steps = levels.slice(0, path.length + 1).map(({ kind }, k) => {
      const name = k ? fill(texts.here, { level: texts[kind], i: path[k - 1] }) : texts[kind];
      const button = html("button", { type: "button", "data-level": kind }, name);
      if (k === path.length) button.setAttribute("aria-current", "true");
      button.addEventListener("click", () => this.set({ path: path.slice(0, k) }));
      return button;
    });
    this.way.replaceChildren(...steps);
    const { time, mfu, tokens, name } = this.job;
    this.parts.result.textContent = fill(texts.said, { name, time: three(time), mfu: three(100 * mfu), tokens: three(tokens / 1e6) });
    this.facts();
    this.traffic();
    this.resize();
  }

  get last() { return this.path.length === this.job.levels.length - 1; }

  enter(i) {
    if (!this.last) this.set({ path: [...this.path, i] });
  }

  // ---- the picture ----------------------------------------------------------------------------------------------------

  resize() {
    if (!this.level) return;
    const { data: { texts }, level, width, last } = this, shown = last ? 1 : Math.min(level.count, MOST);
    const columns = Math.min(shown, Math.max(2, Math.min(24, Math.ceil(Math.sqrt(shown * 3))), 1)), lines = Math.ceil(shown / columns), cell = Math.min(64, (width - 24) / columns);
    const left = (width - columns * cell) / 2, top = UP + 8, height = top + lines * cell + 10;
    Object.assign(this, { shown, columns, cell, left, top });
    const squares = Array.from({ length: shown }, (_, i) => {
      const { x, y } = this.at(i), kind = `part ${i === this.chosen && !last ? "chosen" : ""}`, size = cell - Math.max(2, cell * 0.14);
      const group = svg("g", { class: kind, "data-part": i }, svg("rect", { x: x + (cell - size) / 2, y: y + (cell - size) / 2, width: size, height: size, rx: Math.min(5, size / 5) }));
      if (cell > 22) group.append(svg("text", { x: x + cell / 2, y: y + cell / 2 + 4 }, last ? "" : i));
      return group;
    });
    const wide = 4 + 26 * Math.sqrt(level.up / Math.max(level.below, level.up, 1)), box = svg("rect", { class: "box", x: left - 8, y: UP, width: columns * cell + 16, height: height - UP - 2, rx: 7 });
    const cable = level.up ? [svg("path", { class: "cable", d: `M${width / 2} 4V${UP}`, "stroke-width": wide }), svg("text", { class: "speed", x: width / 2 + wide / 2 + 8, y: 22 }, quantity(level.up, "B/s")), svg("text", { class: "quiet", x: width / 2 + wide / 2 + 8, y: 38 }, texts.up)] : [svg("text", { class: "quiet", x: width / 2, y: 38, "text-anchor": "middle" }, texts.nothing_above)];
    this.drawing.setAttribute("viewBox", `0 0 ${width} ${height.toFixed(1)}`);
    this.drawing.replaceChildren(...cable, box, ...squares);
    this.drawing.setAttribute("aria-valuemax", shown - 1);
    this.drawing.setAttribute("aria-valuenow", this.chosen);
    this.drawing.setAttribute("aria-label", fill(texts.picture, { level: texts[level.kind], n: level.count, i: this.chosen }));
    const some = shown < level.count ? ` ${fill(texts.some, { shown, n: level.count })}` : "";
    this.note.textContent = `${fill(texts[`${level.kind}_of`], { n: level.count.toLocaleString("en") })}.${some} ${texts.hint}`;
  }

  at(i) { return { x: this.left + (i % this.columns) * this.cell, y: this.top + Math.floor(i / this.columns) * this.cell }; }

  pick(event) {
    const part = event.target.closest("[data-part]");
    if (part) this.enter(+part.dataset.part);
  }

  key(event) {
    if (event.key === "Escape") {
      if (this.path.length) this.set({ path: this.path.slice(0, -1) });
      return true;
    }
    if (event.target !== this.drawing) return false;
    if (event.key === "Enter" || event.key === " ") return this.enter(this.chosen), true;
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.columns, ArrowUp: -this.columns }[event.key];
    if (!by) return false;
    this.chosen = clamp(this.chosen + by, 0, this.shown - 1);
    this.resize();
    return true;
  }

  // ---- numbers ----------------------------------------------------------------------------------------------------------

  facts() {
    const { data: { texts }, level } = this, rows = [[texts.devices, level.devices.toLocaleString("en")], [texts.power, quantity(level.watts, "W")]];
    if (!this.last) rows.push([texts.below, quantity(level.below, "B/s")]);
    if (level.up && !this.last) rows.push([texts.over, fill(texts.ratio, { x: three(level.over) })]);
    this.parts.facts.replaceChildren(...rows.map(([name, value]) => html("div", {}, html("span", {}, name), html("b", {}, value))));
  }

  // A bar for each axis: the share of a step in which its bytes fill what leads out.
  traffic() {
    const { data: { texts, axes }, level, job } = this, rows = [];
    const heads = [[level.sent, level.up, fill(texts.traffic, { level: texts[level.kind] })]];
    if (level.inside) heads.push([level.sent_inside, level.inside, texts.inside]);
    for (const [sent, speed, title] of heads) {
      if (!speed) continue;
      rows.push(html("p", { class: "heading" }, title));
      const found = axes.filter((axis) => sent[axis] > 0);
      if (!found.length) rows.push(html("div", { class: "note" }, texts.none));
      for (const axis of found) {
        const share = (100 * sent[axis]) / speed / job.time, bar = html("i", { class: `axis-${axes.indexOf(axis)}`, style: `width: ${Math.min(100, share)}%` });
        rows.push(html("div", { class: "row", "data-axis": axis }, html("b", {}, texts[axis]), html("span", { class: "track" }, bar), html("span", {}, fill(texts.busy, { bytes: quantity(sent[axis], "B"), share: three(share) }))));
      }
    }
    this.parts.traffic.replaceChildren(...rows);
  }
}

export default shownBy(PlanningExplorer);
