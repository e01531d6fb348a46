// Starts the book's own widgets on a page without a kernel. Their code is an ES module as anywidget has it; the page holds their
// traits, and codes of scripts named after their content (lean_widgets.py): window.d2lpsCode[name] = { esm, css }.
(() => {
  const HELD = "application/vnd.jupyter.widget-state+json", VIEW = "application/vnd.jupyter.widget-view+json";
  const REST = 2500; // milliseconds between the end of what plays by itself and its next beginning

  // What a widget sees of a model. Nobody else listens, so what it saves stays here.
  function modelOf(traits) {
    const hooks = {};
    return {
      get: (name) => traits[name],
      set(name, value) {
        if (traits[name] === value) return;
        traits[name] = value;
        for (const hook of [...(hooks[`change:${name}`] ?? [])]) hook();
      },
      on: (name, hook) => (hooks[name] ??= new Set()).add(hook),
      off: (name, hook) => hooks[name]?.delete(hook),
      save_changes() {},
    };
  }

  const modules = {};
  function moduleOf(name) {
    if (!modules[name]) {
      const { esm, css } = window.d2lpsCode[name], style = document.createElement("style");
      style.textContent = css;
      document.head.append(style);
      // A blob, since a page that was opened from a folder may not import files.
      modules[name] = import(URL.createObjectURL(new Blob([esm], { type: "text/javascript" })));
    }
    return modules[name];
  }

  // Plays over and over while it is in sight, until the reader takes over. Not for those who want less motion.
  function playByItself(box) {
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
    const button = box.querySelector('[data-action="play"]');
    let seen = false, own = false, timer;
    const start = () => { if (own || !seen || button.dataset.state === "playing") return; button.click(); };
    const rest = new MutationObserver(() => { clearTimeout(timer); if (button.dataset.state !== "playing") timer = setTimeout(start, REST); });
    const sight = new IntersectionObserver(([entry]) => {
      seen = entry.isIntersecting;
      if (seen) start();
      else if (!own && button.dataset.state === "playing") button.click();
    }, { threshold: 0.4 });
    const take = (event) => { if (event.isTrusted) { own = true; rest.disconnect(); sight.disconnect(); clearTimeout(timer); } };
    for (const kind of ["pointerdown", "keydown", "input"]) box.addEventListener(kind, take, true);
    rest.observe(button, { attributes: true, attributeFilter: ["data-state"] });
    sight.observe(box);
  }

  async function show(view, models) {
    const { code, model } = models[JSON.parse(view.textContent).model_id], el = document.createElement("div");
    el.className = "widget-subarea";
    view.after(el);
    (await moduleOf(code)).default.render({ model, el });
    const box = view.closest("[data-d2lps-plays]");
    if (box) playByItself(box);
  }

  addEventListener("DOMContentLoaded", () => {
    const held = JSON.parse(document.querySelector(`script[type="${HELD}"]`).textContent), models = {};
    for (const [id, { code, traits }] of Object.entries(held)) models[id] = { code, model: modelOf(traits) };
    for (const view of document.querySelectorAll(`script[type="${VIEW}"]`)) show(view, models);
  });
})();
