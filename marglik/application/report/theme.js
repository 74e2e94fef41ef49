// Set the theme that the reader chose last time, before the page is drawn.
"use strict";
(() => {
  const KEY = "marglik-report-theme";
  const root = document.documentElement;
  // Browsers may forbid storage (private windows, file:// in some). The choice is then not stored.
  const remembered = () => {
    try {
      return localStorage.getItem(KEY);
    } catch {
      return null;
    }
  };
  const remember = (theme) => {
    try {
      localStorage.setItem(KEY, theme);
    } catch {
      // The choice is only for this visit.
    }
  };
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const isTheme = (theme) => theme === "light" || theme === "dark";
  let chosen = isTheme(remembered()) ? remembered() : null;

  const show = (theme) => {
    if (root.dataset.theme === theme) return;
    root.dataset.theme = theme;
    document.dispatchEvent(new Event("themechange"));
  };
  const current = () => chosen ?? (dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => show(current()));
  addEventListener("beforeprint", () => show("light"));
  addEventListener("afterprint", () => show(current()));
  show(current());

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const name = () => {
      const other = current() === "dark" ? "light" : "dark";
      button.querySelector("span").textContent = `${other[0].toUpperCase()}${other.slice(1)} theme`;
    };
    button.hidden = false;
    button.addEventListener("click", () => {
      chosen = current() === "dark" ? "light" : "dark";
      remember(chosen);
      show(chosen);
    });
    document.addEventListener("themechange", name);
    name();
  });
})();
