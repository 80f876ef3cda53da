// Runs before anything is drawn, so that the page never shows the other theme first.
(() => {
  let theme = "system";
  try {
    theme = localStorage.getItem("baton.theme") || "system";
  } catch {
    // Storage is closed to this page: the system decides.
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
