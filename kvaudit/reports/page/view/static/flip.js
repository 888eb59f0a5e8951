// One flip: both answers side by side, their differences, and which tokens each one's cache held.
"use strict";

// ---- files of texts and shades
// Loads data files one after the other, each once, and then calls "done". "files" are pairs: TEXTS or SHADES, and a
// number. If a file is missing or damaged, the page says so and "failed" is called.
function load(files, done, failed = () => {}) {
  const next = files.find(([loaded, file]) => loaded[file] === undefined);
  if (next === undefined) return done();
  const [loaded, file] = next;
  const path = `data/${loaded === TEXTS ? "texts" : "shades"}-${file}.js`;
  const script = element("script", { src: path });
  const fail = () => {
    find("trouble").textContent = `${path} is missing or cannot be read: write the view again.`;
    find("trouble").hidden = false;
    failed();
  };
  script.addEventListener("load", () => {
    script.remove();
    if (loaded[file] === undefined) fail(); // a file that was cut off loads, but defines nothing
    else load(files, done, failed);
  });
  script.addEventListener("error", fail);
  return document.head.append(script);
}

// ---- differences between two answers
// a word, a character of a script that puts no spaces between words, or any other character that is no space
const WORD = /[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Thai}]|[\p{L}\p{M}\p{N}_]+|\S/gu;
const MAX_STEPS = 4_000_000; // of a comparison; longer answers are marked whole except for a common beginning and end

// Returns for each side which of its words are not in the longest common subsequence.
function differences(left, right) {
  const [one, other] = [left, right].map((text) => [...text.matchAll(WORD)].map(([word]) => word));
  let start = 0;
  while (start < one.length && start < other.length && one[start] === other[start]) start += 1;
  let [end, last] = [one.length, other.length];
  while (end > start && last > start && one[end - 1] === other[last - 1]) { end -= 1; last -= 1; }
  const marks = [one.map((_, n) => n >= start && n < end), other.map((_, n) => n >= start && n < last)];
  const [height, width] = [end - start, last - start];
  if (height * width > MAX_STEPS) return marks;
  const common = Array.from({ length: height + 1 }, () => new Uint16Array(width + 1)); // words from (i, j) to the end
  for (let i = height - 1; i >= 0; i -= 1) {
    for (let j = width - 1; j >= 0; j -= 1) {
      const isSame = one[start + i] === other[start + j];
      common[i][j] = isSame ? common[i + 1][j + 1] + 1 : Math.max(common[i + 1][j], common[i][j + 1]);
    }
  }
  for (let i = 0, j = 0; i < height && j < width;) {
    if (one[start + i] === other[start + j]) marks[0][start + i++] = marks[1][start + j++] = false;
    else if (common[i + 1][j] >= common[i][j + 1]) i += 1;
    else j += 1;
  }
  return marks;
}

// Returns a text in parts, with one <mark> for each run of marked words.
function markedText(text, marks) {
  const words = [...text.matchAll(WORD)];
  const parts = [];
  let done = 0;
  for (let n = 0, end; n < words.length; n = end) {
    for (end = n + 1; end < words.length && marks[end] === marks[n];) end += 1;
    const [from, to] = [words[n].index, words[end - 1].index + words[end - 1][0].length];
    if (marks[n]) {
      parts.push(text.slice(done, from), element("mark", {}, text.slice(from, to)));
      done = to;
    }
  }
  return [...parts, text.slice(done)];
}

// Draws the turns of both answers; each turn is compared with the other side's turn of the same number.
function answerTurns(sides) {
  const drawn = sides.map(() => []);
  for (let n = 0; n < Math.max(...sides.map((side) => side.length)); n += 1) {
    const [left, right] = sides.map((side) => side[n]);
    const marks = differences(left?.[1] ?? "", right?.[1] ?? "");
    for (const [side, turn] of [left, right].entries()) {
      if (!turn) continue;
      const [role, text] = turn;
      drawn[side].push(element("div", { class: `turn ${role === "assistant" ? "answer" : ""}` }, element("b", {}, role),
        element("pre", { dir: "auto" }, ...markedText(text, marks[side]))));
    }
  }
  return drawn;
}

const MAX_HIGHLIGHTS = 1_000; // a single letter has far more hits

// Highlights the searched text in the flip, also where it spans several elements.
function highlight(text) {
  if (!CSS.highlights) return; // an older browser shows the text without highlights
  CSS.highlights.delete("found");
  if (!text) return;
  const wanted = new RegExp(text.replace(/[\^$\\.*+?()[\]{}|/]/g, "\\$&"), "giu");
  const ranges = [...find("flip").querySelectorAll("pre, h2")].flatMap((block) => rangesOf(wanted, block));
  CSS.highlights.set("found", new Highlight(...ranges.slice(0, MAX_HIGHLIGHTS)));
}

// Returns the ranges of all hits in a block. They are in order, so its text nodes are walked through once.
function rangesOf(wanted, block) {
  const walker = document.createTreeWalker(block, NodeFilter.SHOW_TEXT);
  let [node, before] = [walker.nextNode(), 0];
  const nodeAt = (place) => {
    while (place - before > node.length) {
      before += node.length;
      node = walker.nextNode();
    }
    return [node, place - before];
  };
  return [...block.textContent.matchAll(wanted)].slice(0, MAX_HIGHLIGHTS).map((hit) => {
    const [startContainer, startOffset] = nodeAt(hit.index);
    const [endContainer, endOffset] = nodeAt(hit.index + hit[0].length);
    return new StaticRange({ startContainer, startOffset, endContainer, endOffset });
  });
}

// ---- prompts and records
function turns(list) {
  return list.map(([role, text]) =>
    element("div", { class: "turn" }, element("b", {}, role), element("pre", { dir: "auto" }, text)));
}

const percent = (value) => `${(100 * value).toFixed(1)} %`;
const yesNo = (value) => (value === undefined ? "not asked" : value === null ? "could not be read" : value ? "yes" : "no");

const shellQuoted = (word) => (/^[\w/:=.,@%+-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`);
function explainCommand(answer, item) {
  const words = ["kvaudit", "explain", run.path, items.name[item], "--policy", answer.policy, "--arm", answer.arm,
    "--seed", answer.seed, "--length", items.length[item], "--sample", answer.draw];
  return words.map((word) => shellQuoted(String(word))).join(" ");
}

// Returns the rows of the table of facts: name, title, and a function that returns the fact of an answer.
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
    ["cache kept", "share of entries still held when the last answer began", (a) => keptShare(a.retention)],
    ...roles.map((role) => [`kept of ${role}`, `share of the ${role} tokens still held then`, (a) => keptShare(a.survival[role])]),
  ];
}

function bytesOf([allocated, live, dense]) {
  if (allocated === null) return "not shown by the engine";
  const liveText = live === null ? "live bytes not recorded" : `${number(live)} live (${percent(live / dense)} of dense)`;
  return `${liveText}, ${number(allocated)} allocated`;
}

function keptShare(value) {
  if (value === null) return "not shown by the engine";
  if (value === undefined) return "no such token";
  const meter = element("meter", { min: 0, max: 1, value, "aria-hidden": "true" });
  return element("span", {}, meter, percent(value));
}

function factTable(answers) {
  const textOf = (cell) => (typeof cell === "string" ? cell : cell.textContent);
  const body = facts(answers).map(([name, title, factOf]) => {
    const [left, right] = answers.map(factOf);
    const differs = textOf(left) !== textOf(right);
    const head = element("th", { scope: "row", title }, name, differs ? element("span", { class: "hidden" }, " (differs)") : "");
    return element("tr", differs ? { class: "differs" } : {}, head, element("td", { dir: "auto" }, left), element("td", { dir: "auto" }, right));
  });
  const heads = ["fact", "reference", "candidate"].map((head) => element("th", { scope: "col" }, head));
  return element("table", { class: "facts" }, element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...body));
}

// ---- shades: the share of layers and heads that held each token before an answer; the format is that of
// reports/page/view/data.py
const LEVELS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
const FEW = 0.5; // a token with a smaller share is underlined too
const ROLES = { s: "system", u: "user", a: "assistant", t: "tool", f: "format" };

// Returns the letters of a text such as "A2b2c": AAbbc.
function letters(text) {
  return [...text.matchAll(/([A-Za-z])(\d*)/g)].flatMap(([, letter, times]) => Array(Number(times || 1)).fill(letter));
}

// Returns the shade of an answer with its tokens; undefined if it was not served again, null if it came out different.
function shadeOf(shades, number) {
  const stored = shades?.answers[number];
  if (!stored) return stored;
  const pieces = [...shades.pieces.slice(0, stored.same), ...stored.pieces];
  const roles = [...letters(shades.roles).slice(0, stored.same), ...letters(stored.roles)];
  const levels = letters(stored.held).map((letter) => LEVELS.indexOf(letter) / (LEVELS.length - 1));
  const tokens = pieces.map((text, n) => ({ text, role: ROLES[roles[n]], level: levels[n], marks: [] }));
  for (const [name, ranges] of Object.entries(stored.marks)) {
    for (const [start, end] of ranges) {
      for (const token of tokens.slice(start, end)) token.marks.push(name);
    }
  }
  return { ...stored, tokens };
}

function heldText(level, heads) {
  if (level === 0) return "gone: held by no layer and head";
  if (level === 1) return "held by every layer and head";
  return heads < LEVELS.length
    ? `held by ${Math.round(level * heads)} of ${heads} (layers × heads)`
    : `held by about ${Math.round(100 * level)} % of ${heads} (layers × heads)`;
}

const ALL = "all tokens"; // a key of "depth"; the others are names of marked spans
const hidden = (words) => element("span", { class: "hidden" }, words); // for screen readers only

// Draws tokens of one level, role and marks as one element; "before" are the marks of the token before them.
function tokenRun(tokens, heads, before) {
  const [{ level, marks, role }] = tokens;
  const text = tokens.map((token) => token.text).join("");
  const title = `${tokens.length === 1 ? "1 token" : `${tokens.length} tokens`} ${heldText(level, heads)}`;
  const kinds = [role === "format" ? "format" : "", marks.length ? "marked" : ""].join(" ");
  const newMarks = marks.filter((name) => !before.includes(name));
  const tags = newMarks.map((name) => element("b", { class: "tag" }, name));
  const node = level === 0
    ? element("s", { class: `gone ${kinds}`, title }, hidden("[gone: "), text, hidden("]"))
    : element("span", { class: `held ${level < FEW ? "few" : ""} ${kinds}`, title }, text);
  node.style.setProperty("--level", level);
  return [...tags, node];
}

// Draws tokens in runs, so that a prompt of 32,000 tokens appears at once.
function tokenRuns(tokens, heads) {
  const isAlike = (one, other) =>
    one.level === other.level && one.role === other.role && one.marks.join() === other.marks.join();
  const nodes = [];
  let before = [];
  for (let start = 0, end; start < tokens.length; start = end) {
    for (end = start + 1; end < tokens.length && isAlike(tokens[start], tokens[end]);) end += 1;
    nodes.push(...tokenRun(tokens.slice(start, end), heads, before));
    before = tokens[end - 1].marks;
  }
  return nodes;
}

// Draws tokens turn by turn; the tokens that the chat template puts before a turn belong to it.
function shadedTurns({ tokens, heads }) {
  const blocks = [];
  let block = null;
  for (const token of tokens) {
    if (block === null || (token.role !== block.role && block.role !== null)) blocks.push((block = { role: null, tokens: [] }));
    if (token.role !== "format") block.role = token.role;
    block.tokens.push(token);
  }
  return blocks.map(({ role, tokens: turnTokens }) =>
    element("div", { class: "turn" }, element("b", {}, role ?? "here the answer begins"),
      element("pre", { dir: "auto", class: "shaded" }, ...tokenRuns(turnTokens, heads))));
}

const BAR_HEIGHT = 26; // pixels
// Draws a bar for every layer: the share of the named tokens that it still held.
function layerBars(name, depth) {
  const svgElement = (tag, attributes, ...children) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  };
  const pitch = Math.min(16, 480 / depth.length);
  const labels = depth.map((share, layer) => `layer ${layer}: ${percent(share)}`);
  const bars = depth.flatMap((share, layer) => {
    const [x, width] = [layer * pitch, 0.85 * pitch];
    return [
      svgElement("rect", { class: "track", x, y: 0, width, height: BAR_HEIGHT }),
      svgElement("rect", { class: "bar", x, y: BAR_HEIGHT * (1 - share), width, height: BAR_HEIGHT * share },
        svgElement("title", {}, labels[layer])),
    ];
  });
  const [width, height] = [pitch * depth.length, BAR_HEIGHT];
  const picture = svgElement("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img",
    "aria-label": `${name}, share that each layer still held. ${labels.join(", ")}` }, ...bars);
  const [low, high] = [Math.min(...depth), Math.max(...depth)].map((share) => Math.round(100 * share));
  return element("figure", { class: "strip" },
    element("figcaption", {}, tagged(name), ` ${low === high ? low : `${low} to ${high}`} %`), picture);
}

const tagged = (name) => (name === ALL ? name : element("b", { class: "tag" }, name));

// Returns the shade of the prompt for a side that evicted nothing: the other side's prompt tokens, all held.
function uncompressedPrompt(other) {
  if (!other) return null;
  const end = other.tokens.findIndex(({ role }) => role === "assistant");
  const tokens = other.tokens.slice(0, end < 0 ? undefined : end).map((token) => ({ ...token, level: 1 }));
  return { tokens, heads: other.heads };
}

// Draws what is shown below an answer: how much its cache had evicted, and its prompt with every token shaded.
// "prompt" is drawn without shades if there are none; "unevicted" is the shade of a prompt of which nothing was evicted.
function cacheOf(answer, shade, side, prompt, unevicted) {
  const line = (words) => element("p", { class: "cache" }, words);
  const plain = prompt === undefined ? [] : [box(`Prompt, ${side}`, prompt)];
  if (answer.retention === null) return [line("The engine that served this answer does not show its cache."), ...plain];
  if (!answer.evicted) {
    const smaller = answer.bytes[1] !== null && answer.bytes[1] < answer.bytes[2] ? `, in ${percent(answer.bytes[1] / answer.bytes[2])} of the bytes` : "";
    const context = unevicted === null ? plain : [box(`What the cache still held, ${side}`, shadedTurns(unevicted))];
    return [line(`When this answer began the cache still held every token before it${smaller}.`), ...context];
  }
  const held = `When this answer began the cache held ${percent(answer.retention)} of the tokens before it`;
  if (shade === undefined) return [line(`${held}. Which tokens is not known: it was not served again yet.`), ...plain];
  if (shade === null) {
    return [line(`${held}. Which tokens is not known: served again here, another answer came out.`), ...plain];
  }
  const count = (level) => shade.tokens.filter((token) => token.level === level).length;
  const [none, all] = [count(0), count(1)];
  return [
    line(`${held}: of ${shade.tokens.length} tokens ${none} are gone, ${all} are held by every layer and head, ${shade.tokens.length - none - all} by some.`),
    element("div", { class: "strips" }, element("p", { class: "soft" }, "Held, layer by layer:"), ...Object.entries(shade.depth).map(([name, depth]) => layerBars(name, depth))),
    box(`What the cache still held, ${side}`, shadedTurns(shade)),
  ];
}

function legend() {
  const sample = (level, words) => {
    const node = level === 0 ? element("s", { class: "gone" }, words) : element("span", { class: level < FEW ? "held few" : "held" }, words);
    node.style.setProperty("--level", level);
    return node;
  };
  return element("p", { class: "legend" }, "Every token by the share of layers and heads that still held it when the answer began: ",
    sample(1, " every one "), " ", sample(0.5, " half of them "), " ", sample(0.125, " fewer "), " ", sample(0, " none: gone "),
    ". What was held was not necessarily used.");
}

let shownFile = null; // number of the file of texts that the open flip needs; it stays loaded

// Draws the links to the list and to the flips before and after flip n.
function flipLinks(n, state) {
  const found = findFlips(state);
  const place = found.indexOf(n);
  const to = (words, other) => other === undefined ? null : element("a", { href: link(state, { flip: flips.key[other] }) }, words);
  const toList = element("a", { href: link(state, { flip: null }) }, "all flips of this list");
  return element("nav", { "aria-label": "Flips of this list" }, toList, to("← previous flip", found[place - 1]),
    place < 0 ? null : `${number(place + 1)} of ${number(found.length)}`, place < 0 ? null : to("next flip →", found[place + 1]));
}

function drawFlip(n, state) {
  const item = flips.item[n];
  const file = items.file[item];
  const title = element("h2", { id: "item", tabindex: "-1", dir: "auto" }, items.name[item]);
  const name = (words) => element("bdi", {}, words);
  const all = (words, state) => element("a", { href: `#${new URLSearchParams(state)}` }, words);
  find("flip").replaceChildren(
    flipLinks(n, state),
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
    if (address().get("flip") !== flips.key[n]) return; // the reader went on to another flip
    drawAnswers(TEXTS[file][item], SHADES[file]?.[item], flips.answers[n], item);
    highlight(state.get("text"));
  });
}

function drawAnswers(texts, shades, numbers, item) {
  const answers = numbers.map((number) => texts.answers[number]);
  const sideShades = numbers.map((number) => shadeOf(shades, number));
  const shaded = sideShades.some(Boolean);
  const prompt = shaded ? turns(texts.prompt) : null;
  const drawn = answerTurns(answers.map((answer) => answer.turns));
  const isIdentical = drawn.flat().every((turn) => turn.querySelector("mark") === null);
  const side = (name, n) => element("section", {},
    element("h3", {}, name), ...drawn[n],
    ...cacheOf(answers[n], sideShades[n], name.toLowerCase(), prompt?.map((turn) => turn.cloneNode(true)), uncompressedPrompt(sideShades[1 - n])),
    explainHint(answers[n], item));
  find("flip").append(
    element("p", { class: "legend" }, ...(isIdentical ? ["Both answers are identical."]
      : [element("mark", {}, "Marked"), " is what the other answer does not say."])),
    ...(shaded ? [legend()] : []),
    element("div", { class: "sides" }, side("Reference", 0), side("Candidate", 1)),
    ...(shaded ? [] : [element("h3", {}, "Prompt"), box("Prompt", turns(texts.prompt))]),
    element("h3", {}, "What is on record"),
    element("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "What is on record" }, factTable(answers)),
  );
}

function explainHint(answer, item) {
  if (!run.served) return "";
  return element("div", { class: "command" }, "Serve it again, and see what the cache held:", element("pre", {}, explainCommand(answer, item)));
}

const box = (name, children) =>
  element("div", { class: "prompt", tabindex: "0", role: "region", "aria-label": name }, ...children);
