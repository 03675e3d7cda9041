// Samples a second against the batch: without a plan, and with the fastest that fits.
const takenBy = (each) => each.figures[`${DATA.budget.of}_bytes`];
const unplannedBy = (each) =>
  each.figures[DATA.budget.of === "pool" ? "unplanned_bytes" : "unplanned_device_bytes"];
const ofBudget = (nbytes) => `${inWords(nbytes)} of ${inWords(DATA.budget.bytes)}`;
const perSecond = (each) => each.batch / (each.step_seconds * (1 + each.figures.time_overhead));
// Batches that fit without a plan, and have none.
const FITTING = DATA.batches.filter((each) => unplannedBy(each) <= DATA.budget.bytes);
const [LAST_FITTING] = FITTING.slice(-1), [LARGEST] = DATA.batches.slice(-1);

function hoverText(each) {
  if (each.kind === "none") return `${ofBudget(takenBy(each))}<br>no plan is needed`;
  const { time_overhead: time, recomputed } = each.figures;
  const memory = `${ofBudget(takenBy(each))}, ${inWords(unplannedBy(each))} without a plan`;
  const work = `+${percent(time, 1)} time, ${recomputed} operators recomputed`;
  return `${memory}<br>${DATA.kinds[each.kind]}: ${work}`;
}
function drawBatches() {
  if (!LARGEST) return;
  const line = (name, points, kind) => ({
    x: points.map((each) => each.batch),
    y: points.map(perSecond),
    text: points.map(hoverText),
    customdata: points.map((each) => DATA.batches.indexOf(each)),
    name,
    type: "scatter",
    mode: "lines+markers",
    cliponaxis: false,
    line: { color: colour(POINTS[kind]), width: 2 },
    marker: {
      symbol: SYMBOLS[kind],
      size: 10,
      color: colour(POINTS[kind]),
      line: { color: colour("--card"), width: 1.5 },
    },
    hovertemplate: `a batch of %{x}: %{y:,.3~r} samples/s, as predicted<br>%{text}<extra></extra>`,
  });
  // From where the other line ends.
  const planned = DATA.batches.filter((each) => each === LAST_FITTING || !FITTING.includes(each));
  const traces = LARGEST === LAST_FITTING
    ? []
    : [line("with the fastest plan that fits", planned, "marks")];
  if (LAST_FITTING) traces.push(line("without a plan", FITTING, "none"));
  const ends = LAST_FITTING && LAST_FITTING !== LARGEST ? [LAST_FITTING, LARGEST] : [LARGEST],
    font = { color: colour("--danger"), size: 12 };
  Plotly.react(
    "batches-plot",
    traces,
    layout({
      height: 380,
      hovermode: "closest",
      showlegend: true,
      legend: { orientation: "h", x: 0, y: 1.09, yanchor: "bottom" },
      margin: { l: 56, r: 14, t: 66, b: 44 },
      shapes: ends.map(({ batch }) => ({
        type: "line",
        x0: batch,
        x1: batch,
        y0: 0,
        y1: 1,
        yref: "paper",
        line: { color: colour("--danger"), width: 1.5, dash: "dash" },
      })),
      annotations: ends.map(({ batch }) => ({
        x: batch,
        y: 1,
        yref: "paper",
        yanchor: "bottom",
        text: `full at ${batch}`,
        showarrow: false,
        font,
        xanchor: batch < LARGEST.batch && batch > 0.7 * LARGEST.batch ? "right" : "center",
      })), // not over the other
      xaxis: {
        title: { text: "batch", font: { size: 12 } },
        range: [0, 1.08 * LARGEST.batch],
        tickformat: ",d",
        dtick: LARGEST.batch < 8 ? 1 : undefined,
      },
      yaxis: {
        title: { text: "samples a second, predicted", font: { size: 12 } },
        rangemode: "tozero",
      },
    }),
    CONFIG,
  );
}
function pinBatch(each) {
  const f = each.figures, speed = Number(perSecond(each).toPrecision(3)).toLocaleString("en");
  $("batch-title").textContent =
    `A batch of ${each.batch}: ${speed} samples a second, as predicted`;
  const taken = ofBudget(takenBy(each)), time = percent(f.time_overhead, 1);
  const work = `${f.recomputed} of ${f.kept + f.recomputed} operators are recomputed`;
  fill(
    "batch-calls",
    make("p", {
      text: each.kind === "none"
        ? `It takes ${taken} without a plan.`
        : `The plan takes ${taken}, and adds ${time} to the time of a step. ${work}.`,
    }),
    ...callsOf(each),
  );
}
function listenToBatches() {
  if (!LARGEST) return;
  const { bytes, of, state, room } = DATA.budget,
    where = of === "device" ? "the device" : "MXNet's pool";
  const without = LAST_FITTING ? `of ${LAST_FITTING.batch}` : "none";
  const sentences = [
    `A batch of ${LARGEST.batch} fits into ${inWords(bytes)} of ${where} with a plan, ` +
    `${without} without one.`,
  ];
  if (state) sentences.push(`The optimizer's state takes ${inWords(state)} more.`);
  if (room) sentences.push(`CUDA and cuDNN have ${inWords(room)} more.`);
  sentences.push("Each point is a batch that was planned. Click one to see its plan.");
  $("batches-about").textContent = sentences.join(" ");
  pinBatch(LARGEST);
  $("batches-plot").on(
    "plotly_click",
    (event) => pinBatch(DATA.batches[event.points[0].customdata]),
  );
}
