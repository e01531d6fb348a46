// Race: several all-reduce algorithms on one clock, a lane for each.
//
// Python has followed every simulated byte; this file only draws `data`: how much of all memory is complete, and when.

const PLAY = 10; // seconds that the whole race takes at speed 1
const LANE = 62, HEAD = 21, PAD = 10; // pixels: a lane, the words above it, the space beside it

// The value of a list of [t, value] at time t.
const valueAt = (curve, t) => curve.findLast(([when]) => when <= t)?.[1] ?? curve[0][1];

class Race extends Timed {
  constructor(model, el) {
    super(model, el, { data: "build" });
    this.build();
  }

  build() {
    const data = this.model.get("data"), { texts, end, stops } = data, names = data.lanes.map(({ name }) => name).join(texts.and);
    Object.assign(this, { data, texts, end, stops });
    this.drawing = svg("svg", { role: "img", "aria-label": texts.race });
    const legend = html("div", { class: "d2lps-legend" }, ...["complete", "gathered"].map((name) => html("span", {}, html("i", { class: name }), texts[name])));
    const controls = this.controls(fill(texts.counter, { now: "12.3 ms", end: quantity(end, "s") }));
    this.mount("race", data.title, this.drawing, legend, controls, this.captions(fill(texts.leading, { names, share: 100 })));
  }

  resize() {
    const { lanes } = this.data, { width, end } = this;
    this.bottom = lanes.length * LANE - 4;
    this.x = (t) => PAD + (t / (end || 1)) * (width - 2 * PAD);
    this.lanes = lanes.map((lane, i) => this.lane(lane, i * LANE));
    this.now = svg("path", { class: "now" });
    this.drawing.setAttribute("viewBox", `0 0 ${width} ${this.bottom + 40}`);
    const seconds = svg("text", { x: width / 2, y: this.bottom + 33, "text-anchor": "middle" }, this.texts.seconds);
    this.drawing.replaceChildren(...this.lanes.map(({ group }) => group), timeAxis(this.x, end, this.bottom), seconds, this.now);
    this.show(this.t);
  }

  // A lane: its name, its state, and under a window as wide as the time that has passed, what has become complete.
  lane({ name, style, seconds, complete, gathered, place }, y) {
    const { width, x } = this, top = y + HEAD, high = LANE - HEAD - 8, ink = `fill: ${algorithmColor(style)}`;
    const area = (curve) => {
      const steps = curve.map(([t, share]) => `H${(x(t) - PAD).toFixed(2)}V${(high * (1 - share)).toFixed(2)}`);
      return `M0 ${high}${steps.join("")}H${(x(seconds) - PAD).toFixed(2)}V${high}Z`;
    };
    const window = svg("svg", { x: PAD, y: top, width: 0, height: high },
      svg("path", { class: "gathered", d: area(gathered), style: ink }), svg("path", { class: "complete", d: area(complete), style: ink }));
    const at = clamp(x(seconds), PAD + 10, width - PAD - 10), state = svg("text", { class: "state", x: width - PAD, y: y + 15 });
    const flag = svg("g", {}, svg("path", { class: "finish", d: `M${x(seconds)} ${top}v${high}` }),
      svg("circle", { class: "place", cx: at, cy: top + high / 2, r: 9 }), svg("text", { class: "number", x: at, y: top + high / 2 + 4 }, String(place)));
    const group = svg("g", { class: "lane" }, svg("rect", { class: "bed", x: PAD, y: top, width: width - 2 * PAD, height: high }),
      svg("text", { class: "name", x: PAD, y: y + 15, style: ink }, name), state, window, flag);
    return { group, window, state, flag };
  }

  paint() {
    const { data, texts, t, eps } = this, x = this.x(t), best = Math.min(...data.lanes.map(({ seconds }) => seconds));
    this.now.setAttribute("d", `${data.lanes.map((_, i) => `M${x} ${i * LANE + HEAD - 2}v${LANE - HEAD - 4}`).join("")}M${x} ${this.bottom}v6`);
    data.lanes.forEach(({ seconds, complete, place }, i) => {
      const { group, window, state, flag } = this.lanes[i], done = t >= seconds - eps;
      window.setAttribute("width", x - PAD);
      group.classList.toggle("first", done && place === 1);
      flag.setAttribute("visibility", done ? "visible" : "hidden");
      const finish = [fill(texts.finish, { place, time: quantity(seconds, "s") }), place > 1 && fill(texts.slower, { x: (seconds / best).toPrecision(3) })];
      state.textContent = done ? finish.filter(Boolean).join("  ") : fill(texts.percent, { x: Math.floor(100 * valueAt(complete, t + eps)) });
    });
    return { counter: fill(texts.counter, { now: quantity(t, "s"), end: quantity(data.end, "s") }), text: this.words(t + eps) };
  }

  // Who has just finished, or is ahead.
  words(t) {
    const { data: { lanes }, texts } = this, list = (chosen) => chosen.map(({ name }) => name).join(texts.and);
    const last = Math.max(...lanes.map(({ seconds }) => seconds).filter((seconds) => seconds <= t));
    if (last >= 0) return fill(texts.finished, { names: list(lanes.filter(({ seconds }) => Math.abs(seconds - last) <= last * 1e-6)), time: quantity(last, "s") });
    const shares = lanes.map(({ complete }) => valueAt(complete, t)), most = Math.max(...shares);
    if (!most) return this.t ? texts.nothing : texts.start;
    return fill(texts.leading, { names: list(lanes.filter((_, i) => shares[i] === most)), share: Math.floor(100 * most) });
  }

  pace() { return this.end / PLAY; }
}

export default shownBy(Race);
