// The list of flips: filters, search, and the rows; only visible rows are drawn.
// Every text of a run is set as textContent and never parsed as markup.
"use strict";

const TEXTS = []; // filled by data/texts-<n>.js
const SHADES = []; // filled by data/shades-<n>.js
const SPARE_ROWS = 8; // drawn above and below the visible ones
const MAX_HEIGHT = 16_000_000; // pixels: no browser scrolls much further
const REDRAW = 250; // milliseconds between updates of the list during a search
const { run, arms, kinds, policies, metrics, items, flips } = VIEW;
const COUNT = flips.key.length;
const SIDES = {
  alike: "the reference, served alike",
  deployed: "the reference, uncompressed",
  serving: "itself, uncompressed",
};
const find = (id) => document.getElementById(id);
const number = (count) => count.toLocaleString("en");

// Example: element("p", {class: "soft"}, "text", child, ...). Children that are null are left out.
function element(name, attributes, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children.filter((child) => child !== null));
  return node;
}

// ---- the state of the page, in the address: #suite=refusal&what=unsafe filters the list, flip=KEY opens a flip of it
let shown = location.hash; // what is on screen; the browser's address is updated to it (view.js)
const address = () => new URLSearchParams(shown.slice(1));
function link(state, changes) {
  const next = new URLSearchParams(state);
  for (const [name, value] of Object.entries(changes)) value === null ? next.delete(name) : next.set(name, value);
  return `#${next}`;
}

// ---- filters: label, column of values, and the text of a value; "of" says whether the column is by item or by flip
const same = (text) => text;
const SEARCHED_SIDES = { both: [0, 1], reference: [0], candidate: [1] }; // indices in an entry of flips.answers
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
  item: { label: "item", of: "item", column: items.name, word: same, linkOnly: true }, // set by links, without a field
  template: { label: "template", of: "item", column: items.template, word: same, linkOnly: true },
  in: { label: "search in", values: Object.keys(SEARCHED_SIDES), says: (word) => (word === "both" ? "both answers" : `the ${word}'s answer`) },
};
const direction = ([, reference, candidate]) => (candidate < reference ? "lost" : "gained");

function valuesOf(name) {
  const { values, column, word } = FILTERS[name];
  if (values) return values;
  if (column) return [...new Set([...new Set(column)].map(word))];
  const seen = new Set(flips.changes.flatMap((changes) => changes.map(([metric]) => metric)));
  return metrics.map((metric) => metric.name).filter((_, code) => seen.has(code));
}

// Returns two filters: for each item whether it passes, and pairs of a column of the flips and its wanted values.
function columnFilters(state) {
  const passes = new Uint8Array(items.name.length).fill(1);
  const flipColumns = [];
  for (const [name, { of, column, word }] of Object.entries(FILTERS)) {
    if (!column || !state.has(name)) continue;
    const wanted = state.get(name);
    if (of === "item") column.forEach((value, item) => { if (word(value) !== wanted) passes[item] = 0; });
    else flipColumns.push([column, new Set([...new Set(column)].filter((value) => word(value) === wanted))]);
  }
  return [passes, flipColumns];
}

// Returns the numbers of the flips that pass all filters and the search.
function filterFlips(state) {
  const [passes, flipColumns] = columnFilters(state);
  const metric = state.has("what") ? metrics.findIndex(({ name }) => name === state.get("what")) : null;
  const wanted = state.get("direction");
  const changed = (change) => (metric === null || change[0] === metric) && (!wanted || direction(change) === wanted);
  const matches = state.get("text") ? searchFor(state.get("text"), state.get("in")) : null;
  const found = [];
  flips: for (let n = 0; n < COUNT; n += 1) {
    if (!passes[flips.item[n]]) continue;
    for (const [column, values] of flipColumns) if (!values.has(column[n])) continue flips;
    if ((metric !== null || wanted) && !flips.changes[n].some(changed)) continue;
    if (matches && !matches(n)) continue;
    found.push(n);
  }
  return found;
}

// ---- search: in names at once, in prompts and answers as their files are read
const NAMES = items.name.map((name, item) => `${name}\n${items.template[item]}`.toLowerCase());
const FILES = items.shades.length;
const PARALLEL_READS = 4;
// counts of files, and the texts read so far in lower case: prompts by item, answers by number of the answer
const read = { files: 0, begun: 0, prompts: [], answers: [] };
// for each item (name, template and prompt) and each answer, whether it contains the text searched for
const search = { text: null, items: [], answers: [] };

// Returns a function that says whether flip n matches the search; "side" is a key of SEARCHED_SIDES or null.
function searchFor(wanted, side) {
  const text = wanted.toLowerCase();
  const contains = (words) => words.includes(text);
  if (search.text !== text) {
    const found = NAMES.map((name, item) => contains(name) || (item in read.prompts && contains(read.prompts[item])));
    Object.assign(search, { text, items: found, answers: read.answers.map(contains) });
  }
  const sides = side === null ? SEARCHED_SIDES.both : SEARCHED_SIDES[side] ?? [];
  return (n) => (side === null && search.items[flips.item[n]]) || sides.some((place) => search.answers[flips.answers[n][place]]);
}

function addToSearch(table) {
  const lowerCase = (turns) => turns.map(([, text]) => text).join("\n").toLowerCase();
  const contains = (words) => search.text !== null && words.includes(search.text);
  for (const [item, { prompt, answers }] of Object.entries(table)) {
    read.prompts[item] = lowerCase(prompt);
    search.items[item] ||= contains(read.prompts[item]);
    for (const [answer, { turns }] of Object.entries(answers)) {
      read.answers[answer] = lowerCase(turns);
      search.answers[answer] = contains(read.answers[answer]);
    }
  }
}

// Reads the files of texts that are not read yet; calls "update" every REDRAW milliseconds and at the end.
function readFiles(update) {
  let updated = performance.now();
  const next = () => {
    if (read.begun === FILES) return;
    const file = read.begun;
    read.begun += 1;
    const done = () => {
      if (TEXTS[file]) addToSearch(TEXTS[file]);
      if (shownFile !== file) delete TEXTS[file]; // the texts in "read" take less memory
      read.files += 1;
      if (read.files === FILES || performance.now() - updated > REDRAW) {
        update();
        updated = performance.now();
      }
      next();
    };
    load([[TEXTS, file]], done, done);
  };
  while (read.begun < FILES && read.begun - read.files < PARALLEL_READS) next();
}

// ---- the form above the list
function drawFilters() {
  for (const [name, { label, linkOnly, says = same }] of Object.entries(FILTERS)) {
    const values = linkOnly ? [] : valuesOf(name);
    if (values.length < 2) continue;
    const options = values.map((word) => element("option", { value: word }, says(word)));
    find("fields").append(element("label", {}, label, element("select", { name }, element("option", { value: "" }, "all"), ...options)));
  }
  find("fields").append(element("button", { type: "reset" }, "Clear"));
  const narrow = matchMedia("(max-width: 48rem)");
  const foldOnNarrow = () => { find("more").open = !narrow.matches; };
  narrow.addEventListener("change", foldOnNarrow);
  foldOnNarrow();
  const form = find("filters");
  const addressOfForm = () => {
    const state = new URLSearchParams([...new FormData(form)].filter(([, value]) => value !== ""));
    for (const name of ["item", "template"]) if (address().has(name)) state.set(name, address().get(name));
    return `#${state}`;
  };
  form.addEventListener("input", ({ target }) => go(addressOfForm(), target.name === "text"));
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
  for (const n of found) for (const change of flips.changes[n]) totals[change[0]][direction(change)] += 1;
  return totals.flatMap((total, metric) => {
    if (total.lost + total.gained === 0) return [];
    const { name, says } = metrics[metric];
    const words = `${name}: ${number(total.lost)} lost, ${number(total.gained)} gained`;
    return [element("li", {}, element("a", { href: link(state, { what: name }), title: says }, words))];
  });
}

// ---- the rows
const list = {
  found: [], // numbers of the flips that "query" finds
  query: null, // the filters as text
  state: null, // the filters as URLSearchParams
  files: 0, // files that were read when "found" was computed
  laidOut: null, // the value of "found" for which the rows were laid out
  active: null, // number of the flip that the keys act on
  height: 1, // pixels of a row
  drawn: new Map(), // index in "found" -> row
  scrolled: 0, // scroll position when a flip was opened
};

// Returns the flips of an address. They are computed once, and during a search again after more files were read.
function findFlips(state) {
  const filters = new URLSearchParams(state);
  filters.delete("flip");
  const query = String(filters);
  const isSame = list.query === query;
  if (isSame && (!filters.has("text") || list.files === read.files)) return list.found;
  let found = filterFlips(filters);
  // more files can only add flips, so an equal number means an equal list, whose rows can stay
  if (isSame && found.length === list.found.length) found = list.found;
  Object.assign(list, { found, query, files: read.files, state: filters });
  return found;
}

// Returns a metric's value as text: yes or no for a facet, else a number. Stored values count the wanted outcome.
function valueText(metric, value) {
  const rate = metrics[metric].wanted ? value : 1 - value;
  if (metric > 0 && (rate === 0 || rate === 1)) return rate === 1 ? "yes" : "no";
  return String(Math.round(rate * 1000) / 1000);
}
function changeMark(change) {
  const [metric, reference, candidate] = change;
  const words = `${direction(change)}: ${metrics[metric].name} ${valueText(metric, reference)} → ${valueText(metric, candidate)}`;
  return element("span", { class: `change ${direction(change)}`, title: metrics[metric].says }, words);
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
  const tr = element("tr", { role: "row", "aria-rowindex": place + 2 }, ...cells.map((cell) => element("td", { role: "cell" }, ...cell)));
  open.addEventListener("focus", () => activate(n));
  tr.style.top = `${place * list.height}px`;
  return tr;
}

const listedCount = () => Math.min(list.found.length, Math.floor(MAX_HEIGHT / list.height));

// Draws the visible rows and removes the others; rows that stay keep the focus.
function drawRows() {
  const body = find("rows");
  const above = -body.getBoundingClientRect().top; // pixels scrolled out of view
  const first = Math.max(0, Math.floor(above / list.height) - SPARE_ROWS);
  const end = Math.min(listedCount(), Math.ceil((above + innerHeight) / list.height) + SPARE_ROWS);
  for (const [place, tr] of list.drawn) {
    if (place >= first && place < end) continue;
    tr.remove();
    list.drawn.delete(place);
  }
  for (let place = first; place < end; place += 1) {
    if (list.drawn.has(place)) continue;
    const tr = row(place);
    list.drawn.set(place, tr);
    body.insertBefore(tr, list.drawn.get(place + 1) ?? null); // in order, for screen readers
  }
  activate(list.active);
}

// Makes flip n the one that keys act on. If its row is not drawn, Tab reaches the first visible row.
function activate(n) {
  list.active = n;
  const places = [...list.drawn.keys()];
  const active = places.find((place) => list.found[place] === n);
  const tabStop = active ?? Math.min(...places.filter((place) => list.drawn.get(place).getBoundingClientRect().bottom > 0));
  for (const [place, tr] of list.drawn) {
    tr.classList.toggle("here", place === active);
    tr.querySelector("a").tabIndex = place === tabStop ? 0 : -1;
  }
}

// Draws all rows anew at the height that width and font size give them; the focus stays on its row.
function layOutRows() {
  const body = find("rows");
  const focused = body.contains(document.activeElement) ? list.found.indexOf(list.active) : -1;
  body.replaceChildren();
  list.drawn.clear();
  if (list.found.length > 0) {
    const probe = body.appendChild(row(0));
    list.height = probe.offsetHeight;
    probe.remove();
  }
  body.style.height = `${listedCount() * list.height}px`;
  list.laidOut = list.found;
  drawRows();
  if (focused >= 0) focusRow(focused);
}

function drawList(state) {
  const found = findFlips(state);
  const reading = state.has("text") && read.files < FILES;
  find("none").hidden = found.length > 0 || reading;
  find("reading").hidden = !reading;
  find("reading").textContent = `Prompts and answers are being searched: ${number(read.files)} of ${number(FILES)} files.`;
  fillForm(state);
  if (list.laidOut !== found) {
    find("sums").replaceChildren(...sums(found, state));
    find("flips").setAttribute("aria-rowcount", found.length + 1);
    find("flips").hidden = found.length === 0;
    layOutRows();
    const more = listedCount() < found.length ? `; the first ${number(listedCount())} are listed` : "";
    find("count").textContent = `${number(found.length)} of ${number(COUNT)} flips${more}`;
  }
  if (reading) readFiles(draw);
}

// Scrolls until a row is visible between the table's head and the lower edge of the window.
function scrollToRow(place) {
  const top = find("rows").getBoundingClientRect().top + place * list.height;
  const head = document.querySelector("#flips thead").offsetHeight;
  if (top < head) scrollBy(0, top - head);
  else if (top + list.height > innerHeight) scrollBy(0, top + list.height - innerHeight);
  drawRows();
}

function focusRow(place) {
  if (place < 0 || place >= listedCount()) return;
  scrollToRow(place);
  list.drawn.get(place).querySelector("a").focus({ preventScroll: true });
}

// Moves the focus by a number of rows; without an active row, to the first visible one.
function moveFocus(by) {
  const place = list.found.indexOf(list.active);
  const visible = [...list.drawn].filter(([, tr]) => tr.getBoundingClientRect().top >= 0).map(([at]) => at);
  focusRow(place >= 0 ? place + by : visible.length > 0 ? Math.min(...visible) : 0);
}
