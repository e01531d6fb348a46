// What lies below the cards: boxes around machines, links, switches; links over which messages go are colored.

class Board {
  constructor(scene, { points, cards }, texts) {
    Object.assign(this, { scene, points, texts, root: svg("g", { class: "board" }), routes: scene.routes ?? {}, links: new Map() });
    const pairs = (scene.links ?? "").split(" ").filter(Boolean).map(Number);
    for (const { name, ranks } of scene.groups ?? []) this.root.append(...this.box(name, ranks.map((r) => cards[r])));
    for (let i = 0; i < pairs.length; i += 2) this.link(pairs[i], pairs[i + 1]);
    (scene.nodes ?? []).forEach((node, i) => this.root.append(this.node(node, points[scene.ranks.length + i])));
  }

  box(name, cards) {
    const x = Math.min(...cards.map((card) => card.x)) - 6, y = Math.min(...cards.map((card) => card.y)) - 20;
    const right = Math.max(...cards.map((card) => card.x + card.w)) + 6, bottom = Math.max(...cards.map((card) => card.y + card.h)) + 6;
    return [svg("rect", { class: "group", x, y, width: right - x, height: bottom - y, rx: 8 }), svg("text", { class: "group", x: x + 8, y: y + 14 }, shorten(name, 11, right - x - 12))];
  }

  link(a, b) {
    const [p, q] = [this.points[a], this.points[b]], line = svg("path", { class: "link", d: `M${p.x} ${p.y}L${q.x} ${q.y}` });
    for (const key of [`${a} ${b}`, `${b} ${a}`]) this.links.set(key, line);
    this.root.append(line);
  }

  node({ name, kind }, { x, y }) {
    const text = shorten(name, 10, 70), w = Math.max(24, textWidth(text, 10) + 10);
    const box = svg("rect", { class: `node ${kind}`, x: x - w / 2, y: y - 8.5, width: w, height: 17, rx: kind === "switch" ? 8 : 3 });
    return svg("g", {}, box, svg("text", { class: "node", x, y: y + 3.5 }, text));
  }

  // Colors the links of the messages that are seen.
  draw(messages) {
    const used = new Set();
    for (const pair of new Set(messages.map(({ src, dst }) => `${src} ${dst}`))) {
      const way = (this.routes[pair] ?? "").split(" ");
      for (let i = 1; i < way.length; i++) used.add(this.links.get(`${way[i - 1]} ${way[i]}`));
    }
    for (const line of this.links.values()) line.classList.toggle("used", used.has(line));
  }
}
