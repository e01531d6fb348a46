// The run that a player shows: what each cell of memory holds when, and what a message takes from where to where.

// The last entry of a list sorted by t that isn't after `t`.
function indexAt(list, t) {
  let low = 0, high = list.length;
  while (high - low > 1) {
    const centre = (low + high) >> 1;
    if (list[centre].t <= t) low = centre; else high = centre;
  }
  return low;
}

// Numbers the messages that leave one rank for another at the same time, and counts those that leave or reach one rank then.
function withLanes(messages) {
  const seen = new Map(), next = (...key) => seen.set(key.join(), (seen.get(key.join()) ?? 0) + 1).get(key.join());
  const numbered = messages.map((message) => {
    const { src, dst, start } = message, lane = next(src, dst, start) - 1;
    next("from", src, start), next("to", dst, start);
    return { ...message, lane: lane % 5 };
  });
  return numbered.map((message) => ({ ...message, fan: Math.max(seen.get(`from,${message.src},${message.start}`), seen.get(`to,${message.dst},${message.start}`)) }));
}

class Story {
  constructor(scene) {
    this.scene = scene;
    this.end = scene.end;
    this.eps = this.end * 1e-9; // times that went through JSON and a slider are equal up to this
    this.stops = scene.stops;
    this.stride = this.end / Math.max(1, this.stops.length - 1);
    this.messages = withLanes(scene.messages).map((message) => ({ ...message, ...this.trail(message) }));
    const sizes = this.messages.map(({ bytes = 0 }) => bytes), least = Math.min(...sizes.filter(Boolean));
    this.thick = (bytes) => (!bytes ? 1 : Math.max(...sizes) <= least ? 2 : 1.5 + (4 * Math.log(bytes / least)) / Math.log(Math.max(...sizes) / least));
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

  // Until when an arrow is seen, though its message has arrived: faded up to the next step, in which it vanishes.
  trail({ end }) {
    const s = this.stops.findIndex(({ t }) => t >= end - this.eps), stay = this.stops[s]?.t ?? this.end, next = this.stops[s + 1]?.t;
    return { stay, gone: next === undefined ? Infinity : stay + 0.6 * (next - stay) };
  }

  // The cells that a message is read from: those that look like its parts when it leaves.
  sources(message) {
    const alike = (a, b) => [...a].sort().join() === [...b].sort().join();
    return message.parts.map((part) => {
      const same = this.cellsOf[message.src].filter((c) => this.state(c, message.start).label === part.label);
      return same.find((c) => alike(this.state(c, message.start).from, part.from)) ?? same[0];
    }).filter((c) => c !== undefined);
  }

  // The stop that the playhead has reached or is on its way to: its caption tells what is in flight now.
  stopIndex(t) {
    const i = this.stops.findIndex((stop) => stop.t >= t - this.eps);
    return i < 0 ? this.stops.length - 1 : i;
  }
}
