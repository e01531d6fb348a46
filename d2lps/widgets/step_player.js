// StepPlayer: a step of parallel training. Cards stand at their places in the mesh, messages have the color, the dashes and the
// name of their axis, a grid shows which piece of a tensor a rank has, bars what it holds; below, what each rank does over time.
//
// Python computes a `scene` (step_scene.py); this only draws it.

const BEAT = 0.9; // seconds from one stop to the next while playing, at speed 1
const PADDING = 8, GRID = 30, CARD = 104; // pixels: at the edge of the picture and within a card; a grid's height, a card's

const lastAt = (list, t) => list.findLastIndex(([at]) => at <= t);
const pairs = (flat) => Array.from({ length: flat.length / 2 }, (_, i) => [flat[2 * i], flat[2 * i + 1]]);

class StepPlayer extends Timed {
  constructor(model, el) {
    super(model, el, { scene: "build" });
    this.build();
  }

  build() {
    const scene = (this.scene = this.model.get("scene")), { texts, end, stops, ranks } = scene;
    Object.assign(this, { texts, end, stops: stops.map(({ t }) => t) });
    this.held = scene.held.map((kinds) => Object.entries(kinds).map(([kind, flat]) => ({ kind, steps: pairs(flat) })));
    this.kinds = [...new Set(this.held.flat().map(({ kind }) => kind))];
    const times = this.held.map((kinds) => [...new Set(kinds.flatMap(({ steps }) => steps.map(([t]) => t)))].sort((a, b) => a - b));
    this.levels = times.map((list, r) => list.map((t) => [t, this.total(r, t)]));
    this.most = Math.max(1, ...this.levels.flat().map(([, nbytes]) => nbytes));
    this.mine = ranks.map((_, r) => scene.episodes.filter((episode) => episode.ranks.includes(r)));
    this.drawing = svg("svg", { role: "img", "aria-label": scene.title || texts.picture });
    this.track = svg("svg", { role: "img", class: "track", "aria-label": texts.track });
    for (const name of ["pointerdown", "pointermove"]) this.track.addEventListener(name, (event) => event.buttons && (this.stop(false), this.move(this.pointed(event))));
    this.track.addEventListener("pointerup", () => this.model.save_changes());
    const controls = this.controls(`${fill(texts.counter, { i: stops.length - 1, n: stops.length - 1 })} · 1.23 ms`);
    const longest = stops.reduce((a, { label, say }) => (label.length + say.length > a.length ? `${label} ${say}` : a), "");
    this.mount("steps", scene.title, this.drawing, this.axes(), controls, this.captions(longest), this.track, this.legend());
  }

  // Bytes that a rank holds at t, of one kind or of all.
  total(r, t, only) {
    return this.held[r].reduce((sum, { kind, steps }) => sum + (only && kind !== only ? 0 : (steps[lastAt(steps, t + this.eps)]?.[1] ?? 0)), 0);
  }

  // ---- what the colors mean ----------------------------------------------------------------------------------------

  sample(style) {
    const line = svg("path", { class: `way axis-${style}`, d: "M1 7H29" });
    return svg("svg", { viewBox: "0 0 30 14", width: 30, height: 14, "aria-hidden": "true" }, line);
  }

  axes() {
    const { scene, texts } = this;
    return html("div", { class: "d2lps-legend" }, ...scene.axes.map(({ name, style, size }) => html("span", {}, this.sample(style), fill(texts[`axis_${name}`] ?? "{name}", { name, n: size }))));
  }

  legend() {
    const { scene, texts, kinds } = this, list = html("ul"), seen = new Set(scene.blocks.map(([, , , kind]) => kind || "other"));
    const item = (sign, text) => list.append(html("li", {}, sign, html("span", {}, text)));
    const box = (kind) => svg("svg", { viewBox: "0 0 26 14", width: 26, height: 14, "aria-hidden": "true" }, svg("rect", { class: kind, x: 0.5, y: 0.5, width: 25, height: 13 }));
    for (const kind of ["F", "B", "W", "other"].filter((kind) => seen.has(kind))) item(box(`block ${kind}`), texts[`see_${kind}`]);
    if (scene.waits.length) item(box("wait"), texts.see_wait);
    if (scene.episodes.some(({ shapes }) => shapes.length)) {
      const cells = (grid, own, partial) => this.grid({ grid, partial }, own, { x: 0, y: 1, w: 26, h: 12 }), sign = (...cell) => svg("svg", { viewBox: "0 0 26 14", width: 26, height: 14, "aria-hidden": "true" }, ...cell);
      item(sign(...cells([1, 2], 1, false)), texts.see_piece), item(sign(...cells([1, 1], -1, true)), texts.see_partial);
    }
    for (const kind of kinds) item(box(`held ${kind}`), fill(texts.see_held, { kind: texts[kind] }));
    return html("div", { class: "d2lps-folds" }, html("details", {}, html("summary", {}, texts.legend), html("div", { class: "d2lps-see" }, html("p", {}, texts.see_card), list)));
  }

  // ---- the picture --------------------------------------------------------------------------------------------------

  resize() {
    const { scene } = this, width = Math.max(300, this.width), small = width < 520;
    const wide = 1 + Math.max(...scene.ranks.map(({ x }) => x)), fold = small && wide > 2;
    const columns = fold ? 2 : wide, turn = ({ x, y }) => 1e6 * Math.floor(x / 2) + 1e3 * y + x, order = scene.ranks.map((_, r) => r).sort((a, b) => turn(scene.ranks[a]) - turn(scene.ranks[b]));
    const place = scene.ranks.map(({ x, y }, r) => (fold ? { x: order.indexOf(r) % 2, y: Math.floor(order.indexOf(r) / 2) } : { x, y }));
    const gapX = small ? 34 : columns > 3 ? 38 : 70, gapY = 44, w = Math.min(columns > 2 ? 170 : 220, (width - 2 * PADDING - (columns - 1) * gapX) / columns);
    const left = (width - columns * w - (columns - 1) * gapX) / 2, over = scene.messages.some(([src, dst]) => place[src].y === place[dst].y && Math.abs(place[src].x - place[dst].x) > 1), top = over ? 34 : PADDING;
    this.cards = place.map(({ x, y }) => ({ x: left + x * (w + gapX), y: top + y * (CARD + gapY), w, h: CARD, column: x, row: y }));
    const height = Math.max(...this.cards.map(({ y }) => y)) + CARD + PADDING;
    this.drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.ways = svg("g"), this.tokens = svg("g");
    this.inside = this.cards.map(() => svg("g"));
    this.told = this.cards.map(() => undefined);
    const frames = this.cards.map(({ x, y, w, h }, r) => svg("g", { class: "card", "data-rank": r }, svg("rect", { class: "frame", x, y, width: w, height: h, rx: 6 }), this.inside[r]));
    this.drawing.replaceChildren(this.ways, ...frames, this.tokens);
    this.drawTrack(width);
    this.show(this.t);
  }

  paint() {
    const { t, texts, eps } = this, { stops, unit } = this.scene, at = Math.max(0, stops.findIndex((stop) => stop.t >= t - eps));
    this.cards.forEach((_, r) => this.card(r, t));
    this.messages(t, stops[at - 1]?.t ?? -1);
    this.now.setAttribute("d", `M${this.x(t).toFixed(2)} 0V${this.bottom}`);
    return { label: stops[at].label, text: stops[at].say, counter: `${fill(texts.counter, { i: at, n: stops.length - 1 })} · ${quantity(t, unit)}` };
  }

  // What a rank does and holds; drawn anew only where that has changed.
  card(r, t) {
    const { scene, texts, eps } = this, { x, y, w } = this.cards[r], rank = scene.ranks[r], left = x + PADDING, room = w - 2 * PADDING;
    const block = scene.blocks.find(([who, start, end]) => who === r && start <= t + eps && t < end - eps), episode = this.mine[r].findLast(({ start }) => start <= t + eps);
    const ended = episode && t >= episode.end - eps, bytes = this.total(r, t), key = [block?.[5], episode && this.mine[r].indexOf(episode), ended, bytes].join();
    if (key === this.told[r]) return;
    this.told[r] = key;
    const full = rank.name.match(/^\d+$/) ? fill(texts.rank, { name: rank.name }) : rank.name, amount = this.kinds.length ? quantity(bytes, "B") : "";
    const nodes = [svg("text", { class: "name", x: left, y: y + 16 }, shorten(full, 12, room - textWidth(amount, 11))), svg("text", { class: "amount", x: x + w - PADDING, y: y + 16 }, amount)];
    if (block) {
      const text = shorten(this.doing(block), 11, room - 8);
      nodes.push(svg("rect", { class: `block ${block[3] || "other"}`, x: left, y: y + 22, width: room, height: 16, rx: 3 }), svg("text", { class: "doing", x: left + 5, y: y + 34 }, text));
    }
    const shape = episode?.shapes[ended ? episode.shapes.length - 1 : 0];
    if (shape) {
      const own = shape.own[episode.ranks.indexOf(r)], group = svg("g", { class: ended ? "over" : `now axis-${episode.style}` }, ...this.grid(shape, own, { x: left, y: y + 43, w: room, h: GRID - 8 }));
      group.append(svg("text", { class: "shape", x: left, y: y + 77 }, shorten(shape.text, 10, room + 4)), svg("title", {}, `${episode.about} ${shape.text}`));
      nodes.push(group);
    }
    if (this.kinds.length) nodes.push(...this.bar(r, t, { x: left, y: y + CARD - 18, w: room, h: 10 }));
    this.inside[r].replaceChildren(...nodes);
  }

  doing([, , , kind, text, label]) { return kind ? fill(this.texts[kind], { k: text.split(kind)[1] }) : label; }

  // A cell for each piece; filled is what the rank has, hatched where that is a summand.
  grid({ grid: [rows, columns], partial }, own, { x, y, w, h }) {
    const nodes = [], wide = Math.min(w, Math.max(columns * 18, 46)), cell = { w: wide / columns, h: h / rows };
    for (let i = 0; i < rows * columns; i++) {
      const at = { x: x + (i % columns) * cell.w, y: y + Math.floor(i / columns) * cell.h, width: cell.w - 1.5, height: cell.h - 1.5 }, has = own < 0 || own === i;
      nodes.push(svg("rect", { class: has ? (partial ? "cell part" : "cell own") : "cell", ...at }));
      if (!has || !partial) continue;
      const lines = [];
      for (let k = 4; k < at.width + at.height; k += 5) {
        const [a, b] = [Math.min(k, at.width), Math.max(0, k - at.width)], [c, d] = [Math.max(0, k - at.height), Math.min(k, at.height)];
        lines.push(`M${at.x + a} ${at.y + b}L${at.x + c} ${at.y + d}`);
      }
      nodes.push(svg("path", { class: "hatch", d: lines.join("") }));
    }
    return nodes;
  }

  // What a rank holds, kind beside kind; the line behind it is the most that it ever holds.
  bar(r, t, { x, y, w, h }) {
    const nodes = [svg("rect", { class: "bed", x, y, width: w, height: h })], scale = w / this.most, peak = Math.max(0, ...this.levels[r].map(([, nbytes]) => nbytes));
    let at = x;
    for (const kind of this.kinds) {
      const nbytes = this.total(r, t, kind);
      if (nbytes) nodes.push(svg("rect", { class: `held ${kind}`, x: at, y, width: nbytes * scale, height: h }, svg("title", {}, `${this.texts[kind]}: ${quantity(nbytes, "B")}`)));
      at += nbytes * scale;
    }
    return [...nodes, svg("path", { class: "peak", d: `M${x + peak * scale} ${y - 2}V${y + h + 2}` })];
  }

  // ---- messages -----------------------------------------------------------------------------------------------------

  // Those under way, each with a token; of those that have arrived since the last stop, faded ways.
  messages(t, before) {
    const { eps } = this, ways = new Map(), tokens = [];
    for (const [src, dst, start, end, bytes, style] of this.scene.messages) {
      if (start > t - eps || end <= Math.min(before, t - eps) + eps) continue;
      const flying = end > t + eps, key = `${src} ${dst} ${style}`, path = this.way(src, dst);
      if (flying || !ways.has(key)) ways.set(key, { src, dst, style, flying, path });
      if (flying) tokens.push(this.token(path((t - start) / (end - start)), style, fill(this.texts.sends, { src, dst, bytes: quantity(bytes, "B") })));
    }
    this.ways.replaceChildren(...[...ways.values()].map(({ style, flying, path }) => this.arrow(path, style, flying)));
    this.tokens.replaceChildren(...tokens);
  }

  arrow(path, style, flying) {
    const [a, b] = [path(0.93), path(1)], angle = Math.atan2(b.y - a.y, b.x - a.x), wing = (turn) => `${b.x - 8 * Math.cos(angle + turn)} ${b.y - 8 * Math.sin(angle + turn)}`;
    return svg("g", { class: `axis-${style}${flying ? "" : " trail"}` }, svg("path", { class: `way axis-${style}`, d: path.d }), svg("path", { class: "head", d: `M${wing(0.45)}L${b.x} ${b.y}L${wing(-0.45)}Z` }));
  }

  token({ x, y }, style, title) {
    const name = this.scene.axes.find((axis) => axis.style === style)?.name ?? "", wide = Math.max(12, textWidth(name, 10) + 8);
    return svg("g", { class: `token axis-${style}`, transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})` }, svg("title", {}, title), svg("rect", { x: -wide / 2, y: -7.5, width: wide, height: 15, rx: 4 }), svg("text", { y: 3.5 }, name));
  }

  // From card to card: straight to a neighbor, there and back beside each other; over the cards between in a row, around those in a column.
  way(src, dst) {
    const [a, b] = [this.cards[src], this.cards[dst]], middle = ({ x, y, w, h }) => ({ x: x + w / 2, y: y + h / 2 }), dx = b.column - a.column, dy = b.row - a.row;
    let p, q, c;
    if (!dy && Math.abs(dx) === 1) {
      const y = a.y + a.h / 2 + (dx > 0 ? -9 : 9);
      [p, q] = dx > 0 ? [{ x: a.x + a.w + 2, y }, { x: b.x - 2, y }] : [{ x: a.x - 2, y }, { x: b.x + b.w + 2, y }];
    } else if (!dy) {
      const y = a.y - 2, off = dx > 0 ? 14 : -14;
      [p, q] = [{ x: middle(a).x + off, y }, { x: middle(b).x - off - (dx > 0 ? 20 : -20), y }];
      c = { x: (p.x + q.x) / 2, y: y - 18 - 14 * Math.abs(dx) };
    } else if (!dx && Math.abs(dy) === 1) {
      const x = middle(a).x + (dy > 0 ? 9 : -9);
      [p, q] = dy > 0 ? [{ x, y: a.y + a.h + 2 }, { x, y: b.y - 2 }] : [{ x, y: a.y - 2 }, { x, y: b.y + b.h + 2 }];
    } else if (!dx) {
      const side = a.column === 0 ? 1 : -1, x = side > 0 ? a.x + a.w + 1 : a.x - 1;
      [p, q] = [{ x, y: middle(a).y + 12 * Math.sign(dy) }, { x, y: middle(b).y - 12 * Math.sign(dy) }];
      c = { x: x + side * (20 + 8 * Math.abs(dy)), y: (p.y + q.y) / 2 };
    } else {
      const off = dy > 0 ? 10 : -10;
      [p, q] = [{ x: middle(a).x + Math.sign(dx) * (a.w / 2 - 18) + off, y: dy > 0 ? a.y + a.h + 2 : a.y - 2 }, { x: middle(b).x - Math.sign(dx) * (b.w / 2 - 18) + off, y: dy > 0 ? b.y - 2 : b.y + b.h + 2 }];
    }
    c ??= mix(p, q, 0.5);
    c.y = Math.max(2, c.y);
    const path = (f) => mix(mix(p, c, clamp(f, 0, 1)), mix(c, q, clamp(f, 0, 1)), clamp(f, 0, 1));
    path.d = `M${p.x} ${p.y}Q${c.x} ${c.y} ${q.x} ${q.y}`;
    return path;
  }

  // ---- over time ----------------------------------------------------------------------------------------------------

  // For each rank what it computes, below that what it sends and receives, and below that what it holds.
  drawTrack(width) {
    const { scene, texts, end } = this, { ranks } = scene, dense = ranks.length > 4, high = dense ? 13 : 15, each = dense ? 3 : 4, styles = [...new Set(scene.talks.map(([, style]) => style))], thin = 1 + each * styles.length, area = this.kinds.length ? (dense ? 12 : 18) : 0;
    const names = ranks.map(({ name }) => (name.match(/^\d+$/) ? fill(texts.rank, { name }) : name)), left = Math.min(width / 4, Math.max(...names.map((name) => textWidth(name, 11))) + 10);
    this.trackWidth = width;
    this.left = left;
    this.x = (t) => left + (t / (end || 1)) * (width - left - 10);
    const rows = ranks.map((_, r) => 2 + r * (high + thin + area + 8)), x = this.x, nodes = [];
    const rect = (kind, start, stop, y, height) => svg("rect", { class: kind, x: x(start), y, width: Math.max(0.6, x(stop) - x(start)), height });
    rows.forEach((y, r) => nodes.push(svg("text", { class: "rank", x: 2, y: y + high - 3 }, shorten(names[r], 11, left - 6)), rect("bed", 0, end, y, high)));
    for (const [r, start, stop, kind, , label] of scene.blocks) {
      const bar = rect(`block ${kind || "other"}`, start, stop, rows[r], high);
      bar.append(svg("title", {}, fill(texts.bar, { what: label, start: quantity(start, "s"), end: quantity(stop, "s") })));
      nodes.push(bar);
    }
    for (const [r, ...flat] of scene.waits) for (const [start, stop] of pairs(flat)) if (x(stop) - x(start) > 0.5) nodes.push(rect("wait", start, stop, rows[r] + 1, high - 2));
    for (const [r, start, stop, kind, text] of scene.blocks) {
      const said = kind ? (textWidth(text, 10) < x(stop) - x(start) - 1 ? text : "") : shorten(text, 10, x(stop) - x(start) - 2);
      if (said) nodes.push(svg("text", { class: "text", x: x((start + stop) / 2), y: rows[r] + high - 4 }, said));
    }
    for (const [r, style, ...flat] of scene.talks) for (const [start, stop] of pairs(flat)) nodes.push(rect(`talk axis-${style}`, start, stop, rows[r] + high + each * styles.indexOf(style), each));
    if (area) rows.forEach((y, r) => nodes.push(...this.area(r, y + high + thin + 2, area)));
    this.bottom = rows.at(-1) + high + thin + area + 5;
    this.now = svg("path", { class: "now" });
    this.track.setAttribute("viewBox", `0 0 ${width} ${this.bottom + 22}`);
    this.track.replaceChildren(...nodes, timeAxis(x, end, this.bottom), this.now);
  }

  // The memory of a rank over time, kind upon kind.
  area(r, y, h) {
    const times = [0, ...this.levels[r].map(([t]) => t).filter((t) => t > 0), this.end], scale = h / this.most;
    let below = times.map(() => 0);
    return this.kinds.map((kind) => {
      const above = times.map((t, i) => below[i] + this.total(r, t, kind)), edge = (list) => list.flatMap((nbytes, i) => [[times[i], nbytes], [times[i + 1] ?? this.end, nbytes]]);
      const outline = [...edge(above), ...edge(below).reverse()].map(([t, nbytes]) => `${this.x(t).toFixed(1)} ${(y + h - nbytes * scale).toFixed(1)}`);
      below = above;
      return svg("path", { class: `held ${kind}`, d: `M${outline.join("L")}Z` });
    });
  }

  pointed(event) {
    const { left, width } = this.track.getBoundingClientRect(), at = ((event.clientX - left) / width) * this.trackWidth;
    return clamp((at - this.left) / (this.x(this.end) - this.left), 0, 1) * this.end;
  }

  // All steps take equally long, however short they were: so what is quick is seen too.
  pace(t) {
    const goal = this.after(t);
    return (goal - this.before(goal)) / BEAT;
  }
}

export default shownBy(StepPlayer);
