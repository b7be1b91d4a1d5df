// Light or dark, before anything is drawn: as chosen here before, else as the system has it.
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
