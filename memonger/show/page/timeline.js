// Memory over a training step: which tensors are alive while each operator runs.
const MODES = { op: "operator", part: "part of the network", kind: "what the plan does" };
const GROUPS = 8; // that have a colour of their own
const AXIS = "operators of one training step, as they run";
const SHOWN = { unplanned: null, planned: null }; // what each picture shows: a timeline, its stacks

const STATE_WORDS = ["kept", "freed in the forward pass", "recomputed", "gradient"];

// The group of a tensor, a text.
function groupOf(t, k) {
  if (PICKED.mode === "kind") return KINDS[t.state[k]];
  const row = t.row[k];
  if (row < 0) return "sums and others";
  return DATA.operators[PICKED.mode][row];
}
// The groups of both pictures, the same ones in the same colours.
function groupsOf(timelines) {
  if (PICKED.mode === "kind") return KINDS.map((name, k) => ({ name, colour: `--k${k}` }));
  const weight = new Map();
  for (const { tensors: t } of timelines) {
    for (let k = 0; k < t.bytes.length; k++) {
      const name = groupOf(t, k);
      weight.set(name, (weight.get(name) || 0) + t.bytes[k] * (t.last[k] - t.first[k] + 1));
    }
  }
  let names = [...weight.keys()].sort((a, b) => weight.get(b) - weight.get(a));
  if (PICKED.mode === "part") {
    names = [...new Set([...DATA.operators.part, ...names])].filter((name) => weight.has(name));
  }
  const several = names.length > GROUPS;
  const own = names.slice(0, several ? GROUPS : names.length).filter((name) => name !== "others");
  const groups = own.map((name, k) => ({ name, colour: `--s${Math.min(k, GROUPS)}` }));
  if (own.length < names.length) groups.push({ name: "others", colour: `--s${GROUPS}` });
  return groups;
}
// The bytes of each group in each drawn step.
function stacksOf(line, groups) {
  const t = line.tensors, n = line.drawn.length;
  const number = new Map(groups.map((group, k) => [group.name, k]));
  const stacks = groups.map(() => new Float64Array(n + 1));
  const of = new Int32Array(t.bytes.length);
  for (let k = 0; k < t.bytes.length; k++) {
    const found = number.get(groupOf(t, k));
    of[k] = found === undefined ? groups.length - 1 : found;
    stacks[of[k]][t.first[k]] += t.bytes[k];
    stacks[of[k]][t.last[k] + 1] -= t.bytes[k];
  }
  for (const stack of stacks) for (let i = 1; i <= n; i++) stack[i] += stack[i - 1];
  return { line, groups, stacks, of };
}

function drawTimelines() {
  const lines = { unplanned: DATA.unplanned, planned: plan().timeline };
  const groups = groupsOf(
    [...DATA.plans.map((each) => each.timeline), DATA.unplanned].filter((line) =>
      Object.values(lines).includes(line)
    ),
  );
  const figures = plan().figures;
  const pools = { unplanned: figures.unplanned_bytes, planned: figures.pool_bytes };
  const highest = (which) => 1.14 * Math.max(lines[which].peak_bytes, pools[which], 1) / UNIT_BYTES;
  const both = Math.max(highest("unplanned"), highest("planned"));
  fill(
    "legend",
    ...groups.map((group) =>
      make("span", {}, make("i", { style: `background:var(${group.colour})` }), group.name)
    ),
  );
  $("unplanned-title").textContent = `Without a plan: a pool of ${inWords(pools.unplanned)}`;
  $("planned-title").textContent = `With the plan: a pool of ${inWords(pools.planned)}`;
  for (const [which, line] of Object.entries(lines)) {
    SHOWN[which] = stacksOf(line, groups);
    drawTimeline(which, PICKED.scale === "same" ? both : highest(which), pools[which]);
  }
  const [merged] = Object.values(lines).filter((line) => line.drawn.length < line.steps);
  $("drawn").textContent = merged
    ? `Of ${merged.steps} steps ${merged.drawn.length} are drawn, ` +
      "of neighbours the one with the most memory."
    : "";
  if (figures.peak_bytes !== lines.planned.peak_bytes) {
    $("drawn").textContent += " It is drawn operator by operator, as if pointwise fusion were off.";
  }
  pin("planned", lines.planned.drawn.indexOf(lines.planned.peak));
}

function drawTimeline(which, most, pool) {
  const { line, groups, stacks } = SHOWN[which], n = line.drawn.length;
  const x = [...line.drawn, line.steps];
  if (n) x[0] = 0;
  const traces = groups.map((group, k) => {
    const y = Array.from(stacks[k], (value) => value / UNIT_BYTES);
    y[n] = n ? y[n - 1] : 0;
    return {
      x,
      y,
      name: group.name,
      type: "scatter",
      mode: "lines",
      stackgroup: "all",
      hoverinfo: "none",
      fillcolor: colour(group.colour),
      line: { shape: "hv", width: 0.4, color: colour("--card") },
    };
  });
  const peak = line.peak_bytes / UNIT_BYTES, right = line.peak > 0.6 * line.steps;
  traces.push({
    x: [line.peak + 0.5],
    y: [peak],
    type: "scatter",
    mode: "markers",
    hoverinfo: "skip",
    marker: {
      symbol: "triangle-down",
      size: 11,
      color: colour("--ink"),
      line: { color: colour("--card"), width: 1.5 },
    },
    cliponaxis: false,
  });
  const note = (text, about) => ({
    text,
    showarrow: false,
    font: { size: 12, color: colour("--quiet") },
    ...about,
  });
  const rule = (about, dash, named) => ({
    type: "line",
    line: { color: colour(named), width: 1, dash },
    ...about,
  });
  Plotly.react(
    `${which}-plot`,
    traces,
    layout({
      height: narrow() ? 260 : 300,
      hovermode: "x",
      hoverdistance: -1,
      uirevision: `${which} ${PICKED.plan} ${PICKED.scale}`,
      xaxis: {
        title: { text: AXIS, font: { size: 12 } },
        range: [0, Math.max(1, line.steps)],
        showgrid: false,
        tickformat: ",d",
      },
      yaxis: {
        title: { text: `alive, ${UNIT}`, font: { size: 12 } },
        range: [0, most],
        rangemode: "nonnegative",
        tickformat: most > 10 ? ",d" : "",
      },
      shapes: [
        {
          type: "rect",
          layer: "below",
          xref: "x",
          yref: "paper",
          x0: line.backward,
          x1: line.steps,
          y0: 0,
          y1: 1,
          fillcolor: colour("--shade"),
          line: { width: 0 },
        },
        rule(
          { xref: "x", yref: "paper", x0: line.backward, x1: line.backward, y0: 0, y1: 1 },
          "dot",
          "--quiet",
        ),
        rule(
          { xref: "paper", yref: "y", x0: 0, x1: 1, y0: pool / UNIT_BYTES, y1: pool / UNIT_BYTES },
          "dash",
          "--accent",
        ),
      ],
      annotations: [
        note("forward pass", {
          x: line.backward,
          xanchor: "right",
          xshift: -5,
          y: 1,
          yref: "paper",
          yanchor: "bottom",
        }),
        note("backward pass", {
          x: line.backward,
          xanchor: "left",
          xshift: 5,
          y: 1,
          yref: "paper",
          yanchor: "bottom",
        }),
        note(`pool ${inWords(pool)}`, {
          x: 0,
          xref: "paper",
          xanchor: "left",
          xshift: 4,
          y: pool / UNIT_BYTES,
          yanchor: "bottom",
          font: { size: 12, color: colour("--accent") },
        }),
        note(`<b>peak ${inWords(line.peak_bytes)}</b>`, {
          x: line.peak + 0.5,
          xanchor: right ? "right" : "left",
          xshift: right ? -9 : 9,
          y: peak,
          yanchor: peak > pool / UNIT_BYTES - 0.02 * most ? "bottom" : "middle",
          yshift: peak > pool / UNIT_BYTES - 0.02 * most ? 13 : 5,
          font: { size: 12, color: colour("--ink") },
        }),
      ],
    }),
    CONFIG,
  );
}

const sumOf = (column, rows) => rows.reduce((sum, k) => sum + column[k], 0);

// The drawn step at a place of the axis.
function drawnAt(line, x) {
  let low = 0, high = line.drawn.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (line.drawn[middle] <= x) low = middle;
    else high = middle - 1;
  }
  return low;
}
function aliveAt({ line, of }, at, group = -1) {
  const t = line.tensors, found = [];
  for (let k = 0; k < t.bytes.length; k++) {
    if (t.first[k] <= at && at <= t.last[k] && (group < 0 || of[k] === group)) found.push(k);
  }
  return found.sort((a, b) => t.bytes[b] - t.bytes[a]);
}
function runningAt(line, at) {
  const row = line.runs[at], phase = line.phase[at];
  if (row < 0) return phase === 2 ? "gradients are added up" : "";
  const who = `${DATA.operators.name[row]} (${DATA.operators.op[row]})`;
  return phase === 2 ? `the gradient of ${who}` : phase === 1 ? `${who}, recomputed` : who;
}
function tensorName(t, k) {
  const row = t.row[k], label = t.label[k], output = t.output[k] ? `[${t.output[k]}]` : "";
  if (label && row < 0) return label;
  const name = label ? `${label} (a copy)` : DATA.operators.name[row] + output;
  return t.state[k] === 3 ? `gradient of ${name}` : name;
}
function tensorOp(t, k) {
  return t.row[k] < 0 ? "" : DATA.operators.op[t.row[k]];
}
function lives(t, k) {
  return t.start[k] === t.stop[k]
    ? `in step ${t.start[k]} alone`
    : `steps ${t.start[k]} to ${t.stop[k]}`;
}
function reasonOf(which, t, k) {
  if (t.reason[k]) return t.reason[k];
  const row = t.row[k];
  if (t.state[k] === 1 && row >= 0) {
    return which === "planned" && againOf(row) ? "it is recomputed later" : "no gradient reads it";
  }
  if (t.state[k] === 2 && row >= 0) {
    return `for the backward pass, which takes ${inTime(DATA.operators.forward[row])}`;
  }
  if (t.state[k] !== 0) return "";
  return which === "unplanned" ? "without a plan all is kept that a gradient reads" : "";
}

function showTip(which, event) {
  const shown = SHOWN[which], { line, groups, stacks } = shown, t = line.tensors;
  const at = drawnAt(line, event.xvals[0]);
  let below = 0, group = -1;
  for (let k = 0; k < groups.length && group < 0; k++) {
    below += stacks[k][at] / UNIT_BYTES;
    if (event.yvals[0] <= below) group = k;
  }
  const tip = $("tip"), step = `step ${line.drawn[at]} of ${line.steps}`;
  const lines = [
    make("div", { class: "quiet", text: `${step}: ${runningAt(line, at)}` }),
    make("div", { text: `${inWords(line.live[at])} alive` }),
  ];
  if (group >= 0) {
    const alive = aliveAt(shown, at, group);
    lines.push(
      make(
        "div",
        { class: "who" },
        make("i", { style: `background:var(${groups[group].colour})` }),
        ` ${groups[group].name}: ${inWords(stacks[group][at])} in ${sumOf(t.count, alive)} tensors`,
      ),
    );
    for (const k of alive.slice(0, 2)) {
      const many = t.count[k] > 1 ? ` and ${t.count[k] - 1} more` : "";
      const reason = reasonOf(which, t, k);
      lines.push(
        make(
          "div",
          { class: "tensor" },
          make("div", { text: `${tensorName(t, k)}${many}` }),
          make("div", {
            class: "quiet",
            text: `${tensorOp(t, k)} ${t.shape[k]} · ${inWords(t.bytes[k])} · ${lives(t, k)}`,
          }),
          make("div", {
            class: "quiet",
            text: STATE_WORDS[t.state[k]] + (reason ? `: ${reason}` : ""),
          }),
        ),
      );
    }
  }
  fill(tip, ...lines);
  tip.hidden = false;
  const { clientX: x, clientY: y } = event.event, box = tip.getBoundingClientRect();
  const left = x + 18 + box.width > window.innerWidth ? x - 18 - box.width : x + 18;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${Math.max(8, Math.min(y + 14, window.innerHeight - box.height - 8))}px`;
}

// List what is alive in a drawn step.
function pin(which, at) {
  const shown = SHOWN[which], { line } = shown, t = line.tensors;
  const alive = aliveAt(shown, at), few = alive.slice(0, 12), rest = alive.slice(12);
  const where = which === "planned" ? "With the plan" : "Without a plan";
  const peak = line.drawn[at] === line.peak ? ", the peak" : "";
  $("alive-title").textContent = alive.length
    ? `${where}, step ${line.drawn[at]} of ${line.steps}${peak}: ` +
      `${inWords(line.live[at])} alive in ${runningAt(line, at) || "it"}`
    : "Nothing is alive in the pool";
  const titles = [["Memory", 1], ["Tensor"], ["Operator"], ["Shape"], ["Lives"], ["What and why"]];
  fill(
    document.querySelector("#alive thead"),
    make(
      "tr",
      {},
      ...titles.map(([text, number]) => make("th", { text, class: number ? "number" : "" })),
    ),
  );
  fill(
    document.querySelector("#alive tbody"),
    ...few.map((k) => {
      const reason = reasonOf(which, t, k),
        many = t.count[k] > 1 ? ` and ${t.count[k] - 1} more` : "";
      return make(
        "tr",
        {},
        make("td", { class: "number", text: inWords(t.bytes[k]), "data-bytes": t.bytes[k] }),
        make("td", { class: "name", text: tensorName(t, k) + many }),
        make("td", { text: tensorOp(t, k) }),
        make("td", { class: "whole", text: t.shape[k] }),
        make("td", { class: "whole", text: lives(t, k) }),
        make("td", { class: "why", text: STATE_WORDS[t.state[k]] + (reason ? `: ${reason}` : "") }),
      );
    }),
  );
  $("alive-rest").textContent = rest.length
    ? `${inWords(sumOf(t.bytes, rest))} more in ${sumOf(t.count, rest)} tensors.`
    : "";
}

function listenToTimelines() {
  for (const which of Object.keys(SHOWN)) {
    const plot = $(`${which}-plot`);
    plot.on("plotly_hover", (event) => showTip(which, event));
    plot.on("plotly_unhover", () => {
      $("tip").hidden = true;
    });
    plot.on("plotly_click", (event) => {
      const x = event.xvals ? event.xvals[0] : event.points[0].x;
      pin(which, drawnAt(SHOWN[which].line, x));
    });
  }
}
