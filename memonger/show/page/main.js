// The headline, and what makes all views show one plan.
function tile(name, value, note, about = {}) {
  const made = make(
    "div",
    { class: "tile", "data-tile": name },
    make("div", { class: "name", text: name }),
    make("div", { class: about.good ? "value good" : "value", text: value }),
    make("div", { class: "note", text: note }),
  );
  if (about.bytes !== undefined) made.dataset.bytes = about.bytes;
  if (about.share !== undefined) {
    made.append(
      make(
        "div",
        { class: "meter" },
        make("div", { style: `width:${Math.max(0, Math.min(100, 100 * about.share))}%` }),
      ),
    );
  }
  return made;
}
// The calls that make a plan.
function callsOf(each) {
  const calls = [["Python", each.python], ["Shell", each.command]].filter(([, text]) => text);
  return calls.map(([name, text]) =>
    make(
      "div",
      { class: "call" },
      make(
        "div",
        { class: "head" },
        make("span", { text: name === "Python" ? "Make this plan in Python" : "or in a shell" }),
        make("button", {
          type: "button",
          text: "Copy",
          on: { click: (event) => copy(text, event.target) },
        }),
      ),
      make("pre", { text, "data-call": name }),
    )
  );
}
// Of what Python prints.
const FACTS = ["peak", "floor", "device", "held", "work", "recomputed", "slowest", "plan"];
function drawHeadline() {
  const f = plan().figures, whole = f.unplanned_bytes, after = f.pool_bytes, saved = whole - after;
  fill(
    "tiles",
    tile("Before", inWords(whole), "MXNet's pool without a plan", { bytes: whole, share: 1 }),
    tile("After", inWords(after), "MXNet's pool with the plan", {
      bytes: after,
      share: after / Math.max(1, whole),
    }),
    tile("Saved", percent(saved / Math.max(1, whole), 0), inWords(saved), {
      bytes: saved,
      good: saved > 0,
    }),
    tile("Time added", `+${percent(f.time_overhead, 1)}`, "to a training step, as predicted"),
  );
  const printed = plan().text.split("\n").map((line) => [line.slice(0, 10).trim(), line.slice(11)]);
  const facts = [
    ["peak", `${inWords(f.peak_bytes)} alive at once, in ${plan().timeline.running}`],
    ...printed,
  ];
  fill(
    "facts",
    ...facts.filter(([name]) => FACTS.includes(name)).flatMap((
      [name, text],
    ) => [make("dt", { text: name }), make("dd", { text })]),
  );
  fill("calls", ...callsOf(plan()));
  const notices = [];
  if (f.interrupted) {
    notices.push("The search was interrupted. This is the best plan that it had found.");
  }
  if (plan().kind === "none") {
    notices.push(
      "This is the network as it is: nothing is recomputed, and MXNet places the tensors.",
    );
  }
  if (DATA.budget && memoryBudgeted() > DATA.budget.bytes) {
    notices.push(`This plan does not fit: ${budgetText()}.`);
  }
  fill("notices", ...notices.map((text) => make("p", { class: "notice", text })));
  $("printed").textContent = plan().text;
}
function budgetText() {
  const { bytes, state, room } = DATA.budget;
  return `budget${state ? " less optimizer" : room ? " less CUDA" : ""} ${inWords(bytes)}`;
}
const memoryBudgeted = () => plan().figures[`${DATA.budget.of}_bytes`];

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch (refused) { // where a page from disk may not
    const area = document.body.appendChild(make("textarea", { text }));
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.textContent = "Copied";
  setTimeout(() => {
    button.textContent = "Copy";
  }, 1200);
}

function show(number) {
  PICKED.plan = Math.max(0, Math.min(DATA.plans.length - 1, number));
  $("plan").value = String(PICKED.plan);
  draw();
}
function draw() {
  $("tip").hidden = true;
  drawHeadline();
  drawTimelines();
  drawFrontier();
  drawBatches();
  drawGroups();
  drawTable();
}

document.title = `${DATA.network} · memonger`;
$("title").textContent = DATA.network;
$("subtitle").textContent = [
  `${OPS.name.length} operators`,
  ...DATA.inputs,
  `planned for ${DATA.device}`,
].join(" · ");
$("footer").textContent =
  `Made by memonger ${DATA.version}. Memory is MXNet's own plan, replayed; ` +
  `times are predicted (a step without a plan: ${inTime(DATA.step_seconds)}).`;
fill(
  "plan",
  ...DATA.plans.map((each, k) =>
    make("option", {
      value: k,
      text: [
        inWords(each.figures.pool_bytes),
        `+${percent(each.figures.time_overhead, 1)} time`,
        DATA.kinds[each.kind],
      ].join(", "),
    })
  ),
);
$("chooser").hidden = $("frontier").hidden = DATA.plans.length < 2; // what is hidden has no width
$("batches").hidden = !LARGEST;
$("plan").value = String(PICKED.plan);
$("plan").addEventListener("change", () => show(Number($("plan").value)));
$("before-plan").addEventListener("click", () => show(PICKED.plan - 1));
$("next-plan").addEventListener("click", () => show(PICKED.plan + 1));
choices("modes", "Stacked by", MODES, "mode", () => {
  LIST.group = null;
  draw();
});
choices("scales", "Scale", { same: "the same", own: "its own" }, "scale", drawTimelines);
listenToTable();
draw();
listenToTimelines();
listenToFrontier();
listenToBatches();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
let was = narrow();
window.addEventListener("resize", () => {
  if (was !== narrow()) {
    was = narrow();
    draw();
  }
});
// On paper it is light, and as wide as that.
window.addEventListener("beforeprint", () => {
  document.documentElement.dataset.paper = "true";
  draw();
});
window.addEventListener("afterprint", () => {
  delete document.documentElement.dataset.paper;
  draw();
  for (const plot of document.querySelectorAll(".js-plotly-plot")) Plotly.Plots.resize(plot);
});
$("undrawn").remove();
document.documentElement.dataset.ready = "true";
