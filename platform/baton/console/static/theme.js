// Runs before anything is drawn, so that the page never shows the other theme first.
(() => {
  let wish = "system";
  try {
    wish = localStorage.getItem("baton.theme") || "system";
  } catch {
    // Storage is closed to this page: the system decides.
  }
  if (wish === "light" || wish === "dark") document.documentElement.dataset.theme = wish;
})();
