"use strict";

// The filters of the samples, and the dialog that shows one of them. The texts are in `template`
// elements, whose texts are escaped: nothing here makes HTML of a text.

const rows = [...document.querySelectorAll("#rows tr")];
const filters = document.getElementById("filters");
const viewer = document.getElementById("viewer");
let current = null;

function isShown(row, wanted) {
  const problem = row.querySelector("th").textContent;
  if (!problem.includes(wanted.problem ?? "")) return false;
  if (wanted.model && wanted.model !== row.dataset.model) return false;
  if (wanted.domain && wanted.domain !== row.dataset.domain) return false;
  return row.dataset.states.split("|").some((state) => {
    const [mode, status, grade] = state.split(" ");
    return [[wanted.mode, mode], [wanted.status, status], [wanted.grade, grade]]
      .every(([choice, value]) => !choice || choice === value);
  });
}

function filterRows() {
  const wanted = Object.fromEntries(new FormData(filters));
  for (const row of rows) row.hidden = !isShown(row, wanted);
  document.getElementById("shown").textContent = rows.filter((row) => !row.hidden).length;
}

function show(row) {
  const content = document.getElementById("content");
  const number = row.id.split("-")[1];
  content.replaceChildren(document.getElementById(`text-${number}`).content.cloneNode(true));
  current = row;
  const shown = rows.filter((each) => !each.hidden);
  const index = shown.indexOf(row);
  document.getElementById("place").textContent = `${index + 1} of ${shown.length}`;
  document.getElementById("previous").disabled = index <= 0;
  document.getElementById("next").disabled = index + 1 >= shown.length;
  history.replaceState(null, "", `#${row.id}`);
  if (!viewer.open) viewer.showModal();
  content.scrollTop = 0;
  content.focus();
}

function step(direction) {
  const shown = rows.filter((row) => !row.hidden);
  const row = shown[shown.indexOf(current) + direction];
  if (row) show(row);
}

function showLinked() {
  const row = rows.find((each) => `#${each.id}` === location.hash);
  if (!row) return;
  filters.reset();
  filterRows();
  show(row);
}

filters.addEventListener("input", filterRows);
filters.addEventListener("submit", (event) => event.preventDefault());
filters.addEventListener("reset", () => setTimeout(filterRows));

if (viewer) {
  document.getElementById("rows").addEventListener("click", (event) => {
    if (event.target.closest("button")) show(event.target.closest("tr"));
  });
  document.getElementById("previous").addEventListener("click", () => step(-1));
  document.getElementById("next").addEventListener("click", () => step(1));
  document.getElementById("close").addEventListener("click", () => viewer.close());
  viewer.addEventListener("close", () => {
    history.replaceState(null, "", "#samples");
    current?.querySelector("button").focus();
  });
  window.addEventListener("hashchange", showLinked);
  showLinked();
}
filterRows();
