// Samples a second against the batch: without a plan, and with the fastest that fits.
const perSecond = (each) => each.batch / each.step_seconds;
const plannedPerSecond = (each) => perSecond(each) / (1 + each.figures.time_overhead);
const takenBy = (each) => each.figures[`${DATA.budget.of}_bytes`];
const unplannedBy = (each) => each.figures[DATA.budget.of === "pool" ? "unplanned_bytes" : "unplanned_device_bytes"];
const inSpeed = (perSecond) => Number(perSecond.toPrecision(3)).toLocaleString("en");
const ofBudget = (nbytes) => `${inWords(nbytes)} of ${inWords(DATA.budget.bytes)}`;

function drawBatches() {
  if (!DATA.batches.length) return;
  const fits = DATA.batches.filter((each) => unplannedBy(each) <= DATA.budget.bytes), most = DATA.batches[DATA.batches.length - 1];
  const planned = [...fits.slice(-1), ...DATA.batches.filter((each) => !fits.includes(each))]; // from where the other line ends
  const without = (each) => `${ofBudget(unplannedBy(each))}<br>no plan is needed`;
  const withPlan = (each) => (fits.includes(each) ? without(each) : `${ofBudget(takenBy(each))}, ${inWords(unplannedBy(each))} without a plan<br>`
    + `${FAMILIES[each.kind]}: +${percent(each.figures.time_overhead, 1)} time, ${each.figures.recomputed} operators recomputed`);
  const trace = (name, points, speed, text, symbol, named) => ({ x: points.map((each) => each.batch), y: points.map(speed), text: points.map(text),
    customdata: points.map((each) => DATA.batches.indexOf(each)), name, type: "scatter", mode: "lines+markers", cliponaxis: false,
    line: { color: colour(named), width: 2 }, marker: { symbol, size: 10, color: colour(named), line: { color: colour("--card"), width: 1.5 } },
    hovertemplate: `a batch of %{x}: %{y:,.3~r} samples/s, as predicted<br>%{text}<extra></extra>` });
  const traces = [trace("with the fastest plan that fits", planned, plannedPerSecond, withPlan, SYMBOLS.marks, POINTS.marks)];
  if (fits.length) traces.push(trace("without a plan", fits, perSecond, without, SYMBOLS.none, POINTS.none));
  const ends = [...new Set([...fits.slice(-1), most])];
  Plotly.react("batches-plot", traces, layout({
    height: 380, hovermode: "closest", showlegend: true, legend: { orientation: "h", x: 0, y: 1.09, yanchor: "bottom" }, margin: { l: 56, r: 14, t: 66, b: 44 },
    shapes: ends.map((each) => ({ type: "line", x0: each.batch, x1: each.batch, y0: 0, y1: 1, yref: "paper", line: { color: colour("--danger"), width: 1.5, dash: "dash" } })),
    annotations: ends.map((each) => ({ x: each.batch, y: 1, yref: "paper", yanchor: "bottom", showarrow: false, font: { color: colour("--danger"), size: 12 },
      text: `full at ${each.batch}`, xanchor: each !== most && each.batch > 0.7 * most.batch ? "right" : "center" })),
    xaxis: { title: { text: "batch", font: { size: 12 } }, range: [0, 1.08 * most.batch], tickformat: ",d" },
    yaxis: { title: { text: "samples a second, predicted", font: { size: 12 } }, rangemode: "tozero" },
  }), CONFIG);
}
function pinBatch(number) {
  const each = DATA.batches[number], f = each.figures;
  $("batch-title").textContent = `A batch of ${each.batch}: ${inSpeed(plannedPerSecond(each))} samples a second, as predicted`;
  fill("batch-calls", make("p", { text: each.kind === "none" ? `It takes ${ofBudget(takenBy(each))} without a plan.`
    : `The plan takes ${ofBudget(takenBy(each))}, and adds ${percent(f.time_overhead, 1)} to the time of a step. ${f.recomputed} of ${f.kept + f.recomputed} operators are recomputed.` }),
  ...callsOf(each));
}

function listenToBatches() {
  if (!DATA.batches.length) return;
  const { bytes, of, state } = DATA.budget, least = DATA.batches.filter((each) => unplannedBy(each) <= bytes).slice(-1)[0];
  $("batches-about").textContent = `A batch of ${DATA.batches[DATA.batches.length - 1].batch} fits into ${inWords(bytes)} of ${of === "device" ? "the device" : "MXNet's pool"} with a plan, `
    + `${least ? `of ${least.batch}` : "none"} without one.${state ? ` The optimizer's state takes ${inWords(state)} more.` : ""} Each point is a batch that was planned. Click one to see its plan.`;
  pinBatch(DATA.batches.length - 1);
  $("batches-plot").on("plotly_click", (event) => pinBatch(event.points[0].customdata));
}
