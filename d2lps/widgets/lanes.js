// Lanes: several runs on one clock, a strip (player_strip.js) for each.

const PLAY = 10; // seconds that the whole takes at speed 1

class Lanes extends Timed {
  constructor(model, el) {
    super(model, el, { data: "build" });
    this.build();
  }

  build() {
    const data = (this.data = this.model.get("data")), { texts, end, stops, runs, ranks } = data;
    Object.assign(this, { texts, end, stops });
    this.strips = runs.map(({ strip }) => new Strip({ strip, ranks, end }, texts, (t) => (this.stop(false), this.move(t))));
    for (const { drawing } of this.strips) drawing.addEventListener("pointerup", () => this.model.save_changes());
    // The heads tell how long ranks wait, or, where nobody does, how long they do not compute.
    const seen = this.kinds(), wait = seen.has("waiting"), counted = wait ? "waiting" : "computing";
    this.told = wait ? texts.waited : seen.has("sleeping") ? fill(texts.slept, { what: texts.sleeping }) : "";
    this.share = (part) => (wait ? part : 1 - part);
    const heads = runs.map(({ name, strip }, i) => {
      const said = html("span"), spans = strip.map(({ bars }) => bars.filter(({ kind }) => kind === counted).flatMap(({ times }) => times.split(" ").map(Number)));
      this.strips[i].drawing.setAttribute("aria-label", `${name}: ${texts.strip}`);
      return { said, spans, head: html("div", { class: "head" }, html("b", {}, name), said) };
    });
    this.heads = heads;
    this.drawing = html("div", { class: "runs" }, ...runs.map((_, i) => html("div", { class: "strip" }, heads[i].head, this.strips[i].drawing)));
    const legend = this.legend(seen), controls = this.controls(fill(texts.counter_time, { now: "12.3 ms", end: quantity(end, "s") }));
    const longest = runs.map(({ name }) => fill(texts.ended, { name, time: quantity(end, "s") })).join(" ");
    this.mount("player", data.title, this.drawing, legend, controls, this.captions(longest));
    this.root.classList.add("d2lps-lanes");
  }

  kinds() {
    return new Set(this.data.runs.flatMap(({ strip }) => strip.flatMap(({ bars }) => bars.map(({ kind }) => kind))));
  }

  // One for all strips.
  legend(seen) {
    return html("div", { class: "d2lps-legend" }, ...KINDS.filter((kind) => seen.has(kind)).map((kind) => html("span", {}, html("i", { class: kind }), this.texts[kind])));
  }

  resize() {
    for (const strip of this.strips) strip.resize(Math.max(260, this.width));
    this.show(this.t);
  }

  paint() {
    const { t, texts, eps, data: { runs } } = this;
    runs.forEach(({ seconds }, i) => {
      this.strips[i].move(t);
      const { said, spans } = this.heads[i], now = Math.min(t, seconds);
      const spent = spans.flatMap((times) => times.map((at, k) => (k % 2 ? 1 : -1) * Math.min(at, now))).reduce((a, b) => a + b, 0);
      said.textContent = now > eps ? fill(this.told, { share: Math.round(100 * this.share(spent / (now * spans.length))) }) : "";
    });
    const done = runs.filter(({ seconds }) => t >= seconds - eps).map(({ name, seconds }) => fill(texts.ended, { name, time: quantity(seconds, "s") }));
    return { counter: fill(texts.counter_time, { now: quantity(t, "s"), end: quantity(this.end, "s") }), text: done.join(" ") };
  }

  pace() { return this.end / PLAY; }
}

export default shownBy(Lanes);
