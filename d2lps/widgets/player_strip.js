// The strip under a player: what every lane of every rank does over time, so that a reader sees what is computed while
// messages move. A lane is a row of bars; along its foot run, as a thin line, the messages that it sends and receives.

const KINDS = ["computing", "sleeping", "waiting", "combining", "copying", "moving"]; // each has its color in player.css
const FOOT = 3, MANY = 10, EDGED = 3; // pixels: a lane's messages; lanes, beyond which they lie closer; pixels: a block with edges

class Strip {
  // `seek` is called with the time at which a reader points.
  constructor(scene, texts, seek) {
    const [high, apart] = scene.strip.length > MANY ? [10, 3] : [15, 5]; // pixels: a lane, the space between two ranks
    Object.assign(this, { scene, texts, high, apart });
    const all = scene.strip.flatMap(({ bars }) => bars), blocks = new Set(all.map(({ label }) => label).filter(Boolean));
    this.drawing = svg("svg", { role: "img", "aria-label": [texts.strip, ...blocks].join(", ") });
    for (const name of ["pointerdown", "pointermove"]) this.drawing.addEventListener(name, (event) => event.buttons && seek(this.time(event)));
    const legend = html("div", { class: "d2lps-legend" }), seen = new Set(all.map(({ kind }) => kind));
    for (const kind of KINDS.filter((kind) => seen.has(kind))) legend.append(html("span", {}, html("i", { class: kind }), texts[kind]));
    this.root = html("div", { class: "strip" }, this.drawing, legend);
  }

  resize(width) {
    const { strip, ranks, end } = this.scene, names = ranks.map(({ name }) => this.name(name));
    this.width = width;
    this.left = clamp(Math.max(...names.map((name) => textWidth(name, 11))) + 10, 20, width / 4);
    this.x = (t) => this.left + (t / (end || 1)) * (width - this.left - 10);
    this.now = svg("path", { class: "now" });
    const lanes = svg("g");
    let y = 2;
    strip.forEach(({ rank, bars }, i) => {
      const first = strip[i - 1]?.rank !== rank;
      if (first && i) y += this.apart;
      if (first) lanes.append(svg("text", { class: "rank", x: 2, y: y + this.high - 2 - (this.high > 10) * 2 }, shorten(names[rank], 11, this.left - 6)));
      lanes.append(svg("rect", { class: "bed", x: this.left, y, width: this.x(end) - this.left, height: this.high - 1 }), ...this.lane(bars, y));
      y += this.high;
    });
    this.bottom = y;
    this.drawing.setAttribute("viewBox", `0 0 ${width} ${y + 24}`);
    this.drawing.replaceChildren(lanes, timeAxis(this.x, end, y + 2), this.now);
  }

  name(name) { return /^\d+$/.test(name) ? fill(this.texts.rank, { name }) : name; }

  // What was told first lies below: one may wait and add up while one computes.
  lane(bars, y) {
    return bars.flatMap(({ kind, label, times }) => {
      const t = times.split(" ").map(Number), box = kind === "moving" ? { y: y + this.high - 1 - FOOT, height: FOOT } : { y, height: this.high - 1 };
      return t.flatMap((start, i) => (i % 2 ? [] : [this.bar(kind, label, start, t[i + 1], box)]));
    });
  }

  bar(kind, label, start, end, box) {
    const { x, texts } = this, left = x(start), width = Math.max(0.5, x(end) - left);
    const title = fill(texts.bar, { what: label || texts[kind], start: quantity(start, "s"), end: quantity(end, "s") });
    const group = svg("g", {}, svg("title", {}, title), svg("rect", { class: width < EDGED ? `${kind} thin` : kind, x: left, width, ...box }));
    const text = label && this.high > 10 && shorten(label, 10.5, width - 6);
    if (text) group.append(svg("text", { class: "block", x: left + width / 2, y: box.y + 10.5 }, text));
    return group;
  }

  move(t) {
    this.now.setAttribute("d", `M${this.x(t).toFixed(2)} 0V${this.bottom + 2}`);
  }

  time(event) {
    const { left, width } = this.drawing.getBoundingClientRect(), at = ((event.clientX - left) / width) * this.width;
    return clamp((at - this.left) / (this.x(this.scene.end) - this.left), 0, 1) * this.scene.end;
  }
}
