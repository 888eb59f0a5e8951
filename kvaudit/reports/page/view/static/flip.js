// One flip: both answers side by side, what differs in them, and what the cache held before each.
"use strict";

// ---- files of texts and shades
// reads data files one after the other, once each; where one is missing that is said, and "otherwise" follows
function load(files, then, otherwise = () => {}) {
  const next = files.find(([known, file]) => known[file] === undefined);
  if (next === undefined) return then();
  const path = `data/${next[0] === TEXTS ? "texts" : "shades"}-${next[1]}.js`;
  const script = element("script", { src: path });
  script.addEventListener("load", () => { script.remove(); load(files, then, otherwise); });
  script.addEventListener("error", () => {
    find("trouble").textContent = `${path} is missing or cannot be read: write the view again.`;
    find("trouble").hidden = false;
    otherwise();
  });
  return document.head.append(script);
}

// ---- what differs in two answers
// words with the signs of scripts that put no space between words taken one by one; spaces are no words
const WORD = /[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Thai}]|[\p{L}\p{M}\p{N}_]+|\S/gu;
const MOST_STEPS = 4_000_000; // of comparing; two answers that need more are marked whole between what both begin and end with

// which words of each side are not in the longest sequence that both have
function differences(left, right) {
  const [one, other] = [left, right].map((text) => [...text.matchAll(WORD)].map(([word]) => word));
  let start = 0;
  while (start < one.length && start < other.length && one[start] === other[start]) start += 1;
  let [end, last] = [one.length, other.length];
  while (end > start && last > start && one[end - 1] === other[last - 1]) { end -= 1; last -= 1; }
  const marks = [one.map((_, n) => n >= start && n < end), other.map((_, n) => n >= start && n < last)];
  const [height, width] = [end - start, last - start];
  if (height * width > MOST_STEPS) return marks;
  const most = Array.from({ length: height + 1 }, () => new Uint16Array(width + 1)); // common words from here on
  for (let i = height - 1; i >= 0; i -= 1) {
    for (let j = width - 1; j >= 0; j -= 1) {
      most[i][j] = one[start + i] === other[start + j] ? most[i + 1][j + 1] + 1 : Math.max(most[i + 1][j], most[i][j + 1]);
    }
  }
  for (let i = 0, j = 0; i < height && j < width;) {
    if (one[start + i] === other[start + j]) marks[0][start + i++] = marks[1][start + j++] = false;
    else if (most[i + 1][j] >= most[i][j + 1]) i += 1;
    else j += 1;
  }
  return marks;
}

// a text with its marked words, neighbours in one piece
function markedText(text, marks) {
  const words = [...text.matchAll(WORD)];
  const made = [];
  let done = 0;
  for (let n = 0, end; n < words.length; n = end) {
    for (end = n + 1; end < words.length && marks[end] === marks[n];) end += 1;
    const [from, to] = [words[n].index, words[end - 1].index + words[end - 1][0].length];
    if (marks[n]) {
      made.push(text.slice(done, from), element("mark", {}, text.slice(from, to)));
      done = to;
    }
  }
  return [...made, text.slice(done)];
}

// the turns of both answers; what one model said is held against what the other said in the same turn
function answerTurns(sides) {
  const shown = sides.map(() => []);
  for (let n = 0; n < Math.max(...sides.map((side) => side.length)); n += 1) {
    const [left, right] = sides.map((side) => side[n]);
    const marks = differences(left?.[1] ?? "", right?.[1] ?? "");
    for (const [side, turn] of [left, right].entries()) {
      if (!turn) continue;
      const [role, text] = turn;
      shown[side].push(element("div", { class: `turn ${role === "assistant" ? "answer" : ""}` }, element("b", {}, role),
        element("pre", { dir: "auto" }, ...markedText(text, marks[side]))));
    }
  }
  return shown;
}

const MOST_LIT = 1_000; // places: a letter stands everywhere

// what was searched for is lit in the texts of the flip, across the pieces that they are drawn in
function light(text) {
  if (!CSS.highlights) return; // what an older browser shows is the same text, unlit
  CSS.highlights.delete("found");
  if (!text) return;
  const wanted = new RegExp(text.replace(/[\^$\\.*+?()[\]{}|/]/g, "\\$&"), "giu");
  const ranges = [...find("flip").querySelectorAll("pre, h2")].flatMap((block) => placesOf(wanted, block));
  CSS.highlights.set("found", new Highlight(...ranges.slice(0, MOST_LIT)));
}

// where a block says something, in order, so that its pieces are walked through once
function placesOf(wanted, block) {
  const walker = document.createTreeWalker(block, NodeFilter.SHOW_TEXT);
  let [node, before] = [walker.nextNode(), 0];
  const reach = (place) => {
    while (place - before > node.length) {
      before += node.length;
      node = walker.nextNode();
    }
    return [node, place - before];
  };
  return [...block.textContent.matchAll(wanted)].slice(0, MOST_LIT).map((hit) => {
    const [startContainer, startOffset] = reach(hit.index);
    const [endContainer, endOffset] = reach(hit.index + hit[0].length);
    return new StaticRange({ startContainer, startOffset, endContainer, endOffset });
  });
}

// ---- prompts, and what is on record
function turns(list) {
  return list.map(([role, text]) =>
    element("div", { class: "turn" }, element("b", {}, role), element("pre", { dir: "auto" }, text)));
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
    ["ended by", "and the message instead of an answer", (a) => (a.unanswered ? `${a.finish}: ${a.unanswered}` : a.finish)],
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
    return element("tr", differs ? { class: "differs" } : {}, head, element("td", { dir: "auto" }, left), element("td", { dir: "auto" }, right));
  });
  const heads = ["fact", "reference", "candidate"].map((head) => element("th", { scope: "col" }, head));
  return element("table", { class: "facts" }, element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...body));
}

// ---- what the cache held of the tokens before an answer (reports/page/view/data.py)
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
  if (answer.retention === null) return [line("The engine that served this answer does not show its cache."), ...plain];
  if (!answer.evicted) {
    const smaller = answer.bytes[1] !== null && answer.bytes[1] < answer.bytes[2] ? `, in ${percent(answer.bytes[1] / answer.bytes[2])} of the bytes` : "";
    const seen = everything === null ? plain : [box(`What the cache still held, ${side}`, shadedTurns(everything))];
    return [line(`When this answer began the cache still held every token before it${smaller}.`), ...seen];
  }
  const lost = `When this answer began the cache held ${percent(answer.retention)} of the tokens before it`;
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

let shownFile = null; // of texts: kept while a flip of it is looked at

function around(n, state) {
  const found = foundBy(state);
  const place = found.indexOf(n);
  const to = (words, other) => other === undefined ? null : element("a", { href: link(state, { flip: flips.key[other] }) }, words);
  const back = element("a", { href: link(state, { flip: null }) }, "all flips of this list");
  return element("nav", { "aria-label": "Flips of this list" }, back, to("← previous flip", found[place - 1]),
    place < 0 ? null : `${number(place + 1)} of ${number(found.length)}`, place < 0 ? null : to("next flip →", found[place + 1]));
}

function drawFlip(n, state) {
  const item = flips.item[n];
  const file = items.file[item];
  const title = element("h2", { id: "item", tabindex: "-1", dir: "auto" }, items.name[item]);
  const name = (words) => element("bdi", {}, words);
  const all = (words, state) => element("a", { href: `#${new URLSearchParams(state)}` }, words);
  find("flip").replaceChildren(
    around(n, state),
    title,
    element("p", {}, name(arms[flips.arm[n]]), `, seed ${flips.seed[n]}, under `, name(policies[flips.policy[n]].short), `, compared with ${SIDES[kinds[flips.kind[n]]]}.`),
    element("p", { class: "soft" }, "suite ", name(items.suite[item]), `, ${items.length[item]} tokens, placement ${items.placement[item]}, template `, name(items.template[item]), ". All flips of ",
      all("this item", { item: items.name[item] }), " or of ", all("this template", { template: items.template[item] }), "."),
    element("ul", { class: "changes" }, ...flips.changes[n].map((change) =>
      element("li", {}, changeMark(change), element("span", { class: "soft" }, metrics[change[0]].says)))),
  );
  title.focus({ preventScroll: true });
  shownFile = file;
  const files = [[TEXTS, file], ...(items.shades[file] ? [[SHADES, file]] : [])];
  load(files, () => {
    if (address().get("flip") !== flips.key[n]) return; // another one was opened meanwhile
    drawAnswers(TEXTS[file][item], SHADES[file]?.[item], flips.answers[n], item);
    light(state.get("text"));
  });
}

function drawAnswers(texts, shades, numbers, item) {
  const answers = numbers.map((number) => texts.answers[number]);
  const seen = numbers.map((number) => shadeOf(shades, number));
  const shaded = seen.some(Boolean);
  const prompt = shaded ? turns(texts.prompt) : null;
  const said = answerTurns(answers.map((answer) => answer.turns));
  const alike = said.every((shown) => shown.every((turn) => turn.querySelector("mark") === null));
  const side = (words, n) => element("section", {},
    element("h3", {}, words), ...said[n],
    ...cacheOf(answers[n], seen[n], words.toLowerCase(), prompt?.map((turn) => turn.cloneNode(true)), whole(seen[1 - n])),
    again(answers[n], item));
  find("flip").append(
    element("p", { class: "legend" }, ...(alike ? ["Both answers are identical."]
      : [element("mark", {}, "Marked"), " is what the other answer does not say."])),
    ...(shaded ? [legend()] : []),
    element("div", { class: "sides" }, side("Reference", 0), side("Candidate", 1)),
    ...(shaded ? [] : [element("h3", {}, "Prompt"), box("Prompt", turns(texts.prompt))]),
    element("h3", {}, "What is on record"),
    element("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "What is on record" }, factTable(answers)),
  );
}

function again(answer, item) {
  if (!run.served) return "";
  return element("div", { class: "command" }, "Serve it again, and see what the cache held:", element("pre", {}, command(answer, item)));
}

const box = (name, children) =>
  element("div", { class: "prompt", tabindex: "0", role: "region", "aria-label": name }, ...children);
