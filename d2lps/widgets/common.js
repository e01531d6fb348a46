// What all widgets share. Python puts this text before each widget's own, so that every widget is one module (still.py).

const SVG = "http://www.w3.org/2000/svg";
const GLIDE = 0.6; // seconds that a step button takes
const HOUR = 3600; // seconds

// ---- small helpers --------------------------------------------------------------------------------------------------

function make(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}
const svg = (tag, attributes = {}, ...children) => make(document.createElementNS(SVG, tag), attributes, children);
const html = (tag, attributes = {}, ...children) => make(document.createElement(tag), attributes, children);
const fill = (text, values) => text.replace(/\{(\w+)\}/g, (all, name) => values[name] ?? all);
const clamp = (x, low, high) => Math.min(high, Math.max(low, x));
const mix = (p, q, f) => ({ x: p.x + (q.x - p.x) * f, y: p.y + (q.y - p.y) * f });

// An estimate is enough, and needs no layout by the browser: Chinese characters are as wide as they are high.
const textWidth = (text, size) => [...text].reduce((sum, c) => sum + size * (c > "\u2e80" ? 1 : 0.58), 0);

// What is too long loses its end; a name with a number keeps that: "worker 12" becomes "wo…12".
function shorten(text, size, room) {
  if (textWidth(text, size) <= room) return text;
  let [, head, number] = /^(\D*\S)\s+(\d+)$/.exec(text) ?? [, text, ""];
  while (head && textWidth(`${head}…${number}`, size) > room) head = head.slice(0, -1);
  if (number) return head ? `${head}…${number}` : textWidth(number, size) <= room ? number : "";
  return head.length > 1 ? `${head}…` : "";
}

// The largest size, and at least 9, at which all texts fit their room.
const fitting = (texts, size, room) => Math.max(9, Math.min(size, ...texts.map((text) => room / textWidth(text, 1))));

// 1536 B is 1.54 kB, 0.00125 s is 1.25 ms, 5400 s are 1.5 h: three digits, and no line break before the unit.
function quantity(value, unit) {
  if (unit === "s" && Math.abs(value) >= 1000) return value < HOUR ? `${Math.round(value)}\u00a0s` : quantity(value / HOUR, "h");
  const [factor, prefix] = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""], [1e-3, "m"], [1e-6, "µ"], [1e-9, "n"]]
    .find(([factor]) => Math.abs(value) >= factor * 0.9999) ?? [1, ""];
  return `${+(value / factor).toPrecision(3)}\u00a0${prefix}${unit}`;
}

// An axis of seconds, or of hours, at height y, from 0 to `end`: round times, a hundred pixels apart or so. `x(t)`: from
// seconds to pixels.
function timeAxis(x, end, y) {
  const [scale, unit] = end < HOUR ? [1, "s"] : [HOUR, "h"];
  const low = x(0), high = x(end), rough = (end || 1) / scale / ((high - low) / 100), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((k) => k * power >= rough) * power, group = svg("g", { class: "axis" }, svg("path", { class: "grid", d: `M${low} ${y}H${high}` }));
  for (let k = 0; k * step * scale <= end * 1.0001; k++) {
    const at = x(k * step * scale), anchor = k === 0 ? "start" : at > high - 20 ? "end" : "middle";
    group.append(svg("path", { class: "grid", d: `M${at} ${y}v5` }), svg("text", { x: k ? at : low - 8, y: y + 17, "text-anchor": anchor }, k ? quantity(k * step, unit) : "0"));
  }
  return group;
}

// ---- a widget in the page -------------------------------------------------------------------------------------------

// A subclass has a `drawing`. It may have `resize()`, which draws it for a new `width`, and `key(event)`, which says whether it
// used a key; `changes` names the method to call when a trait of the model has changed.
class Widget {
  constructor(model, el, changes) {
    Object.assign(this, { model, el });
    this.hooks = Object.entries(changes).map(([trait, method]) => [`change:${trait}`, () => this[method]()]);
    for (const hook of this.hooks) model.on(...hook);
    this.watcher = new ResizeObserver(() => this.fit());
  }

  destroy() {
    this.watcher.disconnect();
    for (const hook of this.hooks) this.model.off(...hook);
    this.root.remove();
  }

  // Puts its parts into the page, in place of former ones.
  mount(kind, title, ...parts) {
    // JupyterLab reads keys before the page does, except under this attribute.
    const root = html("div", { class: `d2lps d2lps-${kind}`, role: "group", "aria-label": title, "data-lm-suppress-shortcuts": "true" });
    root.append(html("div", { class: "d2lps-title" }, title), ...parts);
    root.addEventListener("keydown", (event) => this.listen(event));
    this.root?.remove();
    this.root = root;
    this.el.append(root);
    this.watcher.disconnect();
    this.watcher.observe(root);
    this.width = undefined;
    this.fit();
  }

  // One unit of the drawing is one pixel, so that letters keep their size on a telephone.
  fit() {
    const width = clamp(Math.floor(this.drawing.getBoundingClientRect().width) || 696, 260, 720);
    if (width === this.width) return;
    this.width = width;
    this.resize?.();
  }

  // Keys work wherever the focus is in the widget. What a list or a button does with a key by itself stays.
  listen(event) {
    event.stopPropagation();
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "SELECT") return;
    if ([" ", "Enter"].includes(event.key) && ["BUTTON", "SUMMARY"].includes(event.target.tagName)) return;
    if (this.key?.(event)) event.preventDefault();
  }
}

// ---- a widget with a clock ------------------------------------------------------------------------------------------

// Buttons, a slider and keys for `t`, from 0 to `end`. A subclass also has `stops`, the times where a step leads; `pace(t)`,
// the units of t that play in a second; and `paint()`, which draws `t` and returns what to say of it.
class Timed extends Widget {
  constructor(model, el, changes) {
    super(model, el, { t: "follow", ...changes });
    Object.assign(this, { t: 0, speed: 1, motion: null, calm: window.matchMedia("(prefers-reduced-motion: reduce)") });
    this.tick = this.tick.bind(this);
  }

  // Times that went through JSON and a slider are equal up to this.
  get eps() { return this.end * 1e-9; }

  destroy() {
    this.stop(false);
    super.destroy();
  }

  mount(...parts) {
    this.stop();
    this.said = undefined;
    this.t = clamp(this.model.get("t") || 0, 0, this.end);
    super.mount(...parts);
    this.root.setAttribute("tabindex", 0);
  }

  // `longest`: the longest counter, for which there is always room, or the slider would tremble.
  controls(longest) {
    const { texts, end } = this, buttons = html("span", { class: "d2lps-buttons" });
    for (const action of ["first", "previous", "play", "next", "last"]) {
      const button = html("button", { type: "button", "data-action": action, title: texts[action], "aria-label": texts[action] }, html("i"));
      button.addEventListener("click", () => this[action]());
      buttons.append(button);
    }
    this.playButton = buttons.children[2];
    this.scrub = html("input", { type: "range", "data-action": "scrub", min: 0, max: end || 1, step: "any", "aria-label": texts.scrub });
    this.scrub.addEventListener("input", () => (this.stop(false), this.move(+this.scrub.value)));
    this.scrub.addEventListener("change", () => this.model.save_changes());
    const ticks = end && this.stops.length <= 100 ? this.stops : []; // more would be a grey bar
    const track = html("span", { class: "d2lps-track" }, this.scrub, ...ticks.map((t) => html("i", { style: `--at: ${t / end}` })));
    this.counter = html("span", { class: "d2lps-counter", style: `--room: ${Math.ceil(0.88 * longest.length)}ch` });
    const speeds = html("select", { "data-action": "speed", title: texts.speed, "aria-label": texts.speed });
    for (const x of [0.25, 0.5, 1, 2, 4]) speeds.append(html("option", { value: x }, fill(texts.factor, { x })));
    speeds.value = this.speed;
    speeds.addEventListener("change", () => (this.speed = +speeds.value));
    return html("div", { class: "d2lps-controls" }, buttons, track, this.counter, speeds);
  }

  // The longest caption, unseen, holds the place open, so that the page stays still.
  captions(longest) {
    this.caption = html("span", { class: "d2lps-now" });
    const room = html("div", { class: "d2lps-room", "aria-hidden": "true" }, longest);
    return html("div", { class: "d2lps-caption" }, room, html("div", { "aria-live": "polite" }, this.caption));
  }

  // Draws time t and brings the controls to it.
  show(t) {
    this.t = clamp(+t || 0, 0, this.end);
    const { counter, label = "", text } = this.paint();
    this.scrub.value = this.t;
    this.counter.textContent = counter;
    this.scrub.setAttribute("aria-valuetext", [counter, label].filter(Boolean).join(", "));
    if (label + text === this.said) return; // nothing new to read aloud
    this.said = label + text;
    this.caption.replaceChildren(html("b", {}, label), label && " ", text);
  }

  follow() {
    const t = this.model.get("t");
    if (t === this.t) return;
    this.stop();
    this.show(t);
  }

  // Moves the clock for the reader: other widgets may follow each step, Python hears of it when it is saved.
  move(t) {
    this.show(t);
    this.model.set("t", this.t);
  }

  jump(t) {
    this.stop(false);
    this.move(t);
    this.model.save_changes();
  }

  stop(save = true) {
    if (!this.motion) return;
    cancelAnimationFrame(this.motion.frame);
    this.motion = null;
    this.face();
    if (save) this.model.save_changes();
  }

  start(motion) {
    this.stop(false);
    this.motion = { ...motion, t: this.t, last: performance.now(), frame: requestAnimationFrame(this.tick) };
    this.face();
  }

  // The play button shows what a press will do.
  face() {
    const playing = this.motion && this.motion.goal === undefined, name = playing ? "pause" : "play";
    this.playButton.dataset.state = playing ? "playing" : "paused";
    this.playButton.title = this.texts[name];
    this.playButton.setAttribute("aria-label", this.texts[name]);
  }

  after(t) { return this.stops.find((stop) => stop > t + this.eps) ?? this.end; }
  before(t) { return this.stops.findLast((stop) => stop < t - this.eps) ?? 0; }
  base() { return this.motion?.goal ?? this.t; } // while a step is under way, its goal

  first() { this.jump(0); }
  last() { this.jump(this.end); }
  next() { this.glide(this.after(this.base())); }
  previous() { this.glide(this.before(this.base())); }

  play() {
    if (this.motion && this.motion.goal === undefined) return this.stop();
    if (this.t >= this.end - this.eps) this.move(0);
    this.start({});
  }

  glide(goal) {
    if (this.calm.matches || goal === this.t) return this.jump(goal);
    if (this.motion?.goal !== undefined) this.move(this.motion.goal);
    this.start({ goal, rate: (goal - this.t) / GLIDE });
  }

  tick(now) {
    const { motion } = this, seconds = clamp((now - motion.last) / 1000, 0, 0.1), from = this.t;
    motion.last = now;
    motion.frame = requestAnimationFrame(this.tick);
    if (motion.goal !== undefined) {
      const t = from + motion.rate * seconds, done = (t - motion.goal) * motion.rate >= 0;
      return done ? this.jump(motion.goal) : this.move(t);
    }
    motion.t = Math.min(this.end, motion.t + this.pace(motion.t) * seconds * this.speed);
    this.move(this.calm.matches ? this.stops.findLast((stop) => stop <= motion.t + this.eps) ?? 0 : motion.t); // calmly from stop to stop
    if (this.t >= this.end) return this.stop();
    if (this.after(from) <= this.t) this.model.save_changes();
  }

  key(event) {
    const action = { ArrowRight: "next", ArrowLeft: "previous", " ": "play", Home: "first", End: "last" }[event.key];
    if (action) this[action]();
    return action;
  }
}

// What a widget's module exports.
const shownBy = (Kind) => ({
  render({ model, el }) {
    const widget = new Kind(model, el);
    return () => widget.destroy();
  },
});
