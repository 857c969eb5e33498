// Set light or dark before the first paint: the user's choice, else the outer frame's, else the system's.
(function () {
  "use strict";
  const root = document.documentElement;
  let chosen = null;
  try {
    chosen = localStorage.getItem("gpu-manager-theme");
    const outer = window.parent !== window ? window.parent.document.documentElement : null;
    if (!chosen && outer) {
      chosen = outer.classList.contains("dark") ? "dark" : outer.classList.contains("light") ? "light" : null;
    }
  } catch (error) {
    chosen = null; // no storage, or a frame of another origin: the system decides
  }
  if (chosen) root.dataset.theme = chosen;
  if (window.parent !== window) root.dataset.framed = ""; // the outer page has a header of its own
})();
