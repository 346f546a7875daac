// Keeps what is shown up to date. Without it, the page is as it was when it was loaded.
"use strict";
(() => {
  const PAGE_MS = 5000;
  const LOG_MS = 1000;
  const state = document.getElementById("live-state");
  const refresh = document.getElementById("refresh");
  const log = document.getElementById("log");
  if (!refresh) return;
  refresh.hidden = true;

  const say = (text) => {
    if (state.textContent !== text) state.textContent = text;
  };

  const get = async (url) => {
    const response = await fetch(url, { cache: "no-store" });
    // The session is over: the page itself asks for the token.
    if (response.status === 401) location.reload();
    if (!response.ok) throw new Error(String(response.status));
    return response;
  };

  const replace = (part, fresh) => {
    if (!fresh || part.isEqualNode(fresh)) return;
    // What was focused stays focused, and a selection stays as it is.
    const selection = document.getSelection();
    if (selection && !selection.isCollapsed && part.contains(selection.anchorNode)) return;
    const focused = part.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    part.replaceWith(fresh);
    if (focused) {
      const link = [...fresh.querySelectorAll("a[href]")].find((found) => found.getAttribute("href") === focused);
      if (link) link.focus({ preventScroll: true });
    }
  };

  const updatePage = async () => {
    const response = await get(location.href);
    const fresh = new DOMParser().parseFromString(await response.text(), "text/html");
    for (const part of document.querySelectorAll("[data-live]")) {
      replace(part, fresh.getElementById(part.id));
    }
  };

  const updateLog = async () => {
    const known = Number(log.dataset.end);
    const response = await get(`${log.dataset.log}?from=${known}`);
    const text = await response.text();
    const start = Number(response.headers.get("Log-Start"));
    const end = Number(response.headers.get("Log-End"));
    log.dataset.over = response.headers.get("Log-Over");
    if (end === known || end === 0) return;
    const follows = log.hidden || log.scrollTop + log.clientHeight >= log.scrollHeight - 8;
    if (log.hidden) {
      log.hidden = false;
      document.getElementById("log-note").textContent = "";
    }
    if (start === known) log.append(text);
    else log.textContent = text;
    log.dataset.end = String(end);
    if (follows) log.scrollTop = log.scrollHeight;
  };

  const every = (ms, update, lasts) => {
    const turn = async () => {
      if (!document.hidden) {
        try {
          await update();
          say("Updated by itself");
        } catch {
          say("The hub does not answer. Trying again.");
        }
      }
      if (lasts()) setTimeout(turn, ms);
    };
    setTimeout(turn, ms);
  };

  every(PAGE_MS, updatePage, () => true);
  if (log) {
    log.scrollTop = log.scrollHeight;
    // The last lines may come after the end.
    let after = 10;
    every(LOG_MS, updateLog, () => log.dataset.over !== "true" || after-- > 0);
  }
})();
