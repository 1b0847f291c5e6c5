// Tabs as the pattern has them: one stop for the Tab key, arrows go between them, panels are labelled by them.

import { need } from "./dom";

function tabs(): HTMLButtonElement[] {
  return [...document.querySelectorAll<HTMLButtonElement>("[role=tab]")].filter((tab) => !tab.hidden);
}

export function selectTab(name: string, focus = false): void {
  for (const tab of document.querySelectorAll<HTMLButtonElement>("[role=tab]")) {
    const chosen = tab.id === `tab-${name}`;
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
    need(tab.getAttribute("aria-controls") ?? "").hidden = !chosen;
    if (chosen && focus) tab.focus();
  }
}

export function wireTabs(): void {
  for (const tab of document.querySelectorAll<HTMLButtonElement>("[role=tab]")) {
    tab.addEventListener("click", () => { selectTab(tab.id.replace("tab-", "")); });
    tab.addEventListener("keydown", (event) => {
      const all = tabs(), step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const next = all[(all.indexOf(tab) + step + all.length) % all.length];
      selectTab(next.id.replace("tab-", ""), true);
    });
  }
}
