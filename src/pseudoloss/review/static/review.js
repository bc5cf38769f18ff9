// The page: rows, keys, filters, and what has been decided.

import * as cards from "/cards.js";
import * as chooser from "/chooser.js";
import { Refused, enqueue, get, onConnection, post, waiting } from "/server.js";
import * as viewer from "/viewer.js";

const PAGE = 24; // rows
const POLL = 1500; // milliseconds between questions for decisions made elsewhere
const UNDO = 100; // steps
const { el } = cards;
const $ = (id) => document.getElementById(id);
const number = (value) => value.toLocaleString("en");

const filter = { action: "issues", state: "open", given: null, suggested: null };
let from = 0; // rank of the first row
let run = null; // id, name, ...
let seq = 0; // decisions that the page knows
let page = null; // the answer with the rows that are shown
let rows = []; // of this page
let current = 0; // the row with the focus
let anchor = null; // where a selection with Shift began
const elements = new Map(); // cards by position
const saving = new Map(); // positions whose decisions are under way, and how many
const selected = new Set(); // positions
let undos = []; // what this tab has done, the last one at the end
let loading = 0;

// ------------------------------------------------------------------------------- rows

const ask = (after, before = null) => get("rows", { ...filter, limit: PAGE, after: before === null ? after : null, before });

async function load({ after = from, before = null, focus = "first", asked = null } = {}) {
  const ticket = ++loading;
  let answer;
  try {
    answer = await (asked ?? ask(after, before));
  } catch (error) {
    if (error instanceof Refused) {
      toast(error.message);
      if (filter.given !== null || filter.suggested !== null) setFilter({ given: null, suggested: null });
    }
    return;
  }
  if (ticket !== loading) return; // a newer question is under way
  if (!answer.rows.length && answer.shown && after) return load({ after: 0, focus });
  page = answer;
  rows = answer.rows;
  from = rows.length ? rows[0].rank : 0;
  selected.clear();
  anchor = null;
  elements.clear();
  for (const row of rows) {
    elements.set(row.position, cards.card(row, run.id, { focus: focusRow, open: openRow, select: selectRow }));
  }
  $("grid").replaceChildren(...elements.values());
  current = focus === "last" ? rows.length - 1 : 0;
  if (typeof focus === "number") current = Math.max(0, rows.findIndex((row) => row.position === focus));
  refreshAll();
  showPlace();
  remember();
  window.scrollTo(0, 0);
  if (rows.length) moveTo(current, { scroll: current > 0 });
  if (viewer.isOpen()) rows.length ? showViewer() : viewer.close();
}

function refresh(row) {
  const element = elements.get(row.position);
  if (!element) return;
  cards.refresh(element, row, {
    saving: saving.has(row.position),
    selected: selected.has(row.position),
    current: rows[current] === row,
    decide: (kind) => act(kind, [row]),
    undo: () => decide([row], "undo"),
  });
  if (viewer.isOpen() && rows[current] === row) showViewer();
}

function refreshAll() {
  rows.forEach(refresh);
  $("selection").hidden = selected.size === 0;
  $("selected-count").textContent = `${number(selected.size)} selected`;
  document.body.classList.toggle("selecting", selected.size > 0);
}

function showCount() {
  $("count").textContent = `${number(page.left)} of ${number(page.matching)} to do`;
}

function showPlace() {
  const { shown, start } = page;
  showCount();
  $("place").textContent = rows.length ? `${number(start + 1)}–${number(start + rows.length)} of ${number(shown)}` : "";
  $("previous").disabled = page.previous === null;
  $("next").disabled = page.next === null;
  $("pager").hidden = !rows.length;
  $("empty").hidden = rows.length > 0;
  if (rows.length) return;
  const done = filter.state === "open" && page.matching > 0;
  $("empty-title").textContent = done ? "All done here" : filter.action === "issues" && !page.matching ? "No doubtful labels" : "Nothing here";
  $("empty-text").textContent = done
    ? "Every label that matches these filters is decided. Stop the server with Ctrl-C; pseudoloss apply writes the corrected table."
    : "No image matches these filters.";
  $("empty-button").hidden = filter.action === "issues" && filter.state === "open" && !filter.given && !filter.suggested;
}

function showProgress(progress) {
  const done = progress.issues - progress.left;
  const share = progress.issues ? (100 * done) / progress.issues : 100;
  $("fill").style.width = `${progress.left ? Math.min(share, 99) : 100}%`; // full only at the end
  $("track").setAttribute("aria-valuemax", progress.issues);
  $("track").setAttribute("aria-valuenow", done);
  $("track").setAttribute("aria-valuetext", `${number(done)} of ${number(progress.issues)} decided`);
  $("progress-text").textContent = `${number(progress.left)} left of ${number(progress.issues)}`;
  $("track").title = `${number(progress.relabel)} relabelled, ${number(progress.keep)} kept, ${number(progress.junk)} junk, ${number(progress.skip)} skipped`;
}

// ----------------------------------------------------------------------------- moving

function focusRow(row) {
  const i = rows.indexOf(row);
  if (i < 0 || i === current) return;
  const before = rows[current];
  current = i;
  if (before) refresh(before);
  refresh(row);
}

function moveTo(i, { scroll = true } = {}) {
  const before = rows[current];
  current = Math.min(Math.max(i, 0), rows.length - 1);
  if (before) refresh(before);
  refresh(rows[current]);
  const element = elements.get(rows[current].position);
  if (!document.querySelector("dialog[open]")) element.focus({ preventScroll: true });
  if (scroll) element.scrollIntoView({ block: "nearest" });
}

function step(by, extend) {
  if (!rows.length) return;
  const before = current;
  if (by > 0 && current === rows.length - 1 && by === 1 && !extend) return void nextPage();
  if (by < 0 && current === 0 && !extend) return void previousPage("last");
  if (current + by >= 0 && current + by < rows.length) moveTo(current + by);
  if (extend) {
    anchor ??= before;
    selected.clear();
    for (let i = Math.min(anchor, current); i <= Math.max(anchor, current); i++) selected.add(rows[i].position);
  } else anchor = null;
  refreshAll();
}

function columns() {
  const tops = rows.map((row) => elements.get(row.position).offsetTop);
  const second = tops.findIndex((top) => top > tops[0]);
  return second < 0 ? rows.length : second;
}

const isOpenRow = (row) => row.decision === null && !saving.has(row.position);

// After a decision: to the next row without one, or to the next page if there is none.
function advance() {
  const order = [...rows.keys()];
  const next = [...order.slice(current + 1), ...order.slice(0, current)].find((i) => isOpenRow(rows[i]));
  if (next !== undefined) moveTo(next);
  else if (filter.state === "open") {
    const last = rows[rows.length - 1].rank;
    enqueue(async () => {
      // Decisions that failed leave rows to do on this page.
      if (rows.length && rows[rows.length - 1].rank === last && !rows.some((row) => row.decision === null)) await load({ after: last + 1 });
    });
  } else if (current < rows.length - 1) moveTo(current + 1);
}

function nextPage() {
  return page?.next === null ? null : load({ after: page.next });
}

function previousPage(focus = "first") {
  return page?.previous === null ? null : load({ before: page.previous, focus });
}

// -------------------------------------------------------------------------- deciding

const chosenRows = () => (selected.size ? rows.filter((row) => selected.has(row.position)) : rows.slice(current, current + 1));

function act(kind, about = chosenRows()) {
  if (!about.length) return;
  if (kind === "choose") {
    const one = about.length === 1;
    const title = one ? "Which class is it?" : `Which class are these ${about.length} images?`;
    chooser.choose(title, { position: one ? about[0].position : null }, (label) => decide(about, "relabel", label));
  } else if (kind === "accept") {
    const able = about.filter((row) => row.suggested !== null);
    if (able.length < about.length) toast(`${about.length - able.length} without a suggestion: not changed`);
    if (able.length) decide(able, "relabel", null);
  } else decide(about, kind);
}

const wish = (row, decision, label = null) => ({
  position: row.position, index: row.index, part: row.part, known: row.version, decision, label,
});

// `label` null with "relabel": the suggested label of each row.
function decide(about, decision, label = null) {
  const wishes = about.map((row) => wish(row, decision, decision === "relabel" ? (label ?? row.suggested) : null));
  const before = new Map(about.map((row) => [row.position, row.decision]));
  mark(about, 1);
  selected.clear();
  anchor = null;
  const among = about.includes(rows[current]);
  refreshAll();
  enqueue(() => send(about, wishes, before));
  if (decision !== "undo" && among) advance();
}

function mark(about, by) {
  for (const { position } of about) {
    const count = (saving.get(position) ?? 0) + by;
    if (count > 0) saving.set(position, count);
    else saving.delete(position);
  }
}

async function send(about, wishes, before) {
  // An earlier decision of this tab about the same row has changed its version.
  for (const one of wishes) one.known = Math.max(one.known, own.get(one.position) ?? 0);
  try {
    const answer = await post("decisions", { id: run.id, by: localStorage.getItem("by") || null, decisions: wishes });
    take(about, answer);
    undos.push(answer.rows.map((row, i) => ({
      position: row.position, index: row.index, part: row.part, rank: about[i].rank,
      version: row.version, before: before.get(row.position) ?? null,
    })));
    undos = undos.slice(-UNDO);
    const replaced = answer.rows.filter((row) => row.replaced);
    if (replaced.length) tellReplaced(replaced);
  } catch (error) {
    toast(error.message, [], true);
  }
  mark(about, -1);
  about.forEach(refresh);
  remember();
}

function update(row, now) {
  if (now.version < row.version) return;
  if (rows.includes(row) && (row.decision === null) !== (now.decision === null)) {
    page.left += now.decision === null ? 1 : -1;
    showCount();
  }
  Object.assign(row, { version: now.version, decision: now.decision });
}

const own = new Map(); // versions that this tab has written, by position

// Take over the server's state of some rows.
function take(about, answer) {
  const byPosition = new Map(about.map((row) => [row.position, row]));
  for (const now of answer.rows) {
    own.set(now.position, now.version);
    for (const row of [byPosition.get(now.position), rows.find((one) => one.position === now.position)]) {
      if (row) update(row, now);
    }
  }
  if (answer.progress) showProgress(answer.progress);
}

const said = (decision) => ({ relabel: `“${decision.label}”`, keep: "keep", junk: "junk", skip: "skip", undo: "undone" })[decision.decision];

function tellReplaced(replaced) {
  const [one] = replaced;
  const who = one.replaced.by ?? "another tab";
  const text = replaced.length > 1
    ? `${replaced.length} of these were decided elsewhere meanwhile. Your decisions count now.`
    : `${who} decided ${said(one.replaced)} meanwhile. Your decision counts now.`;
  const restore = async () => {
    const about = replaced.map((row) => ({ ...row }));
    const wishes = about.map((row) => wish(row, row.replaced.decision, row.replaced.label ?? null));
    enqueue(async () => {
      try {
        take(about, await post("decisions", { id: run.id, by: localStorage.getItem("by") || null, strict: true, decisions: wishes }));
        refreshAll();
      } catch (error) {
        toast(error.message, [], true);
      }
    });
  };
  toast(text, [[replaced.length > 1 ? "Use theirs" : "Use that one", restore]], true);
}

// Take back the last thing this tab did, as long as nobody has changed it since.
function undo() {
  enqueue(async () => {
    const last = undos.pop();
    if (!last) return toast("Nothing to undo in this tab");
    const wishes = last.map((one) =>
      wish({ ...one }, one.before?.decision ?? "undo", one.before?.label ?? null));
    try {
      const answer = await post("decisions", { id: run.id, by: localStorage.getItem("by") || null, strict: true, decisions: wishes });
      take([], answer);
      const refused = answer.rows.filter((row) => row.refused).length;
      if (refused) toast(`${refused} changed elsewhere meanwhile: left as decided there`, [], true);
      const first = last[0];
      const i = rows.findIndex((row) => row.position === first.position);
      if (i >= 0) moveTo(i);
      else await load({ after: first.rank, focus: first.position });
    } catch (error) {
      toast(error.message, [], true);
    }
    refreshAll();
    remember();
  });
}

// --------------------------------------------------------------------------- selecting

function selectRow(row, extend) {
  const i = rows.indexOf(row);
  if (extend && anchor !== null) {
    for (let j = Math.min(anchor, i); j <= Math.max(anchor, i); j++) selected.add(rows[j].position);
  } else {
    selected.has(row.position) ? selected.delete(row.position) : selected.add(row.position);
    anchor = i;
  }
  moveTo(i, { scroll: false });
  refreshAll();
}

function clearSelection() {
  selected.clear();
  anchor = null;
  refreshAll();
}

// ------------------------------------------------------------------------------ viewer

function openRow(row) {
  focusRow(row);
  showViewer();
}

function showViewer() {
  const row = rows[current];
  if (!row) return;
  viewer.show(row, run.id, {
    saving: saving.has(row.position),
    decide: (kind) => act(kind, [row]),
    undo: () => decide([row], "undo"),
  });
}

// ----------------------------------------------------------------------------- filters

function setFilter(changes) {
  Object.assign(filter, changes);
  showFilter();
  load({ after: 0 });
}

function showFilter() {
  for (const button of $("actions").children) {
    button.setAttribute("aria-pressed", String(button.dataset.action === filter.action));
  }
  for (const [id, name, text] of [["given-filter", filter.given, "Any given class"], ["suggested-filter", filter.suggested, "Any suggestion"]]) {
    $(id).textContent = name ?? text;
    $(id).classList.toggle("set", name !== null);
  }
  $("state").value = filter.state;
}

function chooseFilter(which) {
  chooser.choose(which === "given" ? "Show labels given as" : "Show labels suggested as", { any: true }, (name) => setFilter({ [which]: name }));
}

async function openPairs() {
  const { pairs } = await get("pairs");
  const items = pairs.map((pair) =>
    el("li", {}, el("button", {
      onclick: () => {
        $("pairs").close();
        setFilter({ action: "issues", state: "open", given: pair.given, suggested: pair.suggested });
      },
    }, el("span", { class: "name" }, `${pair.given} → ${pair.suggested}`), el("span", { class: "number" }, number(pair.left)))));
  $("pairs-list").replaceChildren(...(items.length ? items : [el("li", { class: "nothing" }, "None left")]));
  $("pairs").showModal();
}

// The address keeps the place, and this tab its undo steps, over a reload.
function remember() {
  const place = new URLSearchParams({ action: filter.action, state: filter.state, from });
  if (filter.given !== null) place.set("given", filter.given);
  if (filter.suggested !== null) place.set("suggested", filter.suggested);
  history.replaceState(null, "", `/#${place}`);
  sessionStorage.setItem(`undo ${run.id}`, JSON.stringify(undos));
}

function recall() {
  const place = new URLSearchParams(location.hash.slice(1));
  const known = (id, name) => [...$(id).children].some((one) => (one.dataset.action ?? one.value) === name);
  if (known("actions", place.get("action"))) filter.action = place.get("action");
  if (known("state", place.get("state"))) filter.state = place.get("state");
  filter.given = place.get("given");
  filter.suggested = place.get("suggested");
  from = Math.max(0, Number.parseInt(place.get("from"), 10) || 0);
}

function recallUndos() {
  try {
    undos = JSON.parse(sessionStorage.getItem(`undo ${run.id}`)) ?? [];
  } catch {
    undos = [];
  }
}

// --------------------------------------------------------------- decisions made elsewhere

async function poll() {
  if (document.visibilityState === "hidden") return;
  let answer;
  try {
    answer = await get("changes", { since: seq });
  } catch {
    return;
  }
  if (answer.id !== run.id) return banner("This address now shows another run. Reload the page.");
  seq = answer.seq;
  showProgress(answer.progress);
  if (answer.reset) return void load();
  for (const now of answer.rows) {
    const row = rows.find((one) => one.position === now.position);
    if (row && !saving.has(row.position) && now.version > row.version) {
      update(row, now);
      refresh(row);
    }
  }
}

async function keepPolling() {
  await poll();
  setTimeout(keepPolling, POLL);
}

// ---------------------------------------------------------------------------- messages

function banner(text) {
  $("banner").hidden = !text;
  $("banner").textContent = text ?? "";
}

function showConnection(offline) {
  const count = saving.size;
  banner(offline
    ? `The server does not answer. Start pseudoloss review again and open its address.${count ? ` ${count} decision${count > 1 ? "s" : ""} not saved yet: keep this tab open.` : ""}`
    : null);
}

function toast(text, choices = [], stay = false) {
  const box = el("div", { class: "toast" }, el("span", {}, text));
  for (const [name, action] of choices) {
    box.append(el("button", { class: "quiet", onclick: () => { box.remove(); action(); } }, name));
  }
  box.append(el("button", { class: "quiet", "aria-label": "Close", onclick: () => box.remove() }, "✕"));
  $("toasts").append(box);
  while ($("toasts").children.length > 4) $("toasts").firstChild.remove();
  setTimeout(() => box.remove(), stay ? 20000 : 5000);
}

// -------------------------------------------------------------------------------- keys

const KEYS = {
  a: () => act("accept"),
  k: () => act("keep"),
  c: () => act("choose"),
  j: () => act("junk"),
  s: () => act("skip"),
  u: undo,
  n: () => nextPage(),
  p: () => previousPage(),
  x: () => rows[current] && selectRow(rows[current], false),
  "/": () => chooseFilter("given"),
  "?": () => $("help").showModal(),
};

function onKey(event) {
  const typing = event.target.closest("input:not([type=checkbox]), select, textarea");
  if (typing || chooser.isOpen() || $("help").open || $("pairs").open || event.isComposing) return;
  const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  const command = event.ctrlKey || event.metaKey;
  let action = null;
  if (command && key === "z") action = undo;
  else if (command && key === "a" && !viewer.isOpen()) {
    action = () => {
      rows.filter(isOpenRow).forEach((row) => selected.add(row.position));
      refreshAll();
    };
  } else if (command || event.altKey) return;
  else if (key === "ArrowRight") action = () => step(1, event.shiftKey);
  else if (key === "ArrowLeft") action = () => step(-1, event.shiftKey);
  else if (key === "ArrowDown") action = () => step(viewer.isOpen() ? 1 : columns(), event.shiftKey);
  else if (key === "ArrowUp") action = () => step(viewer.isOpen() ? -1 : -columns(), event.shiftKey);
  else if (key === "Enter" && event.target.closest("button:not(.open), a") === null) {
    action = viewer.isOpen() ? viewer.close : showViewer;
  } else if (key === "Escape" && !viewer.isOpen() && selected.size) action = clearSelection;
  else if (event.repeat && "akjsc".includes(key)) return; // a key held down decides once
  else action = KEYS[key] ?? null;
  if (action) {
    event.preventDefault();
    action();
  }
}

// ------------------------------------------------------------------------------- start

async function start() {
  onConnection({ offline: showConnection, waiting: () => $("banner").hidden || showConnection(true) });
  recall();
  const asked = ask(from); // at the same time
  asked.catch(() => {}); // `load` sees it
  try {
    run = await get("start");
  } catch {
    banner("The server does not answer. Open the address that pseudoloss review printed.");
    return;
  }
  seq = run.seq;
  document.title = `${run.name}: review labels`;
  $("run-name").textContent = run.name;
  $("file").textContent = `Decisions are written to ${run.file}.`;
  const notices = [run.notice];
  if (run.unmatched) notices.push(`${number(run.unmatched)} decisions in ${run.file} are about other images or labels and are ignored.`);
  if (run.damaged) notices.push(`${number(run.damaged)} damaged lines in ${run.file} are ignored.`);
  $("notice").textContent = notices.filter(Boolean).join(" ");
  $("notice").hidden = !$("notice").textContent;
  $("by").value = localStorage.getItem("by") ?? "";
  showProgress(run.progress);
  recallUndos();
  showFilter();

  $("by").addEventListener("input", () => localStorage.setItem("by", $("by").value.trim()));
  for (const button of $("actions").children) {
    button.addEventListener("click", () => setFilter({ action: button.dataset.action }));
  }
  $("state").addEventListener("change", () => {
    setFilter({ state: $("state").value });
    $("state").blur();
  });
  $("given-filter").addEventListener("click", () => chooseFilter("given"));
  $("suggested-filter").addEventListener("click", () => chooseFilter("suggested"));
  $("pairs-button").addEventListener("click", openPairs);
  $("pairs").addEventListener("click", (event) => event.target === $("pairs") && $("pairs").close());
  $("help-button").addEventListener("click", () => $("help").showModal());
  $("undo").addEventListener("click", undo);
  $("next").addEventListener("click", () => nextPage());
  $("previous").addEventListener("click", () => previousPage());
  $("empty-button").addEventListener("click", () => setFilter({ action: "issues", state: "open", given: null, suggested: null }));
  $("selection-buttons").append(...cards.buttons((kind) => act(kind)));
  $("clear-selection").addEventListener("click", clearSelection);
  $("viewer").addEventListener("close", () => rows.length && moveTo(current));
  document.addEventListener("keydown", onKey);
  document.addEventListener("visibilitychange", poll);
  window.addEventListener("beforeunload", (event) => waiting() && event.preventDefault());
  await load({ asked });
  setTimeout(keepPolling, POLL);
}

start();
