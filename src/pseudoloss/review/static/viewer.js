// One image in full size, with its labels, examples and buttons.

import { buttons, el, facts, imageAddress, scores, stamp } from "/cards.js";

const dialog = document.getElementById("viewer");
const full = document.getElementById("full");
const details = document.getElementById("details");

export function isOpen() {
  return dialog.open;
}

export function close() {
  dialog.close();
}

export function show(row, id, { saving, decide, undo }) {
  const address = imageAddress(id, row.position, "full");
  if (full.getAttribute("src") !== address) {
    full.classList.remove("real", "pixels");
    full.src = address;
    full.alt = row.path ?? `${row.part} ${row.index}`;
  }
  dialog.dataset.position = row.position;
  details.replaceChildren(
    el(
      "div",
      { class: "facts" },
      ...facts(row, id, "medium"),
      scores(row),
      el("div", { class: "path" }, row.path ?? `${row.part} ${row.index}`),
    ),
    el(
      "div",
      { class: "actions" },
      ...(saving
        ? [el("div", { class: "stamp" }, el("span", { class: "said" }, "Saving…"))]
        : row.decision
          ? [stamp(row, undo)]
          : buttons(decide, row)),
    ),
  );
  if (dialog.open) return;
  dialog.showModal();
  dialog.focus();
}

full.addEventListener("load", () => {
  full.classList.toggle("pixels", Math.max(full.naturalWidth, full.naturalHeight) <= 64);
});
document.getElementById("zoom").addEventListener("click", () => full.classList.toggle("real"));
document.getElementById("viewer-close").addEventListener("click", close);
