// Memory against time: each point a plan.
const SYMBOLS = {
  none: "diamond",
  placed: "square-open",
  marks: "circle",
  schedule: "square",
  original: "triangle-up",
};
const POINTS = {
  none: "--s8",
  placed: "--s2",
  marks: "--s0",
  schedule: "--s1",
  original: "--s4",
};

const memoryOf = (each) => each.figures[`${PICKED.axis}_bytes`];

function drawFrontier() {
  if (DATA.plans.length < 2) return;
  const traces = [];
  for (const [kind, name] of Object.entries(DATA.kinds)) {
    const of = DATA.plans.map((_, k) => k).filter((k) => DATA.plans[k].kind === kind);
    if (!of.length) continue;
    traces.push({
      x: of.map((k) => memoryOf(DATA.plans[k]) / UNIT_BYTES),
      y: of.map((k) => 100 * DATA.plans[k].figures.time_overhead),
      customdata: of,
      name,
      type: "scatter",
      mode: "markers",
      marker: {
        symbol: SYMBOLS[kind],
        size: 11,
        color: colour(POINTS[kind]),
        line: { color: colour("--card"), width: 1.5 },
      },
      hovertemplate: `${name}<br>%{x:,.${DIGITS}f} ${UNIT}, +%{y:.1f} % time<extra></extra>`,
    });
  }
  const now = plan();
  traces.push({
    x: [memoryOf(now) / UNIT_BYTES],
    y: [100 * now.figures.time_overhead],
    type: "scatter",
    mode: "markers",
    hoverinfo: "skip",
    showlegend: false,
    marker: { symbol: "circle-open", size: 20, color: colour("--ink"), line: { width: 2 } },
  });
  const memories = DATA.plans.map(memoryOf),
    budget = DATA.budget && DATA.budget.of === PICKED.axis ? DATA.budget.bytes : null;
  const most = 1.08 * Math.max(...memories, budget || 0) / UNIT_BYTES,
    highest = Math.max(1, ...DATA.plans.map((each) => 100 * each.figures.time_overhead));
  const shapes = [], annotations = [];
  if (budget !== null) {
    shapes.push({
      type: "line",
      x0: budget / UNIT_BYTES,
      x1: budget / UNIT_BYTES,
      y0: 0,
      y1: 1,
      yref: "paper",
      line: { color: colour("--danger"), width: 1.5, dash: "dash" },
    });
    annotations.push({
      x: budget / UNIT_BYTES,
      y: 1,
      yref: "paper",
      yanchor: "bottom",
      text: budgetText(),
      showarrow: false,
      font: { color: colour("--danger"), size: 12 },
    });
  }
  const title = `memory of the ${PICKED.axis}, ${UNIT}`;
  Plotly.react(
    "frontier-plot",
    traces,
    layout({
      height: 420,
      hovermode: "closest",
      shapes,
      annotations,
      showlegend: true,
      uirevision: PICKED.axis,
      legend: { orientation: "h", x: 0, y: 1.06, yanchor: "bottom" },
      margin: { l: 56, r: 14, t: 62, b: 44 },
      xaxis: {
        title: { text: title, font: { size: 12 } },
        range: [0, most],
        tickformat: most > 10 ? ",d" : "",
      },
      yaxis: {
        title: { text: "time added to a step, %", font: { size: 12 } },
        range: [-0.06 * highest, 1.1 * highest],
      },
    }),
    CONFIG,
  );
}

function listenToFrontier() {
  if (DATA.plans.length < 2) return;
  $("placing").textContent = DATA.plans.some((each) => each.kind === "placed")
    ? `Where nothing is recomputed, ${DATA.placing}.`
    : "";
  choices(
    "axes",
    "Memory of",
    { pool: "MXNet's pool", device: "the whole device" },
    "axis",
    drawFrontier,
  );
  $("frontier-plot").on("plotly_click", (event) => {
    if (event.points[0].customdata !== undefined) show(event.points[0].customdata);
  });
}
