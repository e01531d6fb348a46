// Timetable: a row for each rank, a block for each thing that it does. Python has replayed the schedule; this file only draws.

const ROW = 26, LEFT = 46, RIGHT = 58; // pixels: a row, the rank's name, what it holds

class Timetable extends Widget {
  constructor(model, el) {
    super(model, el, { data: "build", chosen: "mark" });
    this.build();
  }

  build() {
    const data = (this.data = this.model.get("data")), { texts } = data;
    this.rows = data.rows.map(({ bars }) => bars.split(";").map((bar) => bar.split(" ")));
    this.drawing = svg("svg", { role: "img", "aria-label": `${data.title} ${data.said}` });
    this.drawing.addEventListener("click", ({ target }) => this.choose(+(target.closest("[data-number]")?.dataset.number ?? -1)));
    const legend = html("div", { class: "d2lps-legend" }, ...data.kinds.map((kind) => html("span", {}, html("i", { class: kind }), texts[kind])));
    this.mount("timetable", data.title, this.drawing, html("div", { class: "said", "aria-live": "polite" }, data.said), legend);
    this.root.setAttribute("tabindex", 0);
  }

  resize() {
    const { width, rows, data: { texts, end, rows: told } } = this, high = rows.length * ROW;
    const x = (t) => LEFT + (t / end) * (width - LEFT - RIGHT);
    const drawn = rows.map((bars, rank) => svg("g", { transform: `translate(0 ${rank * ROW + 18})` },
      svg("text", { x: 0, y: 16 }, fill(texts.rank, { rank })), svg("text", { class: "held", x: width, y: 16 }, told[rank].held),
      ...bars.map(([kind, chunk, number, start, stop]) => this.block(kind, chunk, number, x(+start), x(+stop)))));
    this.drawing.setAttribute("viewBox", `0 0 ${width} ${high + 40}`);
    this.drawing.replaceChildren(svg("text", { class: "held", x: width, y: 11 }, texts.held), ...drawn, timeAxis(x, end, high + 20));
    for (const label of this.drawing.querySelectorAll(".axis text")) label.textContent = label.textContent.replace(/\u00a0s$/, "");
    this.mark();
  }

  block(kind, chunk, number, from, to) {
    const wide = Math.max(1, to - from - 1), label = textWidth(number, 11) + 3 < wide ? [svg("text", { x: (from + to) / 2, y: 16 }, number)] : [];
    return svg("g", { class: `block ${kind}`, "data-number": number, "data-chunk": chunk },
      svg("title", {}, `${kind}${number}`), svg("rect", { x: from, y: 1, width: wide, height: ROW - 4, rx: 2 }), ...label);
  }

  mark() {
    const chosen = this.model.get("chosen");
    for (const block of this.drawing.querySelectorAll(".block")) block.classList.toggle("other", chosen >= 0 && +block.dataset.number !== chosen);
  }

  choose(number) {
    this.model.set("chosen", number === this.model.get("chosen") ? -1 : number);
    this.model.save_changes();
  }

  // The next micro-batch or the one before; none comes before the first and behind the last.
  key(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key], count = 2 + Math.max(...this.rows.flat().map(([, , number]) => +number));
    if (by) this.choose((this.model.get("chosen") + 1 + by + count) % count - 1);
    return Boolean(by);
  }
}

export default shownBy(Timetable);
