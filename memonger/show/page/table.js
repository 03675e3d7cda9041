// The operators: groups first, then each one, sorted and filtered.
const PAGE_ROWS = 50;
const LIST = { key: "number", down: false, rows: PAGE_ROWS, group: null };
const OPS = DATA.operators;
const COLUMNS = [
  ["number", "#", (r) => r, (r) => String(r), 1],
  ["name", "Operator", (r) => OPS.name[r], (r) => OPS.name[r]],
  ["op", "Kind", (r) => OPS.op[r], (r) => OPS.op[r]],
  ["shape", "Result", (r) => OPS.bytes[r], (r) => OPS.shape[r]],
  ["bytes", "Memory", (r) => OPS.bytes[r], (r) => inWords(OPS.bytes[r]), 1],
  ["forward", "Forward", (r) => OPS.forward[r], (r) => inTime(OPS.forward[r]), 1],
  ["gradient", "Gradient", (r) => OPS.gradient[r], (r) => inTime(OPS.gradient[r]), 1],
  ["choice", "Plan", (r) => choiceOf(r), (r) => choiceText(r)],
  ["why", "Why", (r) => whyText(r), (r) => whyText(r)],
];
const WHYS = {
  output: "an output of the network",
  rule: "a rule keeps it",
  you: "you keep it",
  cut: "others are recomputed from it",
  mark: "others are recomputed from it",
  gradient: "a gradient reads it",
  cheap: "it costs next to nothing",
  budget: "the budget allows it",
  search: "no smaller plan was found that recomputes it",
};

// How often an operator runs again, and how many of its tensors have one of these fates.
const againOf = (r) => plan().times[r] - 1;
function countOf(r, fates) {
  return [...plan().fates[r]].filter((fate) => fates.includes(fate)).length;
}
const FATES = { k: "kc", r: "r", f: "f" }; // of the tensors that count as kept and so on
function choiceOf(r) {
  return againOf(r) ? "r" : countOf(r, FATES.k) ? "k" : "f";
}
const isOf = (r, choice) => choiceOf(r) === choice || countOf(r, FATES[choice]) > 0;
function choiceText(r) {
  return CHOICES[choiceOf(r)] + (againOf(r) > 1 ? ` ${againOf(r)} times` : "");
}
function whyText(r) {
  const { reason, why, again_bytes, fates } = plan();
  const told = reason ? reason[r] : WHYS[why[r]] || why[r];
  const kept = countOf(r, FATES.k), all = fates[r].length, some = `${kept} of ${all} tensors`;
  if (!againOf(r)) {
    if (!kept) return "no gradient reads it, or its memory is handed on";
    return kept < all ? `${some}: ${told}` : told;
  }
  const time = `it takes ${inTime(OPS.forward[r] * againOf(r))} more`;
  if (countOf(r, "c")) return `a copy of its result is kept: ${told}; ${time}`;
  if (kept === all) return `kept for its first readers: ${told}; run again later, ${time}`;
  const work = `${inWords(again_bytes[r])} are not held; ${time}`;
  return kept ? `${work}; ${some} are kept: ${told}` : work;
}
const groupName = (r) => OPS[PICKED.mode === "kind" ? "group" : PICKED.mode][r];

function drawGroups() {
  const groups = new Map();
  for (let r = 0; r < OPS.name.length; r++) {
    const name = groupName(r);
    if (!groups.has(name)) {
      groups.set(name, { name, count: 0, bytes: 0, time: 0, k: 0, r: 0, f: 0 });
    }
    const group = groups.get(name);
    group.count += 1;
    group.bytes += OPS.bytes[r];
    group.time += OPS.forward[r] + OPS.gradient[r];
    for (const choice in FATES) group[choice] += countOf(r, FATES[choice]);
  }
  const sums = Object.entries(plan().sums).map(([choice, [nbytes, count]]) =>
    `${choice} ${inWords(nbytes)}, ${count} tensors`
  );
  $("sums").textContent = `Tensors of the forward pass: ${sums.join("; ")}.`;
  const head = [
    ["Group"],
    ["Operators", 1],
    ["Results", 1],
    ["Time", 1],
    ["Tensors kept", 1],
    ["recomputed", 1],
    ["freed", 1],
  ];
  fill(
    document.querySelector("#groups thead"),
    make(
      "tr",
      {},
      ...head.map(([text, number]) => make("th", { text, class: number ? "number" : "" })),
    ),
  );
  const rows = [...groups.values()].sort((a, b) => b.bytes - a.bytes).map((g) =>
    make(
      "tr",
      {
        class: "group",
        tabindex: "0",
        "data-group": g.name,
        on: {
          click: () => openGroup(g.name),
          keydown: (e) => {
            if (e.key === "Enter") openGroup(g.name);
          },
        },
      },
      make("td", { class: "name", text: g.name }),
      ...[g.count, inWords(g.bytes), inTime(g.time), g.k, g.r, g.f].map((text) =>
        make("td", { class: "number", text: String(text) })
      ),
    )
  );
  fill(document.querySelector("#groups tbody"), ...rows);
}
function openGroup(name) {
  LIST.group = LIST.group === name ? null : name;
  LIST.rows = PAGE_ROWS;
  drawTable();
  $("table").scrollIntoView({ block: "nearest" });
}

function foundRows() {
  const text = $("search").value.trim().toLowerCase(), choice = $("choice").value, found = [];
  for (let r = 0; r < OPS.name.length; r++) {
    if (choice && !isOf(r, choice)) continue;
    if (LIST.group !== null && groupName(r) !== LIST.group) continue;
    if (text && !`${OPS.name[r]} ${OPS.op[r]} ${whyText(r)}`.toLowerCase().includes(text)) continue;
    found.push(r);
  }
  const value = COLUMNS.find(([key]) => key === LIST.key)[2], sign = LIST.down ? -1 : 1;
  if (LIST.key === "number" && !LIST.down) return found;
  return found.sort((a, b) => {
    const x = value(a), y = value(b);
    return sign * (x < y ? -1 : x > y ? 1 : 0) || a - b;
  });
}
function sortBy(key) {
  LIST.down = LIST.key === key
    ? !LIST.down
    : ["bytes", "forward", "gradient", "shape"].includes(key);
  LIST.key = key;
  drawTable();
}
function drawTable() {
  const found = foundRows();
  fill(
    document.querySelector("#table thead"),
    make(
      "tr",
      {},
      ...COLUMNS.map(([key, text, , , number]) => {
        const sorted = LIST.key === key ? (LIST.down ? " ↓" : " ↑") : "";
        const order = sorted ? (LIST.down ? "descending" : "ascending") : "none";
        return make(
          "th",
          { class: number ? "number" : "", "aria-sort": order },
          make("button", {
            type: "button",
            text: text + sorted,
            "data-key": key,
            on: { click: () => sortBy(key) },
          }),
        );
      }),
    ),
  );
  fill(
    document.querySelector("#table tbody"),
    ...found.slice(0, LIST.rows).map((r) =>
      make(
        "tr",
        { "data-row": r },
        ...COLUMNS.map(([key, , , text, number]) => {
          if (key === "choice") {
            return make(
              "td",
              {},
              make("span", { class: `tag ${choiceOf(r)}`, text: text(r) }),
            );
          }
          return make("td", {
            class: number ? "number" : key === "name" ? "name" : key === "why" ? "why" : "whole",
            text: text(r),
          });
        }),
      )
    ),
  );
  const all = OPS.name.length, group = LIST.group === null ? "" : ` in ${LIST.group}`;
  $("found").textContent = found.length === all
    ? `${all} operators`
    : `${found.length} of ${all} operators${group}`;
  $("more").hidden = found.length <= LIST.rows;
}
function listenToTable() {
  const anew = () => {
    LIST.rows = PAGE_ROWS;
    drawTable();
  };
  $("search").addEventListener("input", anew);
  $("choice").addEventListener("change", anew);
  $("more").addEventListener("click", () => {
    LIST.rows += 4 * PAGE_ROWS;
    drawTable();
  });
}
