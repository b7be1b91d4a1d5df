// Light or dark theme, set before the page is drawn: the stored choice, else the system's.
(() => {
  const kept = localStorage.getItem("trappm-theme");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    const chosen = localStorage.getItem("trappm-theme");
    document.documentElement.dataset.theme = chosen ?? (dark.matches ? "dark" : "light");
  };
  if (kept !== "light" && kept !== "dark") localStorage.removeItem("trappm-theme");
  dark.addEventListener("change", apply);
  apply();
})();
