// A small, safe Markdown: headings, paragraphs, code, lists, quotes, tables, bold, italics. A model's text
// becomes text nodes only. Links stay text too: a model's address should be read before it is opened.
import { copyButton, element } from "./dom.js";

const MAX_DEPTH = 6; // of lists and quotes within each other; deeper ones stay text
const MAX_INLINE = 8_000; // characters of a paragraph; the marks of a longer one stay text
const FENCE = /^\s*(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const INLINE =
  /(`+)(?!`)(.+?)(?<!`)\1(?!`)|\*\*(?=\S)((?:`[^`]*`|[^`])+?)(?<=\S)\*\*(?!\*)|\*(?=[^\s*])((?:`[^`]*`|[^*`])*?)(?<=\S)\*|\[([^[\]]+)\]\(([^()\s]+)\)/gs;

/** Show `text` in `node`. Blocks that did not change since the last call keep their elements. */
export function showMarkdown(node, text) {
  const blocks = splitBlocks(text);
  const shown = node.shownBlocks ?? [];
  let same = 0;
  while (same < blocks.length && same < shown.length && equal(blocks[same], shown[same])) same++;
  while (node.childNodes.length > same) node.lastChild.remove();
  node.append(...blocks.slice(same).map((block) => render(block, 0)));
  node.shownBlocks = blocks;
}

const equal = (a, b) => a.kind === b.kind && a.mark === b.mark && a.text === b.text;

/** The blocks of a text, each `{kind, mark, text}`; `mark` is a level, a language or a first number. */
function splitBlocks(text) {
  const lines = text.split("\n");
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    const first = at;
    let match;
    if (!line.trim()) {
      at++;
    } else if ((match = FENCE.exec(line))) {
      const end = new RegExp(`^\\s*${match[1][0]}{${match[1].length},}\\s*$`);
      do at++; while (at < lines.length && !end.test(lines[at]));
      blocks.push({ kind: "code", mark: match[2], text: lines.slice(first + 1, at).join("\n") });
      at++;
    } else if ((match = HEADING.exec(line))) {
      blocks.push({ kind: "heading", mark: match[1].length, text: match[2] });
      at++;
    } else if (RULE.test(line)) {
      blocks.push({ kind: "rule", mark: 0, text: "" });
      at++;
    } else if (QUOTE.test(line)) {
      while (at < lines.length && QUOTE.test(lines[at])) at++;
      const inner = lines.slice(first, at).map((each) => QUOTE.exec(each)[1]);
      blocks.push({ kind: "quote", mark: 0, text: inner.join("\n") });
    } else if (ITEM.test(line)) {
      at = endOfList(lines, at);
      const ordered = /^\s*\d+/.exec(line);
      blocks.push({ kind: "list", mark: ordered ? Number(ordered[0]) : -1, text: lines.slice(first, at).join("\n") });
    } else if (line.includes("|") && DIVIDER.test(lines[at + 1] ?? "") && lines[at + 1].includes("|")) {
      at += 2;
      while (at < lines.length && lines[at].includes("|")) at++;
      blocks.push({ kind: "table", mark: 0, text: lines.slice(first, at).join("\n") });
    } else {
      do at++; while (at < lines.length && !startsBlock(lines[at]));
      blocks.push({ kind: "paragraph", mark: 0, text: lines.slice(first, at).join("\n") });
    }
  }
  return blocks;
}

function startsBlock(line) {
  return !line.trim() || [FENCE, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(line));
}

/** The line behind a list: items, indented lines, and blank lines between them. */
function endOfList(lines, at) {
  const indent = ITEM.exec(lines[at])[1].length;
  const ordered = /^\s*\d/.test(lines[at]);
  let end = at + 1;
  for (let next = end; next < lines.length; next++) {
    const line = lines[next];
    if (!line.trim()) continue;
    const item = ITEM.exec(line);
    const nested = line.search(/\S/) > indent;
    const sibling = item && !nested && /\d/.test(item[2]) === ordered && !RULE.test(line);
    const lazy = next === end && !startsBlock(line);
    if (!nested && !sibling && !lazy) break;
    end = next + 1;
  }
  return end;
}

function render({ kind, mark, text }, depth) {
  switch (kind) {
    case "code": return codeBlock(text, mark);
    case "heading": return element(`h${Math.min(6, mark + 2)}`, {}, ...inline(text));
    case "rule": return element("hr");
    case "quote": return element("blockquote", {}, ...nested(text, depth));
    case "list": return list(text, mark, depth);
    case "table": return table(text);
    default: return element("p", {}, ...inline(text));
  }
}

function nested(text, depth) {
  if (depth === MAX_DEPTH) return [element("p", {}, text)];
  return splitBlocks(text).map((block) => render(block, depth + 1));
}

function codeBlock(text, language) {
  const code = element("code", {}, text);
  return element("div", { class: "code" },
    element("div", { class: "code-bar" },
      element("span", {}, language || "text"), copyButton("Copy code", () => text)),
    element("pre", { tabindex: "0", role: "region", "aria-label": `Code, ${language || "text"}` }, code));
}

function list(text, start, depth) {
  const lines = text.split("\n");
  const indent = ITEM.exec(lines[0])[1].length;
  const items = [];
  for (const line of lines) {
    const match = ITEM.exec(line);
    if (match && match[1].length <= indent) items.push([match[4]]);
    else items.at(-1).push(line);
  }
  return element(start < 0 ? "ul" : "ol", start > 1 ? { start } : {},
    ...items.map((item) => element("li", {}, ...itemContent(item, depth))));
}

/** An item of one paragraph is shown without a paragraph's space around it. */
function itemContent([first, ...rest], depth) {
  const margin = Math.min(...rest.filter((line) => line.trim()).map((line) => line.search(/\S/)), 8);
  const content = [first, ...rest.map((line) => line.slice(Math.min(margin, line.search(/\S|$/))))];
  const nodes = nested(content.join("\n"), depth);
  return nodes[0]?.tagName === "P" ? [...nodes[0].childNodes, ...nodes.slice(1)] : nodes;
}

function table(text) {
  const rows = text.split("\n").filter((_, line) => line !== 1).map((line) =>
    line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim()));
  const row = (cells, tag) => element("tr", {}, ...cells.map((cell) => element(tag, {}, ...inline(cell))));
  return element("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" },
    element("table", {},
      element("thead", {}, row(rows[0], "th")),
      element("tbody", {}, ...rows.slice(1).map((cells) => row(cells, "td")))));
}

/** The nodes of one paragraph: text, `code`, **bold**, *italics*, and links as text. */
function inline(text) {
  if (text.length > MAX_INLINE) return [text];
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    const [whole, , code, bold, italic, label, address] = match;
    nodes.push(text.slice(end, match.index));
    if (code) nodes.push(element("code", {}, code));
    else if (bold) nodes.push(element("strong", {}, ...inline(bold)));
    else if (italic) nodes.push(element("em", {}, ...inline(italic)));
    else nodes.push(label, element("span", { class: "address" }, ` (${address})`));
    end = match.index + whole.length;
  }
  nodes.push(text.slice(end));
  return nodes;
}
