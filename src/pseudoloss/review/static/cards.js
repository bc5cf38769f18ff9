// Elements of the page. Names come from files of other people: they are set as text, never as HTML.

export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") element.className = value;
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const KINDS = [
  { decision: "accept", key: "A", text: "Accept", title: "Use the suggested label" },
  { decision: "keep", key: "K", text: "Keep", title: "The given label is right" },
  { decision: "choose", key: "C", text: "Choose", title: "Choose another class" },
  { decision: "junk", key: "J", text: "Junk", title: "Belongs to no class: leave it out" },
  { decision: "skip", key: "S", text: "Skip", title: "Decide later" },
];

export function buttons(decide, row = null) {
  return KINDS.map(({ decision, key, text, title }) =>
    el(
      "button",
      {
        // Only a trusted suggestion is put forward.
        class: `act ${decision}${row === null || row.action === "relabel" ? " sure" : ""}`,
        title,
        disabled: decision === "accept" && row !== null && row.suggested === null,
        data: { act: decision },
        onclick: (event) => {
          event.stopPropagation();
          decide(decision);
        },
      },
      el("span", {}, text),
      el("kbd", {}, key),
    ),
  );
}

export function imageAddress(id, position, size) {
  return `/images/${id}/${position}/${size}`;
}

export function picture(id, position, size, alt) {
  const image = el("img", { alt, loading: "lazy", decoding: "async", draggable: false });
  image.fetchPriority = size === "small" ? "low" : "high"; // examples after the images themselves
  image.addEventListener("load", () => {
    image.classList.toggle("pixels", Math.max(image.naturalWidth, image.naturalHeight) <= 64);
  });
  image.addEventListener("error", () => {
    image.replaceWith(el("span", { class: "broken", title: "The image cannot be read" }, "no image"));
  });
  image.src = imageAddress(id, position, size);
  return image;
}

// A probability, never as certain; as in the report.
export const likely = (value) =>
  value > 0.99 ? "> 99%" : value < 0.01 ? "< 1%" : `${Math.round(100 * value)}%`;

// Long names may be broken after _ and -.
const breakable = (name) => name.split(/(?<=[_-])/).flatMap((piece) => [piece, el("wbr")]);

function labelBlock(kind, caption, name, examples, id, size) {
  return el(
    "div",
    { class: `label ${kind}` },
    el("span", { class: "caption" }, caption),
    el("span", { class: "name", title: name ?? "" }, ...breakable(name ?? "no suggestion")),
    examples.length
      ? el(
          "div",
          { class: "examples", title: `Confident examples of ${name}` },
          ...examples.map((position) => picture(id, position, size, `example of ${name}`)),
        )
      : el("span", { class: "none" }, name === null ? "" : "no confident examples"),
  );
}

export function facts(row, id, size) {
  return [
    labelBlock("given", "Given", row.given, row.examples.given, id, size),
    labelBlock("suggested", "Suggested", row.suggested, row.examples.suggested, id, size),
  ];
}

export function scores(row) {
  const items = [];
  if (row.p_noisy !== null) items.push([`${likely(row.p_noisy)} likely wrong`, "Probability that the given label is wrong", row.p_noisy]);
  if (row.trust !== null && row.suggested !== null) {
    items.push([`${likely(row.trust)} trust`, "Probability that the suggested label is right", row.trust]);
  }
  return el(
    "div",
    { class: "scores" },
    ...items.map(([text, title, value]) => {
      const fill = el("i", {});
      fill.style.width = `${Math.round(100 * value)}%`;
      return el("span", { class: "score", title }, el("span", { class: "meter" }, fill), text);
    }),
  );
}

export function verdict(row) {
  if (row.decision === null) return null;
  const { decision, label } = row.decision;
  return { relabel: `→ ${label}`, keep: "Kept", junk: "Junk", skip: "Skipped" }[decision];
}

export function stamp(row, undo) {
  const who = row.decision.by ? ` by ${row.decision.by}` : "";
  return el(
    "div",
    { class: `stamp ${row.decision.decision}` },
    el("span", { class: "tick", "aria-hidden": "true" }, "✓"),
    el("span", { class: "said" }, verdict(row)),
    el("span", { class: "who" }, who),
    el("button", { class: "quiet", title: "Remove this decision", onclick: (event) => {
      event.stopPropagation();
      undo();
    } }, "Undo"),
  );
}

export function card(row, id, actions) {
  const box = el("input", {
    type: "checkbox",
    class: "select",
    tabIndex: -1,
    title: "Select (X)",
    "aria-label": "Select",
    onclick: (event) => {
      event.stopPropagation();
      actions.select(row, event.shiftKey);
    },
  });
  const name = row.path ?? `${row.part} ${row.index}`;
  const element = el(
    "article",
    {
      class: "card",
      tabIndex: -1,
      role: "listitem",
      data: { position: row.position },
      "aria-label": `${name}: given ${row.given}, suggested ${row.suggested ?? "nothing"}`,
      onfocusin: () => actions.focus(row),
      onclick: () => actions.focus(row),
    },
    el(
      "div",
      { class: "picture" },
      el(
        "button",
        { class: "open", tabIndex: -1, title: "Full size (Enter)", onclick: () => actions.open(row) },
        picture(id, row.position, "medium", name),
      ),
      box,
    ),
    el("div", { class: "side" }, ...facts(row, id, "small"), scores(row)),
    el("div", { class: "path", title: name }, name),
    el("div", { class: "actions" }),
  );
  return element;
}

// Show what is decided; called again whenever that changes.
export function refresh(element, row, { saving, selected, current, decide, undo }) {
  element.classList.toggle("saving", saving);
  element.classList.toggle("done", row.decision !== null && !saving);
  element.classList.toggle("selected", selected);
  element.classList.toggle("current", current);
  element.dataset.decision = saving ? "" : (row.decision?.decision ?? "");
  element.tabIndex = current ? 0 : -1;
  element.querySelector("input.select").checked = selected;
  const place = element.querySelector(".actions");
  const state = saving ? "saving" : JSON.stringify(row.decision);
  if (place.dataset.state !== state) {
    place.dataset.state = state;
    if (saving) place.replaceChildren(el("div", { class: "stamp" }, el("span", { class: "said" }, "Saving…")));
    else if (row.decision) place.replaceChildren(stamp(row, undo));
    else place.replaceChildren(...buttons(decide, row));
  }
  for (const button of place.querySelectorAll("button")) button.tabIndex = current ? 0 : -1;
}
