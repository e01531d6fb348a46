// Draws a player's story at a time t: cards with cells, messages on their way between them, marks on what has just changed.
//
// A cell shows whose contributions it holds: one stripe for each rank, in that rank's color and at that rank's place.

const COLORS = 16; // --rank-0 ... --rank-15 in player.css
const CROWD = 8; // arrows to or from one card that may be drawn at their full width

const middle = (box) => ({ x: box.x + box.w / 2, y: box.y + box.h / 2 });
const smooth = (f) => f * f * (3 - 2 * f);
const within = (p, box, d) => p.x > box.x - d && p.x < box.x + box.w + d && p.y > box.y - d && p.y < box.y + box.h + d;
const ALONG = Array.from({ length: 19 }, (_, i) => (i + 1) / 20); // the points of a path that are looked at
const color = (rank) => `fill: var(--rank-${rank % COLORS})`;

class Picture {
  constructor(story, texts, root) {
    Object.assign(this, { story, texts, root });
  }

  // Starts afresh: at the beginning and when the width has changed.
  resize(width) {
    const boxes = layout(this.story.scene, width), scene = boxes.drawn;
    Object.assign(this, boxes);
    const slim = Math.min(...boxes.cellBoxes.map((box) => box.w));
    const labels = this.story.history.flat().map((state) => String(state.label ?? ""));
    this.labelled = labels.every((label) => textWidth(label, 11) + 3 <= slim);
    this.layered = slim / Math.max(1, scene.whole) < 2.5; // too slim for upright stripes: lay them on top of one another
    this.root.classList.toggle("slim", slim < 10);
    this.arrows = svg("g", { class: "arrows" });
    this.tokens = svg("g", { class: "tokens" }); // below the cards: they come from under one and vanish under another
    this.marks = svg("g", { class: "marks" });
    this.groups = boxes.cellBoxes.map(() => svg("g", { class: "cell" }));
    this.shown = boxes.cellBoxes.map(() => -1);
    this.live = new Map();
    this.root.setAttribute("viewBox", `0 0 ${width} ${Math.round(boxes.height)}`);
    this.board = new Board(scene, boxes, this.texts);
    const cards = this.heads(scene).map((head, r) => this.card(r, head));
    this.root.replaceChildren(this.board.root, this.arrows, this.tokens, ...cards, this.marks);
    this.badged = undefined;
  }

  // Whether a rank's color says anything: by what it gave, or by the line at which it is.
  keyed(r) {
    return this.story.scene.code || this.story.contributors.includes(r);
  }

  // A name stands beside its key. Where one has no room there, all are smaller, and each key is a bar along the top of its card.
  heads({ ranks }) {
    const { w } = this.cards[0], side = w < 80 ? 5 : 8, beside = ranks.map((_, r) => w - side - 6 - (this.keyed(r) ? 14 : 0));
    const names = ranks.map(({ name }, r) => {
      const full = fill(this.texts.rank, { name });
      return /^\d+$/.test(name) && textWidth(full, 12) <= beside[r] ? full : String(name);
    });
    const tight = names.some((name, r) => textWidth(name, 12) > beside[r]), size = tight ? fitting(names, 12, w - 8) : 12;
    const key = tight ? { x: side, y: 2, width: w - 2 * side, height: 3, rx: 1 } : { x: side, y: 7, width: 10, height: 10, rx: 2 };
    return names.map((name, r) => {
      const room = tight ? w - 4 : beside[r], title = shorten(name, size, room);
      return { title, size, key, x: tight ? 3 : w - 6 - room, left: room - textWidth(title, size) - 8 };
    });
  }

  card(r, { title, size, key, x, left }) {
    const { scene, cellsOf } = this.story, box = this.cards[r];
    const group = svg("g", { class: "card", "data-rank": r }, svg("rect", { class: "frame", x: box.x, y: box.y, width: box.w, height: box.h, rx: 6 }));
    if (this.keyed(r)) group.append(svg("rect", { class: "key", ...key, x: box.x + key.x, y: box.y + key.y, style: color(r) }));
    group.append(svg("text", { class: "name", x: box.x + x, y: box.y + 16, style: `font-size: ${size.toFixed(2)}px` }, title));
    scene.rows.forEach((row, i) => row.rank === r && group.append(...this.rowName(row, i, left)));
    group.append(...cellsOf[r].map((c) => this.groups[c]));
    return group;
  }

  // Above the row where a card has several rows, at the right of the card's head where it has one and there is room.
  rowName(row, i, room) {
    const box = this.rowBoxes[i], name = String(row.name ?? "");
    if (this.captioned) {
      const room = box.w + 4, size = fitting([name], 10.5, room);
      return [svg("text", { class: "row", x: box.x, y: box.y - 4, style: `font-size: ${size.toFixed(2)}px` }, shorten(name, size, room))];
    }
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
    const nodes = [svg("rect", { class: "stripe", "data-rank": rank, x, y, width: Math.max(0.5, w - thin), height: h, style: color(rank) })];
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
      if (message.start >= t - eps || message.gone <= t + eps) return;
      keep(i, () => this.flight(message), t);
    });
    for (const [key, { nodes }] of this.live) if (!wanted.has(key)) for (const [, node] of nodes) node.remove();
    // What lies above what depends on t alone, not on what was drawn before.
    const added = [...wanted.keys()].some((key) => !this.live.has(key));
    if (added) for (const { nodes } of wanted.values()) for (const [layer, node] of nodes) layer.append(node);
    this.live = wanted;
    this.board.draw(messages.filter(({ start, stay }) => start < t - eps && t <= stay + eps));
    this.badges(this.story.stopIndex(t));
  }

  // What an author has written at cards for this step; it leaves the caption of a row below it free.
  badges(stop) {
    if (stop === this.badged) return;
    this.badged = stop;
    this.badgeLayer?.remove();
    const marked = (this.story.stops[stop].badges ?? []).map(({ rank, text }) => {
      const { x, y, w } = this.cards[rank], wide = Math.max(20, textWidth(text, 12) + 14);
      return svg("g", { class: "badge" }, svg("rect", { x: x + w - wide / 2 - 4, y: y - 12, width: wide, height: 17, rx: 8.5 }), svg("text", { x: x + w - 4, y: y + 0.8 }, text));
    });
    this.badgeLayer = svg("g", {}, ...marked);
    this.root.append(this.badgeLayer);
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
    return { nodes: [[this.marks, group]], move: (strength) => group.setAttribute("opacity", strength.toFixed(3)) };
  }

  frame(box) {
    return svg("rect", { class: "focus", x: box.x - 1.5, y: box.y - 1.5, width: box.w + 3, height: box.h + 3, rx: 3 });
  }

  // A message in flight: an arrow, on it a token with what it carries, and frames around the cells that it is read from. Once
  // it has arrived, the arrow alone stays for a while, faded.
  flight(message) {
    const { scene, eps } = this.story, source = this.cards[message.src], target = this.cards[message.dst];
    const curve = this.curve(source, target, message.lane), [a, b] = this.between(curve, source, target);
    const title = svg("title", {}, this.title(message)), wide = this.story.thick(message.bytes ?? 0) / (message.fan > CROWD ? 2.5 : 1);
    const arrow = svg("g", { class: "arrow", "data-src": message.src, "data-dst": message.dst }, title, ...this.arrow(curve, a, b, wide));
    const frames = [...new Set(this.story.sources(message))].map((c) => this.frame(this.cellBoxes[c])), focus = svg("g");
    const load = [title.cloneNode(true), ...this.load(message)], token = svg("g", { "data-src": message.src, "data-dst": message.dst });
    const move = (t) => {
      const progress = Math.max(0, (t - message.start) / (message.end - message.start || 1)), flying = t < message.end - eps;
      // Rounds have no duration of their own, so they may start and stop softly; real time must run evenly.
      const f = scene.unit === "s" ? progress : smooth(Math.min(1, progress)), { x, y } = curve(a + (b - a) * f);
      token.setAttribute("transform", `translate(${x.toFixed(2)} ${y.toFixed(2)})`);
      const left = t <= message.stay + eps ? 1 : Math.max(0, (message.gone - t) / (message.gone - message.stay));
      arrow.classList.toggle("trail", !flying);
      arrow.setAttribute("opacity", (flying ? clamp(progress / 0.06, 0, 1) : 0.55 * left).toFixed(3));
      for (const [name, node, inside] of [["token", token, load], ["sending", focus, frames]]) {
        node.setAttribute("opacity", clamp(progress / 0.06, 0, 1).toFixed(3));
        node.setAttribute("class", flying ? name : "");
        if (flying !== node.hasChildNodes()) node.replaceChildren(...(flying ? inside : []));
      }
    };
    return { nodes: [[this.arrows, arrow], [this.tokens, token], [this.marks, focus]], move };
  }

  title(message) {
    const { ranks } = this.story.scene, { texts } = this, [src, dst] = [message.src, message.dst].map((r) => ranks[r].name);
    const what = message.n ? fill(texts.bundle, { n: message.n }) : "", sent = fill(texts.sends, { what, src, dst, bytes: quantity(message.bytes ?? 0, "B") });
    return [sent, message.tag ? fill(texts.tag, { tag: message.tag }) : ""].filter(Boolean).join(", ");
  }

  // Bends to the right of its direction, so that there and back are two paths; messages that leave together bend apart.
  // Near the centre, where the paths of many pairs cross, it bends more; but less where it would pass under another card.
  curve(source, target, lane) {
    const [start, end] = [middle(source), middle(target)], half = mix(start, end, 0.5), off = Math.hypot(half.x - this.width / 2, half.y - this.height / 2);
    const bend = 0.16 + 0.14 * lane + 0.22 * Math.max(0, 1 - (3 * off) / Math.min(this.width, this.height));
    const others = this.cards.filter((card) => card !== source && card !== target);
    const clear = (point) => others.every((card) => !ALONG.some((f) => within(point(f), card, 15)));
    return [1, 0.7, 0.4, 0.2].map((part) => this.bent(start, end, bend * part)).find(clear) ?? this.bent(start, end, bend);
  }

  bent(start, end, bend) {
    const control = mix(start, end, 0.5);
    control.x = clamp(control.x - (end.y - start.y) * bend, 0, this.width);
    control.y = clamp(control.y + (end.x - start.x) * bend, 0, this.height);
    const point = (f) => mix(mix(start, control, f), mix(control, end, f), f);
    point.part = (a, b) => [point(a), mix(mix(start, control, a), mix(control, end, a), b), point(b)];
    return point;
  }

  // Where the curve leaves one card and meets the other.
  between(curve, source, target) {
    let a = 0, b = 1;
    while (a < 1 && within(curve(a), source, 3)) a += 0.01;
    while (b > 0 && within(curve(b), target, 4)) b -= 0.01;
    return a < b ? [a, b] : [0.5, 0.5]; // nothing between them
  }

  // That piece of the curve, with a head.
  arrow(curve, a, b, wide) {
    if (a === b) return [];
    const [p, q, r] = curve.part(a, b), angle = Math.atan2(r.y - q.y, r.x - q.x), long = Math.min(9, 6 + 2 * wide) + Math.max(0, wide - 1);
    const wing = (turn) => `${r.x - long * Math.cos(angle + turn)} ${r.y - long * Math.sin(angle + turn)}`;
    const neck = mix(r, { x: r.x - Math.cos(angle), y: r.y - Math.sin(angle) }, long * 0.7), style = `stroke-width: ${wide.toFixed(2)}`;
    return [svg("path", { class: "shaft", style, d: `M${p.x} ${p.y}Q${q.x} ${q.y} ${neck.x} ${neck.y}` }), svg("path", { class: "head", d: `M${wing(0.45)}L${r.x} ${r.y}L${wing(-0.45)}Z` })];
  }

  // The parts of a message side by side around the origin, and of a bundle its number; a dot where nothing known is carried.
  load({ parts, n }) {
    const shown = parts.slice(0, n ? 4 : parts.length), h = 24, w = shown.length * 9 > 90 ? 4 : Math.min(26, Math.max(9, 90 / shown.length));
    const count = n ? fill(this.texts.times, { n }) : "", room = count ? textWidth(count, 11) + 8 : 0, total = w * shown.length + room, left = -total / 2;
    if (!total) return [svg("circle", { class: "back", r: 4 })];
    const back = svg("rect", { class: "back", x: left - 2.5, y: -h / 2 - 2.5, width: total + 5, height: h + 5, rx: 4 });
    const number = count ? [svg("text", { class: "label", x: left + total - room / 2, y: 4 }, count)] : [];
    return [back, ...shown.map((part, i) => this.content({ x: left + i * w, y: -h / 2, w, h }, part)), ...number];
  }
}
