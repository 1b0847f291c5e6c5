// Light or dark: the system's wish until a person says otherwise; that is remembered.

const NAME = "keystroke.theme";

export function useTheme(): void {
  const wish = localStorage.getItem(NAME);
  if (wish) document.documentElement.dataset.theme = wish;
}

export function toggleTheme(): void {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem(NAME, root.dataset.theme);
}
