// What the address says is drawn, and what the keys do.
"use strict";

const byKey = new Map(flips.key.map((key, n) => [key, n]));
const opened = () => byKey.get(address().get("flip"));

// Browsers refuse an address that changes too often, as under a key that is held down: it follows what is shown.
const FOLLOWS = 400; // milliseconds
const follower = { timer: null, written: location.hash };
function follow() {
  clearTimeout(follower.timer);
  follower.timer = null;
  if (location.hash !== follower.written) return; // the way back was gone meanwhile
  history.replaceState(null, "", shown);
  follower.written = location.hash;
}

// what is shown next: a new step of the browser's way back, or in place of this one
function go(to, instead = false) {
  if (instead) {
    follower.timer ??= setTimeout(follow, FOLLOWS);
  } else {
    if (follower.timer !== null) follow();
    history.pushState(null, "", to);
    follower.written = location.hash;
  }
  shown = to;
  draw();
}

// a link may lead to where the address still is, which is no change of it
addEventListener("click", (event) => {
  const to = event.target.closest("a")?.getAttribute("href");
  if (to === undefined || to === "#main" || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  go(to);
});

function gone() {
  shown = follower.written = location.hash;
  draw();
}

function draw() {
  const state = address();
  const n = opened();
  const before = find("flip").hidden ? undefined : find("flip").dataset.key;
  if (n !== undefined && before === undefined) list.from = scrollY;
  find("list").hidden = find("about").hidden = n !== undefined;
  find("flip").hidden = n === undefined;
  find("strange").hidden = !state.has("flip") || n !== undefined;
  if (n === undefined) {
    document.title = `Flips of ${run.name}`;
    if (before !== undefined) list.laid = null; // its width may be another
    drawList(state);
    if (before !== undefined) back(byKey.get(before));
  } else if (before === flips.key[n]) {
    find("flip").querySelector("nav").replaceWith(around(n, state)); // a search found more
  } else {
    document.title = `${items.name[flips.item[n]]}: flip of ${run.name}`;
    find("flip").dataset.key = flips.key[n];
    scrollTo(0, 0);
    drawFlip(n, state);
    if (state.has("text")) readOn(draw);
  }
}

// the list where it was left, at the flip that was looked at last
function back(n) {
  find("flip").replaceChildren();
  scrollTo(0, list.from);
  list.active = n;
  const place = list.found.indexOf(n);
  if (place >= 0) focusRow(place);
  else find("main").focus({ preventScroll: true });
}

// ---- keys
function besides(by) {
  const found = foundBy(address());
  const other = found[found.indexOf(opened()) + by];
  if (other !== undefined) go(link(address(), { flip: flips.key[other] }), true);
}

const LIST_KEYS = {
  j: () => step(1), ArrowDown: () => step(1), k: () => step(-1), ArrowUp: () => step(-1),
  "/": () => find("filters").elements.text.select(),
  Enter: () => { if (list.active !== null && list.found.includes(list.active)) go(link(address(), { flip: flips.key[list.active] })); },
};
const FLIP_KEYS = {
  j: () => besides(1), ArrowRight: () => besides(1), k: () => besides(-1), ArrowLeft: () => besides(-1),
  Escape: () => go(link(address(), { flip: null })),
  "/": () => { go(link(address(), { flip: null })); find("filters").elements.text.select(); },
};
const SEARCH_KEYS = { Escape: () => focusRow(0), Enter: () => focusRow(0), ArrowDown: () => focusRow(0) };

addEventListener("keydown", (event) => {
  const { key, target } = event;
  if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing || find("help").open) return;
  const searches = target.matches("input[type=search]");
  if (!searches && target.matches("input, select, textarea")) return;
  if (key.length === 1 && !searches && !find("letters").checked) return;
  if (key === "Enter" && target.matches("a, button, summary")) return;
  const keys = searches ? SEARCH_KEYS : { ...(opened() === undefined ? LIST_KEYS : FLIP_KEYS), "?": help };
  if (!Object.hasOwn(keys, key)) return;
  event.preventDefault();
  keys[key]();
});

function help() {
  find("help").showModal();
  find("close").focus();
}

// ---- on paper all rows stand one below the other; more than this no one reads there
const PRINTED = 500;
addEventListener("beforeprint", () => {
  if (opened() !== undefined) return;
  find("rows").replaceChildren(...Array.from({ length: Math.min(PRINTED, list.found.length) }, (_, place) => row(place)));
  if (list.found.length > PRINTED) find("count").append(`; the first ${PRINTED} are printed`);
});
addEventListener("afterprint", () => { if (opened() !== undefined) return;
  list.laid = null;
  drawList(address());
});

find("title").textContent = `Flips of ${run.name}`;
find("about").textContent =
  `Items whose score or a facet differs between two sides that the report compares; lost safety first. The reference is ${run.reference}. ` +
  "A loss is the candidate's.";
find("ask").addEventListener("click", help);
find("skip").addEventListener("click", (event) => { event.preventDefault(); find("main").focus(); });
addEventListener("hashchange", gone);
addEventListener("scroll", () => { if (opened() === undefined) drawRows(); }, { passive: true });
addEventListener("resize", () => { if (opened() === undefined) layRows(); });
history.scrollRestoration = "manual";
drawFilters();
draw();
