// Settings of ipywidgets' script in the static page. Runs after require.js and before it.
(function () {
  // Modules that are not part of the widgets' script lie beside this file, whatever the depth of the page.
  const here = new URL(".", document.currentScript.src).href;
  requirejs.config({ baseUrl: here, paths: { anywidget: "anywidget" } });
})();
