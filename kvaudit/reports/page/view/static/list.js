// The list of flips: filters, search, and rows of which only those in sight are drawn.
// Every text of a run goes through textContent: none is ever read as markup.
"use strict";

const TEXTS = []; // filled by data/texts-<n>.js
const SHADES = []; // filled by data/shades-<n>.js
const SPARE = 8; // rows drawn above and below those in sight
const TALLEST = 16_000_000; // pixels: no browser scrolls much further
const REDRAW = 250; // milliseconds between looks at what a search found so far
const { run, arms, kinds, policies, metrics, items, flips } = VIEW;
const COUNT = flips.key.length;
const SIDES = {
  alike: "the reference, served alike",
  deployed: "the reference, uncompressed",
  serving: "itself, uncompressed",
};
const find = (id) => document.getElementById(id);
const number = (count) => count.toLocaleString("en");

// element("p", {class: "soft"}, "text", child, ...)
function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children.filter((child) => child !== null));
  return made;
}

// ---- what stands in the address: #suite=refusal&what=unsafe, and with flip=KEY one flip of that list
let shown = location.hash; // the address follows it (view.js)
const address = () => new URLSearchParams(shown.slice(1));
function link(state, changes) {
  const next = new URLSearchParams(state);
  for (const [name, value] of Object.entries(changes)) value === null ? next.delete(name) : next.set(name, value);
  return `#${next}`;
}

// ---- filters: label, the column of numbers, and the word of a number; "of" says whose column it is
const same = (word) => word;
const SAYERS = { both: [0, 1], reference: [0], candidate: [1] }; // whose answers are searched, by place in flips.answers
const FILTERS = {
  direction: { label: "lost or gained", values: ["lost", "gained"] },
  suite: { label: "suite", of: "item", column: items.suite, word: same },
  what: { label: "what changed" },
  policy: { label: "policy", of: "flip", column: flips.policy, word: (code) => policies[code].short },
  arm: { label: "arm", of: "flip", column: flips.arm, word: (code) => arms[code] },
  seed: { label: "seed", of: "flip", column: flips.seed, word: String },
  kind: { label: "compared with", of: "flip", column: flips.kind, word: (code) => kinds[code], says: (word) => SIDES[word] ?? word },
  length: { label: "length", of: "item", column: items.length, word: String },
  placement: { label: "placement", of: "item", column: items.placement, word: same },
  cache: { label: "lost by the cache", of: "flip", column: flips.lost, word: (code) => VIEW.lost[code] },
  item: { label: "item", of: "item", column: items.name, word: same, apart: true }, // no field: links lead to it
  template: { label: "template", of: "item", column: items.template, word: same, apart: true },
  in: { label: "search in", values: Object.keys(SAYERS), says: (word) => (word === "both" ? "both answers" : `the ${word}'s answer`) },
};
const lost = ([, reference, candidate]) => candidate < reference;
const way = (change) => (lost(change) ? "lost" : "gained");

function valuesOf(name) {
  const { values, column, word } = FILTERS[name];
  if (values) return values;
  if (column) return [...new Set([...new Set(column)].map(word))];
  const seen = new Set(flips.changes.flatMap((changes) => changes.map(([metric]) => metric)));
  return metrics.map((metric) => metric.name).filter((_, code) => seen.has(code));
}

// of every item whether it fits, and what is asked of a flip's own columns
function tests(state) {
  const fits = new Uint8Array(items.name.length).fill(1);
  const own = [];
  for (const [name, { of, column, word }] of Object.entries(FILTERS)) {
    if (!column || !state.has(name)) continue;
    const wanted = state.get(name);
    if (of === "item") column.forEach((value, item) => { if (word(value) !== wanted) fits[item] = 0; });
    else own.push([column, new Set([...new Set(column)].filter((value) => word(value) === wanted))]);
  }
  return [fits, own];
}

function chosen(state) {
  const [fits, own] = tests(state);
  const metric = state.has("what") ? metrics.findIndex(({ name }) => name === state.get("what")) : null;
  const direction = state.get("direction");
  const changed = (change) => (metric === null || change[0] === metric) && (!direction || way(change) === direction);
  const says = state.get("text") ? saying(state.get("text"), state.get("in")) : null;
  const found = [];
  flips: for (let n = 0; n < COUNT; n += 1) {
    if (!fits[flips.item[n]]) continue;
    for (const [column, codes] of own) if (!codes.has(column[n])) continue flips;
    if ((metric !== null || direction) && !flips.changes[n].some(changed)) continue;
    if (says && !says(n)) continue;
    found.push(n);
  }
  return found;
}

// ---- search: names at once, prompts and answers as their files are read
const NAMES = items.name.map((name, item) => `${name}\n${items.template[item]}`.toLowerCase());
const FILES = items.shades.length;
const AT_ONCE = 4; // files that are read side by side
const read = { files: 0, begun: 0, asked: [], said: [] }; // what was read, in small letters: by item, by number of the answer
const search = { wanted: null, asked: [], said: [] }; // of each whether it holds what is wanted

function saying(text, sayer) {
  const wanted = text.toLowerCase();
  const holds = (words) => words.includes(wanted);
  if (search.wanted !== wanted) {
    const asked = NAMES.map((name, item) => holds(name) || (item in read.asked && holds(read.asked[item])));
    Object.assign(search, { wanted, asked, said: read.said.map(holds) });
  }
  const sides = sayer === null ? SAYERS.both : SAYERS[sayer] ?? [];
  return (n) => (sayer === null && search.asked[flips.item[n]]) || sides.some((side) => search.said[flips.answers[n][side]]);
}

function readTexts(table) {
  const words = (turns) => turns.map(([, text]) => text).join("\n").toLowerCase();
  const holds = (text) => search.wanted !== null && text.includes(search.wanted);
  for (const [item, { prompt, answers }] of Object.entries(table)) {
    read.asked[item] = words(prompt);
    search.asked[item] ||= holds(read.asked[item]);
    for (const [answer, { turns }] of Object.entries(answers)) {
      read.said[answer] = words(turns);
      search.said[answer] = holds(read.said[answer]);
    }
  }
}

// reads the files that were not read yet; "look" is called now and then, and at the end
function readOn(look) {
  let looked = performance.now();
  const next = () => {
    if (read.begun === FILES) return;
    const file = read.begun;
    read.begun += 1;
    const done = () => {
      if (TEXTS[file]) readTexts(TEXTS[file]);
      if (shownFile !== file) delete TEXTS[file]; // the words are kept, which weigh less
      read.files += 1;
      if (read.files === FILES || performance.now() - looked > REDRAW) {
        look();
        looked = performance.now();
      }
      next();
    };
    load([[TEXTS, file]], done, done);
  };
  while (read.begun < FILES && read.begun - read.files < AT_ONCE) next();
}

// ---- the form above the list
function drawFilters() {
  for (const [name, { label, apart, says = same }] of Object.entries(FILTERS)) {
    const values = apart ? [] : valuesOf(name);
    if (values.length < 2) continue;
    const options = values.map((word) => element("option", { value: word }, says(word)));
    find("fields").append(element("label", {}, label, element("select", { name }, element("option", { value: "" }, "all"), ...options)));
  }
  find("fields").append(element("button", { type: "reset" }, "Clear"));
  const narrow = matchMedia("(max-width: 48rem)");
  const fold = () => { find("more").open = !narrow.matches; };
  narrow.addEventListener("change", fold);
  fold();
  const form = find("filters");
  const given = () => {
    const state = new URLSearchParams([...new FormData(form)].filter(([, value]) => value !== ""));
    for (const name of ["item", "template"]) if (address().has(name)) state.set(name, address().get(name));
    return `#${state}`;
  };
  form.addEventListener("input", ({ target }) => (target.name === "text" ? go(given(), true) : go(given())));
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(() => go("#")));
}

function fillForm(state) {
  for (const field of find("filters").elements) {
    if (field.name && (field !== document.activeElement || field.type !== "search")) field.value = state.get(field.name) ?? "";
  }
  const used = Object.entries(FILTERS).filter(([name]) => state.has(name));
  find("active").replaceChildren(...used.map(([name, { label, says = same }]) =>
    element("li", {}, element("a", { href: link(state, { [name]: null }) }, hidden("remove "), `${label}: `,
      element("bdi", {}, says(state.get(name))), element("span", { "aria-hidden": "true" }, " ✕")))));
}

function sums(found, state) {
  const totals = metrics.map(() => ({ lost: 0, gained: 0 }));
  for (const n of found) for (const change of flips.changes[n]) totals[change[0]][way(change)] += 1;
  return totals.flatMap((total, metric) => {
    if (total.lost + total.gained === 0) return [];
    const { name, says } = metrics[metric];
    const words = `${name}: ${number(total.lost)} lost, ${number(total.gained)} gained`;
    return [element("li", {}, element("a", { href: link(state, { what: name }), title: says }, words))];
  });
}

// ---- the rows
// "laid": the flips that the rows were drawn of; "from": how far it was scrolled when a flip was opened
const list = { found: [], asked: null, files: 0, state: null, laid: null, active: null, height: 1, drawn: new Map(), from: 0 };

// the flips of an address, found once; a search finds more as more is read, and nothing less
function foundBy(state) {
  const own = new URLSearchParams(state);
  own.delete("flip");
  const asked = String(own);
  const again = list.asked === asked;
  if (again && (!own.has("text") || list.files === read.files)) return list.found;
  const found = chosen(own);
  Object.assign(list, { found: again && found.length === list.found.length ? list.found : found, asked, files: read.files, state: own });
  return list.found;
}

const share = (metric, value) => (metrics[metric].wanted ? value : 1 - value);
function said(metric, value) {
  const own = share(metric, value);
  if (metric > 0 && (own === 0 || own === 1)) return own === 1 ? "yes" : "no";
  return String(Math.round(own * 1000) / 1000);
}
function changeMark(change) {
  const [metric, reference, candidate] = change;
  const words = `${way(change)}: ${metrics[metric].name} ${said(metric, reference)} → ${said(metric, candidate)}`;
  return element("span", { class: `change ${way(change)}`, title: metrics[metric].says }, words);
}

function row(place) {
  const n = list.found[place];
  const item = flips.item[n];
  const open = element("a", { href: link(list.state, { flip: flips.key[n] }), tabindex: "-1", dir: "auto", title: items.name[item] }, items.name[item]);
  const cells = [
    [open, element("div", { class: "soft", dir: "auto", title: items.template[item] }, items.template[item])],
    flips.changes[n].map(changeMark),
    [element("bdi", {}, arms[flips.arm[n]]), `, seed ${flips.seed[n]}`],
    [element("bdi", {}, policies[flips.policy[n]].short)],
    [SIDES[kinds[flips.kind[n]]]],
    [element("bdi", {}, items.suite[item]), `, ${items.length[item]} tokens, ${items.placement[item]}`],
  ];
  const made = element("tr", { role: "row", "aria-rowindex": place + 2 }, ...cells.map((cell) => element("td", { role: "cell" }, ...cell)));
  open.addEventListener("focus", () => mark(n));
  made.style.top = `${place * list.height}px`;
  return made;
}

const listed = () => Math.min(list.found.length, Math.floor(TALLEST / list.height));

// draws what is in sight and takes away what is not; rows that stay keep the focus
function drawRows() {
  const body = find("rows");
  const gone = -body.getBoundingClientRect().top;
  const first = Math.max(0, Math.floor(gone / list.height) - SPARE);
  const end = Math.min(listed(), Math.ceil((gone + innerHeight) / list.height) + SPARE);
  for (const [place, made] of list.drawn) {
    if (place >= first && place < end) continue;
    made.remove();
    list.drawn.delete(place);
  }
  for (let place = first; place < end; place += 1) {
    if (list.drawn.has(place)) continue;
    const made = row(place);
    list.drawn.set(place, made);
    body.insertBefore(made, list.drawn.get(place + 1) ?? null); // in order, for those who hear them
  }
  mark(list.active);
}

// the one row that a key opens; where there is none the first is reached by Tab
function mark(n) {
  list.active = n;
  const places = [...list.drawn.keys()];
  const here = places.find((place) => list.found[place] === n);
  const reached = here ?? Math.min(...places.filter((place) => list.drawn.get(place).getBoundingClientRect().bottom > 0));
  for (const [place, made] of list.drawn) {
    made.classList.toggle("here", place === here);
    made.querySelector("a").tabIndex = place === reached ? 0 : -1;
  }
}

// the rows anew, as high as the width and the size of letters make them; the one that had the focus has it again
function layRows() {
  const body = find("rows");
  const held = body.contains(document.activeElement) ? list.found.indexOf(list.active) : -1;
  body.replaceChildren();
  list.drawn.clear();
  if (list.found.length > 0) {
    const probe = body.appendChild(row(0));
    list.height = probe.offsetHeight;
    probe.remove();
  }
  body.style.height = `${listed() * list.height}px`;
  list.laid = list.found;
  drawRows();
  if (held >= 0) focusRow(held);
}

function drawList(state) {
  const found = foundBy(state);
  const reading = state.has("text") && read.files < FILES;
  find("none").hidden = found.length > 0 || reading;
  find("reading").hidden = !reading;
  find("reading").textContent = `Prompts and answers are being searched: ${number(read.files)} of ${number(FILES)} files.`;
  fillForm(state);
  if (list.laid !== found) {
    find("sums").replaceChildren(...sums(found, state));
    find("flips").setAttribute("aria-rowcount", found.length + 1);
    find("flips").hidden = found.length === 0;
    layRows();
    const more = listed() < found.length ? `; the first ${number(listed())} are listed` : "";
    find("count").textContent = `${number(found.length)} of ${number(COUNT)} flips${more}`;
  }
  if (reading) readOn(draw);
}

// brings a row into sight, below the head and above the edge
function show(place) {
  const top = find("rows").getBoundingClientRect().top + place * list.height;
  const head = document.querySelector("#flips thead").offsetHeight;
  if (top < head) scrollBy(0, top - head);
  else if (top + list.height > innerHeight) scrollBy(0, top + list.height - innerHeight);
  drawRows();
}

function focusRow(place) {
  if (place < 0 || place >= listed()) return;
  show(place);
  list.drawn.get(place).querySelector("a").focus({ preventScroll: true });
}

function step(by) {
  const place = list.found.indexOf(list.active);
  const inSight = [...list.drawn].filter(([, made]) => made.getBoundingClientRect().top >= 0).map(([at]) => at);
  focusRow(place >= 0 ? place + by : inSight.length > 0 ? Math.min(...inSight) : 0);
}
