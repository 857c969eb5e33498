// Keep a page current: follow the service's events and replace changed parts with HTML from the service.
(function () {
  "use strict";
  const body = document.body;
  const root = body.dataset.root || "";
  const live = document.getElementById("live");
  const THROTTLE_MS = 1000;
  const POLL_MS = 5000;
  const LONGEST_STREAM_MS = 330000; // the service ends each after 300 s
  let version = Number(body.dataset.version || 0);
  let pending = new Set();
  let everything = false;
  let relist = false; // whether servers may have come or gone
  let missed = false; // whether something fresh was left out, since somebody uses what it would replace
  let timer = null;
  let busy = false;
  let refreshed = -Infinity;
  let source = null;
  let heard = 0; // when the stream was opened last, or told something
  let looks = 0;
  let questions = 0; // how many dialogs were wanted
  let ahead = 0; // seconds by which this machine's clock is ahead of the service's

  function inUse(element) {
    if (document.querySelector("body > :popover-open")) return true; // its link gets the focus back
    return element.contains(document.activeElement) && document.activeElement !== document.body
      ? true : element.querySelector("details[open], :popover-open") !== null;
  }

  function reckon(shown) {
    if (shown.body.dataset.now) ahead = Date.now() / 1000 - shown.body.dataset.now;
    return shown;
  }

  async function page(url) {
    const response = await fetch(url, { headers: { Accept: "text/html" }, credentials: "same-origin" });
    const isOut = response.redirected && new URL(response.url).pathname === root + "/login"; // a reload leads there
    const isGone = [403, 404].includes(response.status) && url === location.href; // a reload says what has left
    if ((isOut || isGone) && !document.querySelector(":popover-open")) location.reload(); // nobody types
    if (!response.ok || response.redirected) throw new Error(String(response.status));
    return reckon(new DOMParser().parseFromString(await response.text(), "text/html"));
  }

  function replace(old, fresh) {
    if (fresh && inUse(old)) missed = true;
    else if (fresh) old.replaceWith(document.adoptNode(fresh));
  }

  async function refresh() {
    timer = null;
    refreshed = performance.now();
    if (busy) return later();
    busy = true;
    const ids = pending, all = everything, whole = relist;
    pending = new Set();
    everything = missed = relist = false;
    try {
      const own = document.querySelector(whole ? "[data-fragment]" : "[data-fragment=self]");
      if (own) {
        const fresh = await page(location.href);
        replace(own, fresh.querySelector("[data-fragment]"));
        relist = whole && missed;
      }
      if (!own || missed) await refreshRows(ids, all);
      const parts = document.querySelectorAll("[data-part]");
      if (parts.length) {
        const fresh = await page(root + "/fragments/side");
        parts.forEach((part) => replace(part, fresh.getElementById(part.id)));
      }
      tick();
      if (source && source.readyState === EventSource.OPEN) show("on");
    } catch (error) {
      ids.forEach((id) => pending.add(id)); // what was lost is asked for again
      everything = everything || all;
      relist = relist || whole;
      show("off");
      setTimeout(later, POLL_MS);
    } finally {
      busy = false;
    }
  }

  async function refreshRows(ids, all) {
    const rows = new Map();
    for (const row of document.querySelectorAll("[data-server]")) rows.set(row.dataset.server, row);
    const wanted = [...rows.keys()].filter((id) => all || ids.has(Number(id)));
    if (!wanted.length) return;
    const query = wanted.map((id) => "ids=" + id).join("&");
    const fresh = await page(root + "/fragments/servers?" + query);
    for (const row of fresh.querySelectorAll("[data-server]")) {
      const old = rows.get(row.dataset.server);
      if (old && inUse(old)) pending.add(Number(row.dataset.server));
      else if (old) old.replaceWith(document.adoptNode(row));
    }
  }

  function later() {
    // A change after a quiet second shows at once.
    if (timer === null) timer = setTimeout(refresh, Math.max(0, refreshed + THROTTLE_MS - performance.now()));
  }

  function show(state) {
    if (!live || live.dataset.state === state) return; // readers of the screen say a text that is set again
    live.dataset.state = state;
    live.title = state === "on" ? "Live" : "Offline: reconnecting";
    live.textContent = state === "on" ? "Live" : "Offline";
  }

  window.addEventListener("pagehide", () => { if (source) source.close(); });
  window.addEventListener("pageshow", (event) => { if (event.persisted) location.reload(); }); // as it was once left

  document.addEventListener("visibilitychange", () => {
    // A browser has six connections to a host, over all its tabs: a stream of each would stop them all.
    if (source) source.close();
    if (follows && !document.hidden) catchUp();
  });

  function catchUp() {
    everything = relist = true;
    later();
    follow();
  }

  function follow() {
    if (source) source.close();
    if (document.hidden) return;
    source = new EventSource(root + "/events?after=" + version);
    heard = Date.now();
    source.onopen = () => { heard = Date.now(); show("on"); };
    source.addEventListener("change", (event) => {
      heard = Date.now();
      const notice = JSON.parse(event.data);
      version = notice.version;
      if (notice.servers === null) everything = relist = true;
      else notice.servers.forEach((id) => pending.add(id));
      later();
    });
    source.onerror = () => {
      show("off");
      if (source.readyState === EventSource.CLOSED) {
        everything = relist = true;
        later();
        setTimeout(follow, POLL_MS);
      }
    };
  }

  function words(seconds) {
    if (seconds >= 86220) return (seconds / 86400).toFixed(1) + " d";
    if (seconds >= 3570) return (seconds / 3600).toFixed(1) + " h";
    if (seconds >= 120) return Math.round(seconds / 60) + " min";
    return Math.max(0, Math.round(seconds)) + " s";
  }

  function tick() {
    const now = Date.now() / 1000 - ahead;
    for (const time of document.querySelectorAll("time[data-since]")) time.textContent = words(now - time.dataset.since);
    for (const time of document.querySelectorAll("time[data-until]")) time.textContent = "in " + words(time.dataset.until - now);
  }

  document.addEventListener("focusout", () => { if (pending.size || missed) later(); });
  document.addEventListener("toggle", () => { if (pending.size || missed) later(); }, true);
  async function ask(link) {
    // The dialog is fetched when somebody wants it: Airflow is asked about one task then, not about a page of them.
    const mine = ++questions;
    try {
      const dialog = (await page(link.href)).getElementById(link.dataset.ask);
      if (mine !== questions) return; // that of another link was wanted meanwhile
      const last = document.getElementById(dialog.id);
      if (last) last.remove();
      body.append(document.adoptNode(dialog));
      dialog.showPopover({ source: link });
    } catch (error) {
      if (mine === questions) location.assign(link.href);
    }
  }

  document.addEventListener("click", (event) => {
    const asks = event.target.closest("a[data-ask]");
    const isPlain = !event.ctrlKey && !event.metaKey && !event.shiftKey; // not for a tab or window of its own
    if (asks && isPlain) {
      event.preventDefault();
      ask(asks);
    }
    const dot = event.target.closest("[data-page]");
    if (dot) {
      const query = new URLSearchParams(location.search);
      query.set("page", dot.dataset.page);
      location.search = query.toString();
    }
    const link = event.target.closest("a[data-airflow]");
    if (link && isPlain && window.parent !== window) {
      // Inside Airflow's frame: Airflow's own router opens the link, because the frame may not navigate the page.
      event.preventDefault();
      window.parent.history.pushState({}, "", link.href);
      window.parent.dispatchEvent(new PopStateEvent("popstate", { state: {} }));
    }
  });
  document.addEventListener("submit", (event) => {
    const form = event.target;
    if (((event.submitter && event.submitter.getAttribute("formmethod")) || form.method) !== "post") return;
    if (form.dataset.sent) event.preventDefault(); // a double click: its answer would be that nothing is left to do
    form.dataset.sent = "true";
    setTimeout(() => delete form.dataset.sent, 10000); // an answer that somebody stops leaves the page, and the form, as they are
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    const open = event.target.closest("details[open]");
    if (open) {
      open.open = false;
      open.querySelector("summary").focus();
    }
  });

  const here = document.querySelector("header nav [aria-current]");
  if (here) here.scrollIntoView({ block: "nearest", inline: "center" }); // the menu is one line, also on a phone
  const theme = document.getElementById("theme");
  if (theme) {
    theme.addEventListener("click", () => {
      const root = document.documentElement;
      const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
      root.dataset.theme = dark ? "light" : "dark";
      try { localStorage.setItem("gpu-manager-theme", root.dataset.theme); } catch (error) { /* without storage: for this page only */ }
      document.dispatchEvent(new Event("themechange"));
    });
  }
  reckon(document);
  const follows = body.dataset.csrf && document.querySelector("[data-server], [data-fragment], [data-part]");
  if (follows) follow();
  setInterval(tick, 10000);
  setInterval(() => {
    if (document.hidden || !source) return;
    if (source.readyState !== EventSource.CLOSED && Date.now() - heard > LONGEST_STREAM_MS) {
      show("off"); // nothing has come for longer than a stream lasts: its connection is gone
      return catchUp();
    }
    // Time alone moves the timeline, begins a maintenance window and wears out the token of a form.
    const isMinute = ++looks % 6 === 0;
    if (!isMinute && !document.querySelector(".uses, table.gpus")) return;
    everything = true;
    relist = relist || isMinute;
    later();
  }, 10000);
})();
