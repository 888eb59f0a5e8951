// Navigation: draws what the address names, and handles keys, links and printing.
"use strict";

const byKey = new Map(flips.key.map((key, n) => [key, n]));
const opened = () => byKey.get(address().get("flip")); // number of the open flip, undefined for the list

// Browsers refuse frequent changes of the address, as when a key is held down, so it is updated with a delay.
const ADDRESS_DELAY = 400; // milliseconds
const pending = { timer: null, written: location.hash };
function updateAddress() {
  clearTimeout(pending.timer);
  pending.timer = null;
  if (location.hash !== pending.written) return; // the reader pressed Back in the meantime
  history.replaceState(null, "", shown);
  pending.written = location.hash;
}

// Shows an address. "replace": instead of the current entry of the browser's history, not after it.
function go(to, replace = false) {
  if (replace) {
    pending.timer ??= setTimeout(updateAddress, ADDRESS_DELAY);
  } else {
    if (pending.timer !== null) updateAddress();
    history.pushState(null, "", to);
    pending.written = location.hash;
  }
  shown = to;
  draw();
}

// Links are followed here: one to the address that the browser still shows would do nothing.
addEventListener("click", (event) => {
  const to = event.target.closest("a")?.getAttribute("href");
  if (to === undefined || to === "#main" || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  go(to);
});

function followHash() {
  shown = pending.written = location.hash;
  draw();
}

function draw() {
  const state = address();
  const n = opened();
  const before = find("flip").hidden ? undefined : find("flip").dataset.key;
  if (n !== undefined && before === undefined) list.scrolled = scrollY;
  find("list").hidden = find("about").hidden = n !== undefined;
  find("flip").hidden = n === undefined;
  find("strange").hidden = !state.has("flip") || n !== undefined;
  if (n === undefined) {
    document.title = `Flips of ${run.name}`;
    if (before !== undefined) list.laidOut = null; // the window may have another width now
    drawList(state);
    if (before !== undefined) returnToList(byKey.get(before));
  } else if (before === flips.key[n]) {
    find("flip").querySelector("nav").replaceWith(flipLinks(n, state)); // a search found more flips
  } else {
    document.title = `${items.name[flips.item[n]]}: flip of ${run.name}`;
    find("flip").dataset.key = flips.key[n];
    scrollTo(0, 0);
    drawFlip(n, state);
    if (state.has("text")) readFiles(draw);
  }
}

// Restores the list's scroll position and moves the focus to the flip that was open.
function returnToList(n) {
  find("flip").replaceChildren();
  scrollTo(0, list.scrolled);
  list.active = n;
  const place = list.found.indexOf(n);
  if (place >= 0) focusRow(place);
  else find("main").focus({ preventScroll: true });
}

// ---- keys
function openNext(by) {
  const found = findFlips(address());
  const other = found[found.indexOf(opened()) + by];
  if (other !== undefined) go(link(address(), { flip: flips.key[other] }), true);
}

const LIST_KEYS = {
  j: () => moveFocus(1), ArrowDown: () => moveFocus(1), k: () => moveFocus(-1), ArrowUp: () => moveFocus(-1),
  "/": () => find("filters").elements.text.select(),
  Enter: () => { if (list.active !== null && list.found.includes(list.active)) go(link(address(), { flip: flips.key[list.active] })); },
};
const FLIP_KEYS = {
  j: () => openNext(1), ArrowRight: () => openNext(1), k: () => openNext(-1), ArrowLeft: () => openNext(-1),
  Escape: () => go(link(address(), { flip: null })),
  "/": () => { go(link(address(), { flip: null })); find("filters").elements.text.select(); },
};
const SEARCH_KEYS = { Escape: () => focusRow(0), Enter: () => focusRow(0), ArrowDown: () => focusRow(0) };

addEventListener("keydown", (event) => {
  const { key, target } = event;
  if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing || find("help").open) return;
  const isSearch = target.matches("input[type=search]");
  if (!isSearch && target.matches("input, select, textarea")) return;
  if (key.length === 1 && !isSearch && !find("letters").checked) return;
  if (key === "Enter" && target.matches("a, button, summary")) return;
  const keys = isSearch ? SEARCH_KEYS : { ...(opened() === undefined ? LIST_KEYS : FLIP_KEYS), "?": help };
  if (!Object.hasOwn(keys, key)) return;
  event.preventDefault();
  keys[key]();
});

function help() {
  find("help").showModal();
  find("close").focus();
}

// ---- printing: all rows are drawn, up to a limit
const MAX_PRINTED = 500;
addEventListener("beforeprint", () => {
  if (opened() !== undefined) return;
  find("rows").replaceChildren(...Array.from({ length: Math.min(MAX_PRINTED, list.found.length) }, (_, place) => row(place)));
  if (list.found.length > MAX_PRINTED) find("count").append(`; the first ${MAX_PRINTED} are printed`);
});
addEventListener("afterprint", () => {
  if (opened() !== undefined) return;
  list.laidOut = null;
  drawList(address());
});

find("title").textContent = `Flips of ${run.name}`;
find("about").textContent =
  `Items whose score or a facet differs between two sides that the report compares; lost safety first. The reference is ${run.reference}. ` +
  "A loss is the candidate's.";
find("ask").addEventListener("click", help);
find("skip").addEventListener("click", (event) => { event.preventDefault(); find("main").focus(); });
addEventListener("hashchange", followHash);
addEventListener("scroll", () => { if (opened() === undefined) drawRows(); }, { passive: true });
addEventListener("resize", () => { if (opened() === undefined) layOutRows(); });
history.scrollRestoration = "manual";
drawFilters();
draw();
