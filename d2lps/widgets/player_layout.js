// Where a player's cards, rows and cells lie: boxes in pixels.

const PAD = 12; // between the cards and the edge of the picture
const CELL = 34; // height of a cell
const TALL = 51; // room for a message between two cards, one above the other
const SWITCH = 14, TIER = 64; // half the room that a switch needs at the edge of the picture; between two tiers of a network
const BOX = 22; // the room above a card for the name of its machine

// Positions are stretched to the whole picture, and a circle of many ranks is rounded off to a square, |x|⁴ + |y|⁴ = 1, in
// which wide cards find more room; on a small screen it becomes two columns.
function places(ranks, nodes, small) {
  const stretch = (key) => {
    const values = [...ranks, ...nodes].map((rank) => rank[key]), low = Math.min(...values), span = Math.max(...values) - low;
    return values.map((value) => (span < 1e-6 ? 0 : (value - low) / span - 0.5));
  };
  const xs = stretch("x"), ys = stretch("y"), at = xs.map((x, i) => ({ x, y: ys[i] }));
  const circle = ranks.length > 5 && at.slice(0, ranks.length).every(({ x, y }) => Math.abs(Math.hypot(x, y) - 0.5) < 0.02);
  if (circle && small) return [...columns(at.slice(0, ranks.length)), ...nodes.map(() => ({ x: 0.5, y: 0.5 }))];
  return at.map(({ x, y }) => {
    const push = circle && Math.hypot(x, y) > 0.4 ? 0.5 / (x ** 4 + y ** 4) ** 0.25 : 1;
    return { x: 0.5 + x * push, y: 0.5 + y * push };
  });
}

// Down on the right, up on the left, so that neighbors on the circle stay neighbors.
function columns(at) {
  const turn = ({ x, y }) => (Math.atan2(x, -y) + 2 * Math.PI + 1e-3) % (2 * Math.PI); // clockwise from the top
  const order = at.map((_, i) => i).sort((i, j) => turn(at[i]) - turn(at[j])), half = Math.ceil(at.length / 2), result = [];
  order.forEach((rank, k) => (result[rank] = k < half ? { x: 1, y: k / (half - 1) } : { x: 0, y: (2 * half - 1 - k) / (half - 1) }));
  return result;
}

// The lowest picture in which cards of width w and height h keep `gap` between them: Infinity where none does. The middles of
// what lies highest and lowest are `inset` from its edges, together.
function neededHeight(at, width, w, h, gap, inset) {
  let height = inset;
  for (let i = 0; i < at.length; i++) {
    for (let j = 0; j < i; j++) {
      if (Math.abs(at[i].x - at[j].x) * (width - 2 * PAD - w) >= w + gap) continue; // side by side
      height = Math.max(height, inset + (h + Math.max(gap, TALL)) / Math.abs(at[i].y - at[j].y));
    }
  }
  return height;
}

// Cards as wide as fits, rows in them, cells in those. Where machines of a network find no room, cards stand in a circle.
function layout(scene, width) {
  const { ranks, rows, cells, nodes = [] } = scene, n = ranks.length, small = width < 520, all = places(ranks, nodes, small);
  const at = all.slice(0, n), own = ranks.map((_, r) => rows.map((row, i) => ({ ...row, i })).filter((row) => row.rank === r));
  const captioned = own.some((list) => list.length > 1);
  const rowHeight = CELL + 8 + (captioned ? 13 : 0);
  const heights = own.map((list) => (list.length ? 22 + list.length * rowHeight + 2 : 30));
  const h = Math.max(30, ...heights), boxed = scene.groups ? BOX : 0;
  const most = Math.max(1, ...rows.map((_, i) => cells.filter((cell) => cell.row === i).length));
  const gap = small ? (n <= 4 ? 42 : n <= 8 ? 32 : 16) : n <= 4 ? 64 : n <= 8 ? 40 : 20;
  const edge = (y) => (at.some((p) => Math.abs(p.y - y) * 3 < 0.2) ? h / 2 : SWITCH), top = edge(0) + boxed, bottom = edge(1) + boxed / 3;
  const limit = width * (small ? 3 : 0.85), widest = clamp(most * 34 + 20, 112, 240), needed = (w) => neededHeight(at, width, w, h, gap, top + bottom);
  const fits = (w, least, high) => w <= least || needed(w) <= high;
  let w = widest;
  while (!fits(w, 64, limit)) w -= 2;
  while (!fits(w, 40, 1.25 * limit)) w -= 2; // rather a higher picture than slimmer cards
  if (nodes.length && !scene.placed && (w < 56 || needed(w) > 1.25 * limit)) return layout(ringed(scene), width);
  const uneven = at.some((p) => p.y !== at[0].y), tiers = new Set(all.slice(n).map((p) => p.y.toFixed(2))).size;
  const round = uneven ? h + width * (n < 3 ? 0.2 : n < 4 ? 0.3 : n < 6 ? 0.42 : 0.52) : Math.max(h, top + bottom + TIER * tiers); // not too flat
  const inner = Math.max(round, Math.min(needed(w), 2 * limit));
  const points = all.map((p) => ({ x: PAD + w / 2 + p.x * (width - 2 * PAD - w), y: PAD + top + p.y * (inner - top - bottom) }));
  const cards = ranks.map((_, r) => ({ x: points[r].x - w / 2, y: points[r].y - heights[r] / 2, w, h: heights[r] }));
  const rowBoxes = rows.map((row, i) => {
    const card = cards[row.rank], k = own[row.rank].findIndex((other) => other.i === i), side = w < 80 ? 5 : 8;
    return { x: card.x + side, y: card.y + 22 + k * rowHeight + (captioned ? 13 : 0), w: w - 2 * side, h: CELL };
  });
  const cellBoxes = cells.map(({ row, start, stop }) => {
    const box = rowBoxes[row], space = (stop - start) * box.w > 12 ? 3 : 1;
    return { x: box.x + start * box.w + space / 2, y: box.y, w: Math.max(1.5, (stop - start) * box.w - space), h: box.h };
  });
  return { width, height: inner + 2 * PAD, cards, rowBoxes, cellBoxes, captioned, points, drawn: scene };
}

// The scene without its cluster.
function ringed(scene) {
  const turn = (r) => (2 * Math.PI * r) / scene.ranks.length;
  const ranks = scene.ranks.map((rank, r) => ({ ...rank, x: 0.5 + 0.5 * Math.sin(turn(r)), y: 0.5 - 0.5 * Math.cos(turn(r)) }));
  return { ...scene, ranks, nodes: undefined, links: undefined, routes: undefined, groups: undefined };
}
