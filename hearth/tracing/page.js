"use strict";
const details = JSON.parse(document.getElementById("details").textContent);
const rows = [...document.querySelectorAll(".row")];
const tip = document.getElementById("tip");

function show(row, x, y) {
  const { name, lines } = details[row.dataset.spanId];
  const title = document.createElement("strong");
  title.textContent = name;
  const list = document.createElement("dl");
  for (const [key, value] of lines) {
    const term = document.createElement("dt");
    const text = document.createElement("dd");
    term.textContent = key;
    text.textContent = value;
    list.append(term, text);
  }
  tip.replaceChildren(title, list);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${Math.max(8, y + 18 + box.height > innerHeight ? y - box.height - 12 : y + 18)}px`;
}

function hide() {
  tip.hidden = true;
}

for (const row of rows) {
  const bar = row.querySelector(".bar");
  bar.addEventListener("pointermove", (event) => show(row, event.clientX, event.clientY));
  bar.addEventListener("pointerleave", hide);
  bar.addEventListener("focus", () => {
    const box = bar.getBoundingClientRect();
    show(row, box.left, box.bottom - 8);
  });
  bar.addEventListener("blur", hide);
}
addEventListener("keydown", (event) => event.key === "Escape" && hide());
addEventListener("scroll", hide);

// A row is shown unless one above it is closed.
function unfold() {
  let closed = Infinity;
  for (const row of rows) {
    const depth = Number(row.dataset.depth);
    if (depth <= closed) closed = Infinity;
    row.classList.toggle("folded", depth > closed);
    if (closed === Infinity && row.getAttribute("aria-expanded") === "false") closed = depth;
  }
}

for (const button of document.querySelectorAll(".name button")) {
  button.addEventListener("click", () => {
    const row = button.closest(".row");
    const open = row.getAttribute("aria-expanded") === "false";
    row.setAttribute("aria-expanded", String(open));
    button.textContent = open ? "▾" : "▸";
    unfold();
  });
}

for (const button of document.querySelectorAll(".legend button")) {
  button.addEventListener("click", () => {
    const shown = button.getAttribute("aria-pressed") === "false";
    button.setAttribute("aria-pressed", String(shown));
    for (const row of rows) {
      if (row.dataset.service === button.dataset.service) row.classList.toggle("muted", !shown);
    }
  });
}
