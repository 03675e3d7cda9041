// What all views share: the data, words for numbers, small helpers of the page.
const $ = (id) => document.getElementById(id);

// A text of the page, which is compressed there.
async function unpacked(id) {
  const bytes = Uint8Array.from(atob($(id).textContent), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip")))
    .text();
}
document.head.append(make("script", { text: await unpacked("plotly") })); // it runs at once
const DATA = JSON.parse(await unpacked("data"));
const PICKED = {
  plan: DATA.chosen,
  mode: "op",
  scale: "same",
  axis: DATA.budget ? DATA.budget.of : "pool",
};
const KINDS = [
  "kept for the backward pass",
  "gone before the backward pass",
  "recomputed",
  "gradients",
];
const CHOICES = { k: "kept", r: "recomputed", f: "freed" };
const MIB = 2 ** 20;
// The unit of all sizes, as Python chooses it, and the digits after the point.
const [UNIT, UNIT_BYTES, DIGITS] = DATA.largest < MIB
  ? ["KiB", 1024, 1]
  : DATA.largest < 10 * 1024 * MIB
  ? ["MiB", MIB, 1]
  : ["GiB", 1024 * MIB, 2];

const plan = () => DATA.plans[PICKED.plan];

// As Python rounds: of two that are as near, the even one.
function fixed(x, digits) {
  const scaled = x * 10 ** digits, below = Math.floor(scaled);
  if (scaled - below === 0.5) {
    return ((below % 2 ? below + 1 : below) / 10 ** digits).toFixed(digits);
  }
  return x.toFixed(digits);
}
function inWords(nbytes) {
  const number = fixed(nbytes / UNIT_BYTES, DIGITS);
  const isLittle = nbytes > 0 && Number(number) === 0;
  return `${isLittle ? `<${10 ** -DIGITS}` : number} ${UNIT}`;
}
const percent = (share, digits) => `${fixed(100 * share, digits)} %`;
function inTime(seconds) {
  if (!seconds) return "0";
  const [unit, each] = seconds < 1e-3 ? ["µs", 1e-6] : seconds < 1 ? ["ms", 1e-3] : ["s", 1];
  return `${Number((seconds / each).toPrecision(3))} ${unit}`;
}

// An element with a class, a text, children. Texts of a network are never read as HTML.
function make(tag, about = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(about)) {
    if (key === "text") made.textContent = value;
    else if (key === "on") {
      for (const [event, run] of Object.entries(value)) made.addEventListener(event, run);
    } else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}
function fill(target, ...children) {
  (typeof target === "string" ? $(target) : target).replaceChildren(...children);
}
// A row of buttons of which one is pressed.
function choices(id, title, options, key, run) {
  const buttons = Object.entries(options).map(([value, text]) =>
    make("button", {
      type: "button",
      text,
      "data-value": value,
      "aria-pressed": String(PICKED[key] === value),
      on: {
        click: () => {
          PICKED[key] = value;
          choices(id, title, options, key, run);
          run();
        },
      },
    })
  );
  fill(id, make("span", { class: "quiet", text: title }), ...buttons);
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const narrow = () => window.innerWidth < 760;
function layout(more) {
  const axis = {
    color: colour("--quiet"),
    gridcolor: colour("--line"),
    zeroline: false,
    linecolor: colour("--line"),
    fixedrange: narrow(),
    automargin: true,
  };
  const given = {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    showlegend: false,
    modebar: {
      bgcolor: "rgba(0,0,0,0)",
      color: colour("--quiet"),
      activecolor: colour("--accent"),
    },
    font: {
      color: colour("--ink"),
      family: "system-ui, -apple-system, Segoe UI, Roboto, Arial, sans-serif",
      size: 12.5,
    },
    margin: { l: 56, r: 14, t: 22, b: 40 },
    dragmode: narrow() ? false : "zoom",
    ...more,
  };
  if (document.documentElement.dataset.paper) given.width = 680; // of a sheet
  given.xaxis = { ...axis, ...more.xaxis };
  given.yaxis = { ...axis, ...more.yaxis };
  return given;
}
const CONFIG = {
  displaylogo: false,
  responsive: true,
  showTips: false,
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "zoom2d", "pan2d"],
};
