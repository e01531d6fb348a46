// Things within a widget: another widget, a picture or a text. Python lays them into `data` and the code of each kind of
// widget into KINDS (within.py), so that many scenes share one script.

const KINDS = {};

// The things that Python has packed.
async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0)), stream = new Blob([bytes]).stream();
  return new Response(stream.pipeThrough(new DecompressionStream("deflate"))).json();
}

// A model that only holds its state: nothing outside hears of it.
class Held {
  constructor(state) { Object.assign(this, { state, hooks: {} }); }
  get(name) { return this.state[name]; }
  set(name, value) {
    if (this.state[name] === value) return;
    this.state[name] = value;
    this.hooks[`change:${name}`]?.forEach((hook) => hook());
  }
  on(name, hook) { (this.hooks[name] ??= new Set()).add(hook); }
  off(name, hook) { this.hooks[name]?.delete(hook); }
  save_changes() {}
}

// A picture may stand on a page twice, and must find its clips and marks in itself, not in a copy that is hidden.
function ownNames(svg, el) {
  el.dataset.own ??= globalThis.d2lpsNames = (globalThis.d2lpsNames ?? 0) + 1;
  return svg.replace(/ id="|url\(#|href="#/g, (found) => `${found}own${el.dataset.own}-`);
}

// Puts a thing into `el` in place of what it holds; returns what takes it out again.
function put(el, { kind, state, svg, alt, text }) {
  if (kind in KINDS) return KINDS[kind].render({ model: new Held({ ...state }), el });
  const node = kind === "picture" ? html("div", { class: "d2lps-plot", role: "img", "aria-label": alt }) : html("p", { class: "d2lps-text" }, text);
  if (svg) node.innerHTML = ownNames(svg, el);
  el.append(node);
  return () => node.remove();
}
