// Player: animates one run of a distributed algorithm.
//
// Python computes a `scene` (ranks, their buffers cut into cells, messages, changes of cells); this file only draws it.
// A cell shows whose contributions it holds: one stripe for each rank, in that rank's colour and at that rank's place.

const COLOURS = 16; // --rank-0 ... --rank-15 in player.css
const PLAY = 1.2; // seconds from one stop to the next while playing, at speed 1
const PAD = 12; // between the cards and the edge of the picture
const CELL = 34; // height of a cell, pixels
const TALL = 38; // room for a message between two cards, one above the other

const middle = (box) => ({ x: box.x + box.w / 2, y: box.y + box.h / 2 });
const smooth = (f) => f * f * (3 - 2 * f);
const colour = (rank) => `fill: var(--rank-${rank % COLOURS})`;

// The last entry of a list sorted by t that isn't after `t`.
function indexAt(list, t) {
  let low = 0, high = list.length;
  while (high - low > 1) {
    const centre = (low + high) >> 1;
    if (list[centre].t <= t) low = centre; else high = centre;
  }
  return low;
}

// Numbers the messages that leave one rank for another at the same time.
function withLanes(messages) {
  const seen = new Map();
  return messages.map((message) => {
    const key = [message.src, message.dst, message.start].join(), lane = seen.get(key) ?? 0;
    seen.set(key, lane + 1);
    return { ...message, lane: lane % 5 };
  });
}

// ---- the run: what each cell holds when ------------------------------------------------------------------------------

class Story {
  constructor(scene) {
    this.scene = scene;
    this.end = scene.end;
    this.eps = this.end * 1e-9; // times that went through JSON and a slider are equal up to this
    this.stops = scene.stops;
    this.stride = this.end / Math.max(1, this.stops.length - 1);
    this.messages = withLanes(scene.messages);
    this.cellsOf = scene.ranks.map(() => []);
    scene.cells.forEach((cell, c) => this.cellsOf[scene.rows[cell.row].rank].push(c));
    this.history = scene.cells.map((_, c) => [{ t: -Infinity, label: "", from: [], ...scene.initial[c] }]);
    for (const change of scene.changes) this.history[change.cell].push({ ...change, from: change.from ?? [] });
    const held = [...this.history.flat(), ...this.messages.flatMap((m) => m.parts)];
    this.contributors = [...new Set(held.flatMap((state) => state.from))].sort((a, b) => a - b);
    this.repeats = held.some((state) => new Set(state.from).size < state.from.length);
  }

  state(cell, t) {
    return this.history[cell][indexAt(this.history[cell], t + this.eps)];
  }

  // Where the stripe of each contributor lies: [rank, place, places]. Where the scene says how many contributions are the
  // whole, a cell fills up, each rank at a fixed place; otherwise the contributors share the cell.
  stripes(from) {
    const distinct = [...new Set(from)].sort((a, b) => a - b);
    const { whole } = this.scene, fixed = this.contributors.length === whole;
    const places = Math.max(whole, distinct.length);
    return distinct.map((rank, i) => [rank, whole && fixed ? this.contributors.indexOf(rank) : i, places]);
  }

  complete(from) {
    return this.scene.whole > 0 && new Set(from).size === this.scene.whole && from.length === this.scene.whole;
  }

  // The cells that a message is read from: those that look like its parts when it leaves.
  sources(message) {
    const alike = (a, b) => [...a].sort().join() === [...b].sort().join();
    return message.parts.map((part) => {
      const same = this.cellsOf[message.src].filter((c) => this.state(c, message.start).label === part.label);
      return same.find((c) => alike(this.state(c, message.start).from, part.from)) ?? same[0];
    }).filter((c) => c !== undefined);
  }

  // The cells that a message ends in: those that change first once it has arrived.
  targets(message) {
    const changed = (c, label) => this.history[c].find((s) => s.t >= message.end - this.eps && s.label === label && s.how !== "copy");
    return message.parts.map(({ label }) => this.cellsOf[message.dst].map((c) => ({ c, change: changed(c, label) }))
      .filter(({ change }) => change).sort((a, b) => a.change.t - b.change.t)[0]?.c).filter((c) => c !== undefined);
  }

  // The stop that the playhead has reached or is on its way to: its caption tells what is in flight now.
  stopIndex(t) {
    const i = this.stops.findIndex((stop) => stop.t >= t - this.eps);
    return i < 0 ? this.stops.length - 1 : i;
  }
}

// ---- layout: boxes in pixels ----------------------------------------------------------------------------------------

// Ranks without a position stand on a circle. Positions are stretched to the whole picture, and a circle of many ranks is
// rounded off to a square, |x|⁴ + |y|⁴ = 1, in which wide cards find more room; on a small screen it becomes two columns.
function places(ranks, small) {
  const raw = ranks.map(({ x, y }, i) => {
    const angle = (2 * Math.PI * i) / ranks.length - Math.PI / 2;
    return x == null || y == null ? { x: 0.5 + Math.cos(angle) / 2, y: 0.5 + Math.sin(angle) / 2 } : { x, y };
  });
  const stretch = (key) => {
    const values = raw.map((p) => p[key]), low = Math.min(...values), span = Math.max(...values) - low;
    return values.map((value) => (span < 1e-6 ? 0.5 : (value - low) / span));
  };
  const xs = stretch("x"), ys = stretch("y"), at = raw.map((_, i) => ({ x: xs[i] - 0.5, y: ys[i] - 0.5 }));
  const circle = ranks.length > 5 && at.every(({ x, y }) => Math.abs(Math.hypot(x, y) - 0.5) < 0.02);
  if (circle && small) return columns(at);
  return at.map(({ x, y }) => {
    const push = circle ? 0.5 / (x ** 4 + y ** 4) ** 0.25 : 1;
    return { x: 0.5 + x * push, y: 0.5 + y * push };
  });
}

// Down on the right, up on the left, so that neighbours on the circle stay neighbours.
function columns(at) {
  const turn = ({ x, y }) => (Math.atan2(x, -y) + 2 * Math.PI + 1e-3) % (2 * Math.PI); // clockwise from the top
  const order = at.map((_, i) => i).sort((i, j) => turn(at[i]) - turn(at[j])), half = Math.ceil(at.length / 2), result = [];
  order.forEach((rank, k) => (result[rank] = k < half ? { x: 1, y: k / (half - 1) } : { x: 0, y: (2 * half - 1 - k) / (half - 1) }));
  return result;
}

// The lowest picture in which cards of width w and height h keep `gap` between them: Infinity where none does.
function neededHeight(at, width, w, h, gap) {
  let height = h;
  for (let i = 0; i < at.length; i++) {
    for (let j = 0; j < i; j++) {
      if (Math.abs(at[i].x - at[j].x) * (width - 2 * PAD - w) >= w + gap) continue; // side by side
      height = Math.max(height, h + (h + Math.max(gap, TALL)) / Math.abs(at[i].y - at[j].y));
    }
  }
  return height;
}

// Cards as wide as fits, rows in them, cells in those.
function layout({ ranks, rows, cells }, width) {
  const n = ranks.length, small = width < 520, at = places(ranks, small);
  const own = ranks.map((_, r) => rows.map((row, i) => ({ ...row, i })).filter((row) => row.rank === r));
  const captioned = own.some((list) => list.length > 1);
  const rowHeight = CELL + 8 + (captioned ? 13 : 0);
  const heights = own.map((list) => (list.length ? 22 + list.length * rowHeight + 2 : 30));
  const h = Math.max(30, ...heights);
  const most = Math.max(1, ...rows.map((_, i) => cells.filter((cell) => cell.row === i).length));
  const gap = (n <= 4 ? 64 : n <= 8 ? 40 : 20) * (small ? 0.8 : 1);
  const limit = width * (small ? 3 : 0.85), widest = clamp(most * 34 + 20, 112, 240);
  const fits = (w, least, high) => w <= least || neededHeight(at, width, w, h, gap) <= high;
  let w = widest;
  while (!fits(w, 64, limit)) w -= 2;
  while (!fits(w, 40, 1.25 * limit)) w -= 2; // rather a higher picture than slimmer cards
  const round = at.some((p) => p.y !== at[0].y) ? h + width * (n < 3 ? 0.2 : n < 4 ? 0.3 : n < 6 ? 0.42 : 0.52) : h; // not too flat
  const inner = Math.max(round, Math.min(neededHeight(at, width, w, h, gap), 2 * limit));
  const cards = at.map((p, r) => ({
    x: PAD + p.x * (width - 2 * PAD - w), y: PAD + p.y * (inner - h) + (h - heights[r]) / 2, w, h: heights[r],
  }));
  const rowBoxes = rows.map((row, i) => {
    const card = cards[row.rank], k = own[row.rank].findIndex((other) => other.i === i), side = w < 80 ? 5 : 8;
    return { x: card.x + side, y: card.y + 22 + k * rowHeight + (captioned ? 13 : 0), w: w - 2 * side, h: CELL };
  });
  const cellBoxes = cells.map(({ row, start, stop }) => {
    const box = rowBoxes[row], space = (stop - start) * box.w > 12 ? 3 : 1;
    return { x: box.x + start * box.w + space / 2, y: box.y, w: Math.max(1.5, (stop - start) * box.w - space), h: box.h };
  });
  return { width, height: inner + 2 * PAD, cards, rowBoxes, cellBoxes, captioned };
}

// ---- drawing --------------------------------------------------------------------------------------------------------

class Picture {
  constructor(story, texts, root) {
    Object.assign(this, { story, texts, root });
  }

  // Starts afresh: at the beginning and when the width has changed.
  resize(width) {
    const { scene } = this.story, boxes = layout(scene, width);
    Object.assign(this, boxes);
    const slim = Math.min(...boxes.cellBoxes.map((box) => box.w));
    const labels = this.story.history.flat().map((state) => String(state.label ?? ""));
    this.labelled = labels.every((label) => textWidth(label, 11) + 3 <= slim);
    this.layered = slim / Math.max(1, scene.whole) < 2.5; // too slim for upright stripes: lay them on top of one another
    this.root.classList.toggle("slim", slim < 10);
    this.arrows = svg("g", { class: "arrows" });
    this.tokens = svg("g", { class: "tokens" });
    this.groups = boxes.cellBoxes.map(() => svg("g", { class: "cell" }));
    this.shown = boxes.cellBoxes.map(() => -1);
    this.live = new Map();
    this.root.setAttribute("viewBox", `0 0 ${width} ${Math.round(boxes.height)}`);
    this.root.replaceChildren(this.arrows, ...scene.ranks.map((_, r) => this.card(r)), this.tokens);
  }

  card(r) {
    const { scene, contributors, cellsOf } = this.story, box = this.cards[r], name = String(scene.ranks[r].name);
    const group = svg("g", { class: "card", "data-rank": r }, svg("rect", { class: "frame", x: box.x, y: box.y, width: box.w, height: box.h, rx: 6 }));
    const key = contributors.includes(r) ? 14 : 0, x = box.x + (box.w < 80 ? 5 : 8), room = box.x + box.w - 6 - x - key;
    if (key) group.append(svg("rect", { class: "key", x, y: box.y + 7, width: 10, height: 10, rx: 2, style: colour(r) }));
    const full = /^\d+$/.test(name) ? fill(this.texts.rank, { name }) : name;
    const title = shorten(textWidth(full, 12) <= room ? full : name, 12, room);
    group.append(svg("text", { class: "name", x: x + key, y: box.y + 16 }, title));
    scene.rows.forEach((row, i) => row.rank === r && group.append(...this.rowName(row, i, room - textWidth(title, 12) - 8)));
    group.append(...cellsOf[r].map((c) => this.groups[c]));
    return group;
  }

  // Above the row where a card has several rows, at the right of the card's head where it has one and there is room.
  rowName(row, i, room) {
    const box = this.rowBoxes[i], name = String(row.name ?? "");
    if (this.captioned) return [svg("text", { class: "row", x: box.x + 1, y: box.y - 4 }, shorten(name, 10.5, box.w))];
    if (textWidth(name, 10.5) > room) return [];
    return [svg("text", { class: "row", x: box.x + box.w, y: box.y - 6, "text-anchor": "end" }, name)];
  }

  // The picture of what a cell or a part of a message holds: outline, label, stripes, and its marks.
  content({ x, y, w, h }, state) {
    const from = state.from ?? [], repeated = from.length - new Set(from).size > 0, complete = this.story.complete(from);
    const kind = repeated ? "repeated" : complete ? "complete" : from.length ? "partial" : "blank";
    const band = this.labelled ? 14 : complete || repeated ? 6 : 0; // the label's place above the stripes, a cap when complete
    const group = svg("g", { class: kind }, svg("rect", { class: "paper", x, y, width: w, height: h, rx: Math.min(2, w / 4) }));
    const inside = { x: x + 1, y: y + Math.max(1, band), w: w - 2, h: h - Math.max(1, band) - 1 };
    for (const [rank, place, total] of this.story.stripes(from)) {
      group.append(...this.stripe(inside, rank, place, total, from.filter((other) => other === rank).length > 1));
    }
    if (complete || repeated) group.append(svg("rect", { class: "cap", x, y, width: w, height: band }));
    group.append(svg("rect", { class: "outline", x, y, width: w, height: h, rx: Math.min(2, w / 4) }));
    if (this.labelled) group.append(svg("text", { class: "label", x: x + w / 2, y: y + 11 }, this.label(state, kind, w)));
    return group;
  }

  // The label, and where there is room a sign: ✓ complete, ×2 counted twice.
  label(state, kind, w) {
    const from = state.from ?? [], label = from.length ? String(state.label ?? "") : "";
    const count = Math.max(0, ...from.map((rank) => from.filter((other) => other === rank).length));
    const sign = { complete: "✓", repeated: `×${count}` }[kind] ?? "", both = [label, sign].filter(Boolean).join(" ");
    return kind === "repeated" ? sign : textWidth(both, 11) + 3 <= w ? both : label;
  }

  stripe(box, rank, place, total, repeated) {
    const { x, y, w, h } = this.layered
      ? { x: box.x, y: box.y + (box.h * (total - 1 - place)) / total, w: box.w, h: box.h / total }
      : { x: box.x + (box.w * place) / total, y: box.y, w: box.w / total, h: box.h };
    const thin = !this.layered && w > 5 ? 0.7 : 0; // a hairline between broad stripes
    const nodes = [svg("rect", { class: "stripe", "data-rank": rank, x, y, width: Math.max(0.5, w - thin), height: h, style: colour(rank) })];
    if (repeated) {
      const lines = [];
      for (let at = Math.min(5, h); at <= h; at += 4) lines.push(`M${x} ${y + at}L${x + w} ${y + at - Math.min(5, h)}`);
      nodes.push(svg("path", { class: "hatch", d: lines.join("") }));
    }
    return nodes;
  }

  // Brings the picture to time t. Only what differs from the last picture is touched.
  draw(t) {
    const { history, messages, stride, eps } = this.story, fade = stride * 0.4;
    this.groups.forEach((group, c) => {
      const i = indexAt(history[c], t + eps);
      if (i === this.shown[c]) return;
      this.shown[c] = i;
      const state = history[c][i];
      group.replaceChildren(this.content(this.cellBoxes[c], state), svg("title", {}, this.describe(state)));
    });
    const wanted = new Map();
    const keep = (key, make, value) => {
      const entry = this.live.get(key) ?? make();
      entry.move(value);
      wanted.set(key, entry);
    };
    this.shown.forEach((i, c) => {
      const age = t - history[c][i].t; // a cell that has just changed wears a mark for a while
      if (i > 0 && age < fade) keep(`c${c}.${i}`, () => this.mark(c, history[c][i]), 1 - Math.max(0, age) / fade);
    });
    messages.forEach((message, i) => {
      if (message.start > t + eps || message.end <= t + eps) return;
      keep(i, () => this.flight(message), Math.max(0, (t - message.start) / (message.end - message.start)));
    });
    for (const [key, { nodes }] of this.live) if (!wanted.has(key)) for (const [, node] of nodes) node.remove();
    // What lies above what depends on t alone, not on what was drawn before.
    const added = [...wanted.keys()].some((key) => !this.live.has(key));
    if (added) for (const { nodes } of wanted.values()) for (const [layer, node] of nodes) layer.append(node);
    this.live = wanted;
  }

  describe({ label, from }) {
    return from.length ? fill(this.texts.cell, { label: label ?? "", from: from.join(" + ") }) : this.texts.blank;
  }

  // A sign on a cell that has just changed: + combined, ↓ received, = copied.
  mark(c, { how, op, from }) {
    const box = this.cellBoxes[c], r = box.w < 14 ? 5.5 : 7, x = box.x + box.w / 2, y = box.y + box.h, s = r * 0.55;
    const plus = `M${x - s} ${y}H${x + s}M${x} ${y - s}V${y + s}`, down = `M${x} ${y - s}V${y + s}M${x - s} ${y}L${x} ${y + s}L${x + s} ${y}`;
    const cross = `M${x - s} ${y - s}L${x + s} ${y + s}M${x - s} ${y + s}L${x + s} ${y - s}`, equal = `M${x - s} ${y - s / 2}H${x + s}M${x - s} ${y + s / 2}H${x + s}`;
    const sign = how === "combine" ? (/^prod/i.test(op ?? "") ? cross : plus) : how === "copy" ? equal : down;
    const group = svg("g", { class: `mark ${how}` }, ...(new Set(from).size < from.length ? [] : [this.frame(box)]), svg("circle", { cx: x, cy: y, r }), svg("path", { d: sign }));
    return { nodes: [[this.tokens, group]], move: (strength) => group.setAttribute("opacity", strength.toFixed(3)) };
  }

  frame(box) {
    return svg("rect", { class: "focus", x: box.x - 1.5, y: box.y - 1.5, width: box.w + 3, height: box.h + 3, rx: 3 });
  }

  // A message in flight: an arrow under the cards, and a token that lifts off from its source cells and lands on its targets.
  flight(message) {
    const { scene } = this.story, from = this.story.sources(message), to = this.story.targets(message);
    const source = this.cards[message.src], target = this.cards[message.dst], curve = this.curve(middle(source), middle(target), message.lane);
    const lift = this.offset(from, source), land = this.offset(to, target);
    const title = [fill(this.texts.message, {
      src: scene.ranks[message.src].name, dst: scene.ranks[message.dst].name, bytes: quantity(message.bytes ?? 0, "B"),
    }), message.tag ? fill(this.texts.tag, { tag: message.tag }) : ""].filter(Boolean).join(", ");
    const arrow = svg("g", { class: "arrow" }, svg("title", {}, title), ...this.arrow(curve, source, target));
    const focus = svg("g", { class: "sending" }, ...from.map((c) => this.frame(this.cellBoxes[c])));
    const token = svg("g", { class: "token", "data-src": message.src, "data-dst": message.dst }, svg("title", {}, title), ...this.load(message.parts, from));
    const move = (progress) => {
      // Rounds have no duration of their own, so they may start and stop softly; real time must run evenly.
      const f = scene.unit === "s" ? progress : smooth(progress), { x, y } = curve(f);
      const up = 1 - smooth(clamp(f * 3, 0, 1)), down = smooth(clamp(f * 3 - 2, 0, 1));
      const strength = clamp(progress / 0.06, 0, 1).toFixed(3);
      token.setAttribute("transform", `translate(${(x + up * lift.x + down * land.x).toFixed(2)} ${(y + up * lift.y + down * land.y).toFixed(2)})`);
      for (const node of [arrow, token, focus]) node.setAttribute("opacity", strength);
    };
    return { nodes: [[this.arrows, arrow], [this.tokens, focus], [this.tokens, token]], move };
  }

  // From the middle of a card to the middle of some of its cells.
  offset(cells, card) {
    const points = cells.map((c) => middle(this.cellBoxes[c])), centre = middle(card);
    const mean = (key) => points.reduce((sum, p) => sum + p[key] - centre[key], 0) / (points.length || 1);
    return { x: mean("x"), y: mean("y") };
  }

  // Bends to the right of its direction, so that there and back are two paths; messages that leave together bend apart.
  // Near the centre, where the paths of many pairs cross, it bends more.
  curve(start, end, lane) {
    const control = mix(start, end, 0.5), off = Math.hypot(control.x - this.width / 2, control.y - this.height / 2);
    const bend = 0.16 + 0.14 * lane + 0.22 * Math.max(0, 1 - (3 * off) / Math.min(this.width, this.height));
    control.x = clamp(control.x - (end.y - start.y) * bend, 0, this.width);
    control.y = clamp(control.y + (end.x - start.x) * bend, 0, this.height);
    const point = (f) => mix(mix(start, control, f), mix(control, end, f), f);
    point.part = (a, b) => [point(a), mix(mix(start, control, a), mix(control, end, a), b), point(b)];
    return point;
  }

  // The piece of the curve between the two cards, with a head.
  arrow(curve, source, target) {
    const within = (p, box, d) => p.x > box.x - d && p.x < box.x + box.w + d && p.y > box.y - d && p.y < box.y + box.h + d;
    let a = 0, b = 1;
    while (a < 1 && within(curve(a), source, 3)) a += 0.01;
    while (b > 0 && within(curve(b), target, 4)) b -= 0.01;
    if (a >= b) return []; // nothing between them
    const [p, q, r] = curve.part(a, b), angle = Math.atan2(r.y - q.y, r.x - q.x);
    const wing = (turn) => `${r.x - 9 * Math.cos(angle + turn)} ${r.y - 9 * Math.sin(angle + turn)}`;
    const neck = mix(r, { x: r.x - Math.cos(angle), y: r.y - Math.sin(angle) }, 6);
    return [svg("path", { class: "shaft", d: `M${p.x} ${p.y}Q${q.x} ${q.y} ${neck.x} ${neck.y}` }), svg("path", { class: "head", d: `M${wing(0.4)}L${r.x} ${r.y}L${wing(-0.4)}Z` })];
  }

  // The parts of a message side by side around the origin.
  load(parts, cells) {
    const natural = cells.length ? this.cellBoxes[cells[0]].w : 24;
    const w = Math.max(Math.min(natural, 40, 110 / Math.max(1, parts.length)), 110 / parts.length < 9 ? 4 : 9), h = 28;
    const total = w * Math.max(1, parts.length), left = -total / 2;
    const back = svg("rect", { class: "back", x: left - 2.5, y: -h / 2 - 2.5, width: total + 5, height: h + 5, rx: 4 });
    return [back, ...parts.map((part, i) => this.content({ x: left + i * w, y: -h / 2, w, h }, part))];
  }
}

// ---- the player: time and its controls ------------------------------------------------------------------------------

class Player extends Timed {
  constructor(model, el) {
    super(model, el, { scene: "build" });
    this.build();
  }

  build() {
    const scene = this.model.get("scene"), story = new Story(scene), { stops } = story, last = stops.length - 1;
    Object.assign(this, { story, texts: scene.texts, end: story.end, stops: stops.map(({ t }) => t) });
    this.drawing = svg("svg", { role: "img", "aria-label": scene.title });
    this.picture = new Picture(story, this.texts, this.drawing);
    const captions = stops.map(({ label, text }) => `${label}  ${text}`), seconds = scene.unit === "s" ? " · 1.23 ms" : "";
    const controls = this.controls(fill(this.texts.counter, { i: last, n: last }) + seconds);
    const caption = this.captions(captions.reduce((a, b) => (b.length > a.length ? b : a)));
    this.mount("player", scene.title, this.drawing, this.legend(), controls, caption, html("div", { class: "d2lps-note" }, scene.note));
  }

  resize() {
    this.picture.resize(Math.max(300, this.width));
    this.show(this.t);
  }

  legend() {
    const { story, texts } = this, legend = html("div", { class: "d2lps-legend" });
    const item = (kind, text, style = "") => html("span", {}, html("i", { class: kind, style }), text);
    const named = story.scene.ranks.some((rank) => !/^\d+$/.test(rank.name)); // or they are numbers
    if (story.contributors.length) legend.append(html("span", {}, named ? texts.contribution_of : texts.contribution));
    for (const rank of story.contributors) legend.append(item("stripe", story.scene.ranks[rank].name, `background: var(--rank-${rank % COLOURS})`));
    if (story.scene.whole > 0) legend.append(item("complete", texts.complete));
    if (story.repeats) legend.append(item("repeated", texts.repeated));
    return legend;
  }

  paint() {
    const { story, texts } = this, at = story.stopIndex(this.t), counter = fill(texts.counter, { i: at, n: story.stops.length - 1 });
    this.picture.draw(this.t);
    return { ...story.stops[at], counter: story.scene.unit === "s" ? `${counter} · ${quantity(this.t, "s")}` : counter };
  }

  // Rounds take equally long; real time runs evenly, in a minute at most.
  pace(t) {
    const { story, end } = this, goal = this.after(t);
    return story.scene.unit === "s" ? Math.max(story.stride / PLAY, end / 60) : (goal - this.before(goal)) / PLAY;
  }
}

export default shownBy(Player);
