// The one script of the page. Every text of a run goes through textContent: none is ever read as markup.
"use strict";

const TEXTS = []; // filled by data/texts-<n>.js
const SHADES = []; // filled by data/shades-<n>.js
const PAGE = 50; // rows of the list shown at once
const { run, arms, kinds, policies, metrics, items, flips } = VIEW;
const COUNT = flips.key.length;
const SIDES = {
  alike: "the reference, served alike",
  deployed: "the reference, uncompressed",
  serving: "itself, uncompressed",
};
const byKey = new Map(flips.key.map((key, n) => [key, n]));
const find = (id) => document.getElementById(id);
const number = (count) => count.toLocaleString("en");

// element("p", {class: "soft"}, "text", child, ...)
function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children.filter((child) => child !== null));
  return made;
}

// ---- filters: name -> label, and the value of a flip; "what" and "direction" go by its changes, "text" by its names
const FILTERS = {
  suite: ["suite", (n) => items.suite[flips.item[n]]],
  what: ["what changed", null],
  direction: ["lost or gained", null],
  arm: ["arm", (n) => arms[flips.arm[n]]],
  policy: ["policy", (n) => policies[flips.policy[n]].short],
  kind: ["compared with", (n) => kinds[flips.kind[n]]],
  length: ["length", (n) => String(items.length[flips.item[n]])],
  placement: ["placement", (n) => items.placement[flips.item[n]]],
  seed: ["seed", (n) => String(flips.seed[n])],
  cache: ["lost by the cache", (n) => VIEW.lost[flips.lost[n]]],
};
const VALUES = {}; // name -> the values in use
const CODES = {}; // name -> of every flip the number of its value

function indexFilters() {
  for (const [name, [, value]] of Object.entries(FILTERS)) {
    if (value === null) continue;
    const numbers = new Map();
    CODES[name] = Int32Array.from({ length: COUNT }, (_, n) => {
      const word = value(n);
      if (!numbers.has(word)) numbers.set(word, numbers.size);
      return numbers.get(word);
    });
    VALUES[name] = [...numbers.keys()];
  }
  const seen = new Set(flips.changes.flatMap((changes) => changes.map(([metric]) => metric)));
  VALUES.what = metrics.map((metric) => metric.name).filter((_, number) => seen.has(number));
  VALUES.direction = ["lost", "gained"];
}
const NAMES = items.name.map((name, item) => `${name}\n${items.template[item]}`.toLowerCase());

const way = ([, reference, candidate]) => (candidate < reference ? "lost" : "gained");

function chosen(state) {
  const equal = [];
  for (const name of Object.keys(CODES)) {
    if (state.has(name)) equal.push([CODES[name], VALUES[name].indexOf(state.get(name))]);
  }
  const metric = state.has("what") ? metrics.findIndex(({ name }) => name === state.get("what")) : null;
  const direction = state.get("direction");
  const text = (state.get("text") ?? "").toLowerCase();
  const named = text ? NAMES.map((name) => name.includes(text)) : null;
  const found = [];
  flips: for (let n = 0; n < COUNT; n += 1) {
    for (const [codes, code] of equal) if (codes[n] !== code) continue flips;
    if (named && !named[flips.item[n]]) continue;
    if (metric !== null || direction) {
      const fits = (change) => (metric === null || change[0] === metric) && (!direction || way(change) === direction);
      if (!flips.changes[n].some(fits)) continue;
    }
    found.push(n);
  }
  return found;
}

// ---- what stands in the address: #suite=refusal&what=unsafe&page=2, or with flip=KEY one flip of that list
const address = () => new URLSearchParams(location.hash.slice(1));
function link(state, changes) {
  const next = new URLSearchParams(state);
  for (const [name, value] of Object.entries(changes)) value === null ? next.delete(name) : next.set(name, value);
  return `#${next}`;
}

function drawFilters() {
  const form = find("filters");
  for (const [name, [label]] of Object.entries(FILTERS)) {
    if (VALUES[name].length < 2) continue;
    const words = name === "kind" ? (word) => SIDES[word] : (word) => word;
    const options = VALUES[name].map((word) => element("option", { value: word }, words(word)));
    form.append(element("label", {}, label, element("select", { name }, element("option", { value: "" }, "all"), ...options)));
  }
  form.append(element("label", {}, "item or template contains", element("input", { name: "text", type: "search" })));
  form.append(element("button", { type: "reset" }, "Clear"));
  const go = () => {
    const given = [...new FormData(form)].filter(([, value]) => value !== "");
    location.hash = new URLSearchParams(given).toString();
  };
  form.addEventListener("input", go);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(go));
}

// ---- the list
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

function row(n, state) {
  const item = flips.item[n];
  const open = element("a", { href: link(state, { flip: flips.key[n] }) }, items.name[item]);
  const cells = [
    [open, element("div", { class: "soft" }, items.template[item])],
    flips.changes[n].map(changeMark),
    [`${arms[flips.arm[n]]}, seed ${flips.seed[n]}`],
    [policies[flips.policy[n]].short],
    [SIDES[kinds[flips.kind[n]]]],
    [`${items.suite[item]}, ${items.length[item]} tokens, ${items.placement[item]}`],
  ];
  return element("tr", {}, ...cells.map((cell) => element("td", {}, ...cell)));
}

function sums(found) {
  const totals = metrics.map(() => ({ lost: 0, gained: 0 }));
  for (const n of found) for (const change of flips.changes[n]) totals[change[0]][way(change)] += 1;
  const some = totals.map((total, metric) => [total, metrics[metric]]).filter(([total]) => total.lost + total.gained > 0);
  return some.map(([{ lost, gained }, { name, says }]) =>
    element("span", { title: says }, `${name}: ${number(lost)} lost, ${number(gained)} gained`));
}

function drawList(state) {
  const found = chosen(state);
  const last = Math.max(0, Math.ceil(found.length / PAGE) - 1);
  const page = Math.min(Math.max(0, Number.parseInt(state.get("page") ?? "1", 10) - 1 || 0), last);
  for (const field of find("filters").elements) {
    if (field.name && field !== document.activeElement) field.value = state.get(field.name) ?? "";
  }
  find("count").textContent = `${number(found.length)} of ${number(COUNT)} flips`;
  find("sums").replaceChildren(...sums(found));
  find("rows").replaceChildren(...found.slice(page * PAGE, (page + 1) * PAGE).map((n) => row(n, state)));
  const step = (words, to) => to < 0 || to > last ? null : element("a", { href: link(state, { page: to + 1 }) }, words);
  const place = last > 0 ? `page ${page + 1} of ${last + 1}` : "";
  find("pages").replaceChildren(...[step("← previous page", page - 1), place, step("next page →", page + 1)].filter(Boolean));
}

// ---- one flip
// reads data files one after the other, once each
function load(files, then) {
  const next = files.find(([known, file]) => known[file] === undefined);
  if (next === undefined) return then();
  const path = `data/${next[0] === TEXTS ? "texts" : "shades"}-${next[1]}.js`;
  const script = element("script", { src: path });
  script.addEventListener("load", () => load(files, then));
  script.addEventListener("error", () => {
    find("flip").append(element("p", { class: "alarm", role: "alert" }, `${path} is missing or cannot be read.`));
  });
  return document.head.append(script);
}

function turns(list, kind) {
  return list.map(([role, text]) =>
    element("div", { class: `turn ${role === "assistant" ? kind : ""}` }, element("b", {}, role), element("pre", { dir: "auto" }, text)));
}

const percent = (value) => `${(100 * value).toFixed(1)} %`;
const yesNo = (value) => (value === undefined ? "not asked" : value === null ? "could not be read" : value ? "yes" : "no");

const quoted = (word) => (/^[\w/:=.,@%+-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`);
function command(answer, item) {
  const words = ["kvaudit", "explain", run.path, items.name[item], "--policy", answer.policy, "--arm", answer.arm,
    "--seed", answer.seed, "--length", items.length[item], "--sample", answer.draw];
  return words.map((word) => quoted(String(word))).join(" ");
}

// rows of the table of facts: name, title, and what an answer says
function facts(answers) {
  const roles = [...new Set(answers.flatMap((answer) => Object.keys(answer.survival)))].sort();
  const asked = metrics.slice(1).filter(({ name }) => answers.some((answer) => name in answer.facets));
  return [
    ["arm and seed", "", (a) => `${a.arm}, seed ${a.seed}`],
    ["checkpoint", "sha256 of the weights", (a) => a.checkpoint.slice(0, 12)],
    ["served under", "", (a) => a.policy],
    ["outcome", "", (a) => a.outcome],
    ["score", "", (a) => (a.score === null ? "unscored" : String(a.score))],
    ...asked.map(({ name, says }) => [name, says, (a) => yesNo(a.facets[name])]),
    ["judge", "who graded it", (a) => a.judge],
    ["draw", "of several answers to one prompt", (a) => String(a.draw)],
    ["ended by", "and what was said instead of an answer", (a) => (a.unanswered ? `${a.finish}: ${a.unanswered}` : a.finish)],
    ["tokens", "", (a) => `${a.tokens[0]} prompt, ${a.tokens[1]} new`],
    ["KV bytes at the peak", "of its entries, against what they take uncompressed; and what was allocated", (a) => bytesOf(a.bytes)],
    ["cache kept", "share of entries still held when the last answer began", (a) => kept(a.retention)],
    ...roles.map((role) => [`kept of ${role}`, `share of the ${role} tokens still held then`, (a) => kept(a.survival[role])]),
  ];
}

function bytesOf([allocated, live, dense]) {
  if (allocated === null) return "not shown by the engine";
  const known = live === null ? "live bytes not recorded" : `${number(live)} live (${percent(live / dense)} of dense)`;
  return `${known}, ${number(allocated)} allocated`;
}

function kept(value) {
  if (value === null) return "not shown by the engine";
  if (value === undefined) return "no such token";
  const meter = element("meter", { min: 0, max: 1, value, "aria-hidden": "true" });
  return element("span", {}, meter, percent(value));
}

function factTable(answers) {
  const words = (cell) => (typeof cell === "string" ? cell : cell.textContent);
  const body = facts(answers).map(([name, title, tell]) => {
    const [left, right] = answers.map(tell);
    const differs = words(left) !== words(right);
    const head = element("th", { scope: "row", title }, name, differs ? element("span", { class: "hidden" }, " (differs)") : "");
    return element("tr", differs ? { class: "differs" } : {}, head, element("td", {}, left), element("td", {}, right));
  });
  const heads = ["", "reference", "candidate"].map((head) => element("th", { scope: "col" }, head));
  return element("table", { class: "facts" }, element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...body));
}

// ---- what the cache held of the tokens before an answer (reports/page/view/shades.py)
const LEVELS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
const FEW = 0.5; // below this share a token is underlined too
const ROLES = { s: "system", u: "user", a: "assistant", t: "tool", f: "format" };

function letters(text) {
  return [...text.matchAll(/([A-Za-z])(\d*)/g)].flatMap(([, letter, times]) => Array(Number(times || 1)).fill(letter));
}

// undefined: not served again; null: another answer came out
function shadeOf(shades, number) {
  const own = shades?.answers[number];
  if (!own) return own;
  const pieces = [...shades.pieces.slice(0, own.same), ...own.pieces];
  const roles = [...letters(shades.roles).slice(0, own.same), ...letters(own.roles)];
  const levels = letters(own.held).map((letter) => LEVELS.indexOf(letter) / (LEVELS.length - 1));
  const tokens = pieces.map((text, n) => ({ text, role: ROLES[roles[n]], level: levels[n], marks: [] }));
  for (const [name, stretches] of Object.entries(own.marks)) {
    for (const [start, end] of stretches) {
      for (const token of tokens.slice(start, end)) token.marks.push(name);
    }
  }
  return { ...own, tokens };
}

function heldWords(level, heads) {
  if (level === 0) return "gone: held by no layer and head";
  if (level === 1) return "held by every layer and head";
  return heads < LEVELS.length
    ? `held by ${Math.round(level * heads)} of ${heads} (layers × heads)`
    : `held by about ${Math.round(100 * level)} % of ${heads} (layers × heads)`;
}

const ALL = "all tokens"; // beside the names of marked spans
const hidden = (words) => element("span", { class: "hidden" }, words);

// one element for neighbours that are held alike: a prompt of 32,000 tokens is drawn at once
function stretch(tokens, heads, before) {
  const [{ level, marks, role }] = tokens;
  const text = tokens.map((token) => token.text).join("");
  const title = `${tokens.length === 1 ? "1 token" : `${tokens.length} tokens`} ${heldWords(level, heads)}`;
  const kinds = [role === "format" ? "format" : "", marks.length ? "marked" : ""].join(" ");
  const begun = marks.filter((name) => !before.includes(name));
  const tags = begun.map((name) => element("b", { class: "tag" }, name));
  const made = level === 0
    ? element("s", { class: `gone ${kinds}`, title }, hidden("[gone: "), text, hidden("]"))
    : element("span", { class: `held ${level < FEW ? "few" : ""} ${kinds}`, title }, text);
  made.style.setProperty("--level", level);
  return [...tags, made];
}

function stretches(tokens, heads) {
  const alike = (one, other) =>
    one.level === other.level && one.role === other.role && one.marks.join() === other.marks.join();
  const made = [];
  let before = [];
  for (let start = 0, end; start < tokens.length; start = end) {
    for (end = start + 1; end < tokens.length && alike(tokens[start], tokens[end]);) end += 1;
    made.push(...stretch(tokens.slice(start, end), heads, before));
    before = tokens[end - 1].marks;
  }
  return made;
}

// a turn begins with what the template puts before it
function shadedTurns({ tokens, heads }) {
  const blocks = [];
  let own = null;
  for (let n = 0; n < tokens.length; n += 1) {
    if (own === null || (tokens[n].role !== own.role && own.role !== null)) blocks.push((own = { role: null, tokens: [] }));
    if (tokens[n].role !== "format") own.role = tokens[n].role;
    own.tokens.push(tokens[n]);
  }
  return blocks.map(({ role, tokens: held }) =>
    element("div", { class: "turn" }, element("b", {}, role ?? "here the answer begins"),
      element("pre", { dir: "auto", class: "shaded" }, ...stretches(held, heads))));
}

const TALL = 26; // pixels of the bars
// a bar for every layer
function strip(name, depth) {
  const made = (tag, attributes, ...children) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  };
  const wide = Math.min(16, 480 / depth.length);
  const words = depth.map((share, layer) => `layer ${layer}: ${percent(share)}`);
  const bars = depth.flatMap((share, layer) => [
    made("rect", { class: "track", x: layer * wide, y: 0, width: 0.85 * wide, height: TALL }),
    made("rect", { class: "bar", x: layer * wide, y: TALL * (1 - share), width: 0.85 * wide, height: TALL * share },
      made("title", {}, words[layer])),
  ]);
  const [width, height] = [wide * depth.length, TALL];
  const picture = made("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img",
    "aria-label": `${name}, share that each layer still held. ${words.join(", ")}` }, ...bars);
  const [low, high] = [Math.min(...depth), Math.max(...depth)].map((share) => Math.round(100 * share));
  return element("figure", { class: "strip" },
    element("figcaption", {}, tagged(name), ` ${low === high ? low : `${low} to ${high}`} %`), picture);
}

const tagged = (name) => (name === ALL ? name : element("b", { class: "tag" }, name));

// the prompt as a side that lost nothing saw it: the tokens of the other side, before any answer
function whole(other) {
  if (!other) return null;
  const end = other.tokens.findIndex(({ role }) => role === "assistant");
  const tokens = other.tokens.slice(0, end < 0 ? undefined : end).map((token) => ({ ...token, level: 1 }));
  return { tokens, heads: other.heads };
}

// what stands under an answer: how much its cache had lost, and its prompt with every token shaded
function cacheOf(answer, shade, side, prompt, everything) {
  const line = (words) => element("p", { class: "cache" }, words);
  const plain = prompt === undefined ? [] : [box(`Prompt, ${side}`, prompt)];
  if (answer.retention === null) return [line("The engine that served this answer shows nobody its cache."), ...plain];
  if (!answer.evicted) {
    const smaller = answer.bytes[1] !== null && answer.bytes[1] < answer.bytes[2] ? `, in ${percent(answer.bytes[1] / answer.bytes[2])} of the bytes` : "";
    const seen = everything === null ? plain : [box(`What the cache still held, ${side}`, shadedTurns(everything))];
    return [line(`When this answer began the cache still held every token before it${smaller}.`), ...seen];
  }
  const lost = `When this answer began the cache held ${percent(answer.retention)} of what stands before it`;
  if (shade === undefined) return [line(`${lost}. Which tokens is not known: it was not served again yet.`), ...plain];
  if (shade === null) {
    return [line(`${lost}. Which tokens is not known: served again here, another answer came out.`), ...plain];
  }
  const count = (level) => shade.tokens.filter((token) => token.level === level).length;
  const [none, all] = [count(0), count(1)];
  return [
    line(`${lost}: of ${shade.tokens.length} tokens ${none} are gone, ${all} are held by every layer and head, ${shade.tokens.length - none - all} by some.`),
    element("div", { class: "strips" }, element("p", { class: "soft" }, "Held, layer by layer:"), ...Object.entries(shade.depth).map(([name, depth]) => strip(name, depth))),
    box(`What the cache still held, ${side}`, shadedTurns(shade)),
  ];
}

function legend() {
  const sample = (level, words) => {
    const made = level === 0 ? element("s", { class: "gone" }, words) : element("span", { class: level < FEW ? "held few" : "held" }, words);
    made.style.setProperty("--level", level);
    return made;
  };
  return element("p", { class: "legend" }, "Every token by the share of layers and heads that still held it when the answer began: ",
    sample(1, " every one "), " ", sample(0.5, " half of them "), " ", sample(0.125, " fewer "), " ", sample(0, " none: gone "),
    ". What was held was not necessarily used.");
}

function around(n, state) {
  const found = chosen(state);
  const place = found.indexOf(n);
  const to = (words, other) => other === undefined ? null : element("a", { href: link(state, { flip: flips.key[other] }) }, words);
  const back = element("a", { href: link(state, { flip: null }) }, "all flips of this list");
  return element("nav", { "aria-label": "Flips of this list" }, back, to("← previous flip", found[place - 1]),
    place < 0 ? null : `${place + 1} of ${found.length}`, place < 0 ? null : to("next flip →", found[place + 1]));
}

function drawFlip(n, state) {
  const item = flips.item[n];
  const file = items.file[item];
  const title = element("h2", { id: "item", tabindex: "-1" }, items.name[item]);
  const same = (words, text) => element("a", { href: `#${new URLSearchParams({ text })}` }, words);
  find("flip").replaceChildren(
    around(n, state),
    title,
    element("p", {}, `${arms[flips.arm[n]]}, seed ${flips.seed[n]}, under ${policies[flips.policy[n]].short}, compared with ${SIDES[kinds[flips.kind[n]]]}.`),
    element("p", { class: "soft" }, `suite ${items.suite[item]}, ${items.length[item]} tokens, placement ${items.placement[item]}, template ${items.template[item]}. All flips of `,
      same("this item", items.name[item]), " or of ", same("this template", items.template[item]), "."),
    element("ul", { class: "changes" }, ...flips.changes[n].map((change) =>
      element("li", {}, changeMark(change), element("span", { class: "soft" }, metrics[change[0]].says)))),
  );
  title.focus();
  const files = [[TEXTS, file], ...(items.shades[file] ? [[SHADES, file]] : [])];
  load(files, () => {
    if (address().get("flip") !== flips.key[n]) return; // another one was opened meanwhile
    drawAnswers(TEXTS[file][item], SHADES[file]?.[item], flips.answers[n], item);
  });
}

function drawAnswers(texts, shades, numbers, item) {
  const answers = numbers.map((number) => texts.answers[number]);
  const seen = numbers.map((number) => shadeOf(shades, number));
  const shaded = seen.some(Boolean);
  const prompt = shaded ? turns(texts.prompt, "") : null;
  const side = (words, n) => element("section", {},
    element("h3", {}, words), ...turns(answers[n].turns, "answer"),
    ...cacheOf(answers[n], seen[n], words.toLowerCase(), prompt?.map((turn) => turn.cloneNode(true)), whole(seen[1 - n])),
    again(answers[n], item));
  find("flip").append(
    ...(shaded ? [legend()] : []),
    element("div", { class: "sides" }, side("Reference", 0), side("Candidate", 1)),
    ...(shaded ? [] : [element("h3", {}, "Prompt"), box("Prompt", turns(texts.prompt, ""))]),
    element("h3", {}, "What is on record"),
    element("div", { class: "wide" }, factTable(answers)),
  );
}

function again(answer, item) {
  if (!run.served) return "";
  return element("div", { class: "command" }, "Serve it again, and see what the cache held:", element("pre", {}, command(answer, item)));
}

const box = (name, children) =>
  element("div", { class: "prompt", tabindex: "0", role: "region", "aria-label": name }, ...children);

function draw() {
  const state = address();
  const n = byKey.get(state.get("flip"));
  const back = !find("flip").hidden;
  find("list").hidden = n !== undefined;
  find("flip").hidden = n === undefined;
  find("about").hidden = n !== undefined;
  if (n === undefined) {
    document.title = `Flips of ${run.name}`;
    drawList(state);
    if (back) find("main").focus();
  } else {
    state.delete("page");
    document.title = `${items.name[flips.item[n]]}: flip of ${run.name}`;
    drawFlip(n, state);
  }
}

find("title").textContent = `Flips of ${run.name}`;
find("about").textContent =
  `Items whose score or a facet differs between two sides that the report compares. The reference is ${run.reference}. ` +
  "A loss is the candidate's.";
indexFilters();
drawFilters();
window.addEventListener("hashchange", draw);
draw();
