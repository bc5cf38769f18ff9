// Choose a class by typing a part of its name; the search is done by the server.

import { el, likely } from "/cards.js";
import { get } from "/server.js";

const dialog = document.getElementById("chooser");
const input = document.getElementById("chooser-input");
const list = document.getElementById("chooser-list");
let options = [];
let active = 0;
let chosen = () => {};
let asked = null; // the search in progress
let fixed = []; // options that are always first

export function isOpen() {
  return dialog.open;
}

// `position`: propose the likely classes of this image; `any`: offer "any class", which is null.
export function choose(title, { position = null, any = false }, done) {
  document.getElementById("chooser-title").textContent = title;
  chosen = done;
  fixed = any ? [{ name: null, text: "Any class" }] : [];
  input.value = "";
  options = [];
  list.replaceChildren();
  dialog.dataset.position = position ?? "";
  dialog.showModal();
  input.focus();
  search();
}

async function search() {
  asked?.abort();
  asked = new AbortController();
  const text = input.value.trim();
  try {
    const position = dialog.dataset.position || null;
    const found = await get("classes", { search: text, position }, asked.signal);
    options = [...(text ? [] : fixed), ...found.classes];
  } catch {
    return; // a newer search, or no connection, which the page shows
  }
  active = 0;
  show(text);
}

function show(text) {
  list.replaceChildren(
    ...options.map((option, i) =>
      el(
        "li",
        { role: "option", id: `class-${i}`, onclick: () => pick(i), onpointermove: () => mark(i) },
        el("span", { class: "name" }, option.text ?? option.name),
        el(
          "span",
          { class: "number" },
          option.probability
            ? `${likely(option.probability)} likely`
            : option.images === undefined
              ? ""
              : `${option.images.toLocaleString("en")} images`,
        ),
      ),
    ),
  );
  if (!options.length) list.append(el("li", { class: "nothing" }, `No class contains “${text}”`));
  list.dataset.search = text;
  mark(active);
}

function mark(i) {
  active = i;
  [...list.children].forEach((item, j) => item.setAttribute("aria-selected", String(i === j)));
  list.children[i]?.scrollIntoView({ block: "nearest" });
  input.setAttribute("aria-activedescendant", `class-${i}`);
}

function pick(i) {
  const option = options[i];
  // The list must belong to what is typed: Enter may come before its answer.
  if (option === undefined || list.dataset.search !== input.value.trim()) return;
  dialog.close();
  chosen(option.name);
}

input.addEventListener("input", search);
input.addEventListener("keydown", async (event) => {
  if (event.key === "ArrowDown") mark(Math.min(active + 1, options.length - 1));
  else if (event.key === "ArrowUp") mark(Math.max(active - 1, 0));
  else if (event.key === "Enter") {
    event.preventDefault();
    if (list.dataset.search !== input.value.trim()) await search();
    pick(active);
    return;
  } else return;
  event.preventDefault();
});
dialog.addEventListener("click", (event) => {
  if (event.target === dialog) dialog.close();
});
