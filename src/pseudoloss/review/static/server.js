// Talking to the server. Decisions are sent one request after the other, and again until they are
// answered: nothing is shown as done before the server has written it.

export class Refused extends Error {}

const listeners = { offline: () => {}, waiting: () => {} };
const tasks = [];
let running = false;
let offline = false;

export function onConnection(handlers) {
  Object.assign(listeners, handlers);
}

export function waiting() {
  return tasks.length;
}

function setOffline(value) {
  if (value !== offline) {
    offline = value;
    listeners.offline(offline);
  }
}

async function request(address, options = {}) {
  let answer;
  try {
    answer = await fetch(address, { credentials: "same-origin", ...options });
  } catch (error) {
    if (error.name !== "AbortError") setOffline(true);
    throw error;
  }
  if ([403, 502, 503, 504].includes(answer.status)) {
    setOffline(true); // a restarted server has another token, until its page is opened
    throw new Error("the server does not answer");
  }
  setOffline(false);
  const content = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Refused(content.error || `The server refused this (${answer.status}).`);
  return content;
}

export function get(path, parameters = {}, signal = undefined) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== null && value !== undefined) query.set(name, value);
  }
  return request(`/api/${path}?${query}`, { signal });
}

const pause = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

export async function post(path, body) {
  for (;;) {
    try {
      return await request(`/api/${path}`, {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify(body),
      });
    } catch (error) {
      if (error instanceof Refused) throw error;
      await pause(700);
    }
  }
}

// Run a task after all earlier ones.
export function enqueue(task) {
  tasks.push(task);
  listeners.waiting(tasks.length);
  if (!running) work();
}

async function work() {
  running = true;
  while (tasks.length) {
    await tasks[0]();
    tasks.shift();
    listeners.waiting(tasks.length);
  }
  running = false;
}
