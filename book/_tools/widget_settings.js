// Settings of the widgets in the static page. Runs after require.js and before the widgets' own script.
(function () {
  // Modules that are not part of the widgets' script lie beside this file, whatever the depth of the page.
  const here = new URL(".", document.currentScript.src).href;
  requirejs.config({ baseUrl: here, paths: { anywidget: "anywidget" } });

  // The theme's Font Awesome would replace the icons inside ipywidgets' Play, which then no longer plays.
  window.FontAwesomeConfig = { observeMutations: false };

  // ipywidgets calls the Hub.Queue of MathJax 2; the page has MathJax 3. `MathJax` is a plain object of settings until
  // MathJax starts and takes its place, so the Hub is put into both; what is asked for early waits for the start.
  const settings = (window.MathJax = window.MathJax || {});
  let start;
  const started = new Promise((resolve) => { start = resolve; });
  const Hub = { Queue: ([, , element]) => started.then(() => MathJax.typesetPromise([element])) };
  const ready = () => { MathJax.startup.defaultReady(); MathJax.Hub = Hub; start(); };
  settings.Hub = Hub;
  if (settings.version) start();  // it had already started
  else settings.startup = { ...settings.startup, ready };
})();
