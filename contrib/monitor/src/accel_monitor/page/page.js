"use strict";
const runs = JSON.parse(document.getElementById("runs").textContent);
const PHASES = ["data", "forward", "forward_backward", "backward", "optimizer", "collectives", "checkpoint", "other", "between"];
const PHASE_COLOURS = { data: 4, forward: 0, forward_backward: 0, backward: 1, optimizer: 2, collectives: 7, checkpoint: 3, other: 5, between: 6 };
const MOST_MARKS = 30;
const FROM_ZERO = ["samples_per_second", "items_per_second", "seconds"];
const hidden = new Set();
const control = (name) => document.getElementById(name);

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const ofRun = (index) => colour(`run${index % 6}`);

// A mean that forgets, without a bias to the first values; gaps stay gaps.
function smoothed(values, share) {
  let mean = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = share * mean + (1 - share) * value;
    weight = share * weight + (1 - share);
    return mean / weight;
  });
}

// Seconds in a unit that suits the longest of them.
function clock() {
  const longest = Math.max(...runs.map((run) => run.seconds));
  return longest > 7200 ? [3600, "hours"] : longest > 180 ? [60, "minutes"] : [1, "seconds"];
}

function layout(more) {
  const axis = { gridcolor: colour("line"), zerolinecolor: colour("line"), linecolor: colour("line"), automargin: true };
  return {
    margin: { l: 48, r: 12, t: 26, b: 36 }, showlegend: false, hovermode: "closest",
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("soft"), size: 12 },
    hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("ink") } },
    ...more,
    modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("soft"), activecolor: colour("run0"), ...more.modebar },
    xaxis: { ...axis, ...more.xaxis }, yaxis: { ...axis, ...more.yaxis },
  };
}

const CONFIG = { responsive: true, displaylogo: false, modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]] };
const draw = (plot, traces, more) => Plotly.react(plot, traces, layout(more), CONFIG);

// Of too many marks none is drawn in the curves; the time axis below has them all.
const marksOf = (index, kind) => runs[index].marks.filter((mark) => mark.kind === kind);
const isDrawn = (kind) => runs.every((run, index) => marksOf(index, kind).length <= MOST_MARKS);

// Lines where a run saved or went on; not over steps of the program's own counting.
function markLines(drawn) {
  if (!control("marks").checked) return [];
  const axis = control("axis").value, [unit] = clock();
  if (axis === "x" && drawn.some(([, curve]) => curve.own)) return [];
  const kinds = ["checkpoint", "restart"].filter(isDrawn), shown = new Set(drawn.map(([index]) => index));
  const lines = [...shown].flatMap((index) => kinds.flatMap((kind) => marksOf(index, kind).map((mark) => [index, mark])));
  return lines.map(([index, mark]) => {
    const at = axis === "t" ? mark.t / unit : mark.step;
    return { type: "line", xref: "x", yref: "paper", x0: at, x1: at, y0: 0, y1: 1, layer: "below", opacity: 0.55,
      line: { color: ofRun(index), width: 1, dash: mark.kind === "restart" ? "solid" : "dot" } };
  });
}

// Around one value plotly has an axis from -1 to 1, on which 0.001 is nothing.
function rangeOf(traces, logarithmic) {
  const values = traces.flatMap((trace) => trace.y).filter((value) => value !== null);
  const value = values[0];
  if (!value || logarithmic || values.some((each) => each !== value)) return {};
  return { range: [value - Math.abs(value) / 2, value + Math.abs(value) / 2] };
}

function drawCurves(plot) {
  const axis = control("axis").value, share = Number(control("smoothing").value), [unit, word] = clock();
  const traces = [], drawn = [];
  runs.forEach((run, index) => {
    for (const [name, curve] of Object.entries(run[plot.dataset.group])) {
      if (hidden.has(index) || (plot.dataset.name && name !== plot.dataset.name)) continue;
      drawn.push([index, curve]);
      const x = axis === "t" ? curve.t.map((t) => t / unit) : curve.x;
      const shown = plot.dataset.name ? run.name : runs.length > 1 ? `${name}, ${run.name}` : name;
      const dash = plot.dataset.name ? "solid" : ["solid", "dash", "dot", "dashdot"][Object.keys(run[plot.dataset.group]).indexOf(name) % 4];
      const mode = curve.y.length < 60 ? "lines+markers" : "lines";
      const line = { color: ofRun(index), width: 1.6, dash };
      const plain = { x, y: curve.y, name: shown, mode, line, marker: { size: 4 }, type: "scatter" };
      if (share || curve.means) {
        traces.push({ ...plain, opacity: 0.25, hoverinfo: "skip", mode: "lines" });
        traces.push({ ...plain, y: smoothed(curve.means || curve.y, share), mode: "lines" });
      } else traces.push(plain);
    }
  });
  const logarithmic = control("log").checked, fromZero = plot.dataset.group === "memory" || FROM_ZERO.includes(plot.dataset.name);
  draw(plot, traces, {
    shapes: markLines(drawn), showlegend: !plot.dataset.name, legend: { orientation: "h", y: 1.02, yanchor: "bottom" },
    xaxis: { title: { text: axis === "t" ? word : "step" } },
    yaxis: {
      type: logarithmic ? "log" : "linear", ticksuffix: plot.dataset.group === "memory" ? " GiB" : "",
      ...(fromZero ? { rangemode: "tozero" } : rangeOf(traces, logarithmic)),
    },
  });
}

function drawPhases(plot) {
  const [unit, word] = clock();
  const shown = runs.map((run, index) => [run, index]).filter(([, index]) => !hidden.has(index)).reverse();
  const used = PHASES.filter((phase) => shown.some(([run]) => run.phases[phase]));
  const traces = used.map((phase) => ({
    type: "bar", orientation: "h", name: phase.replace("_", " and "), y: shown.map(([run]) => run.name),
    x: shown.map(([run]) => (run.phases[phase] || 0) / unit),
    text: shown.map(([run]) => {
      const share = (run.phases[phase] || 0) / Object.values(run.phases).reduce((a, b) => a + b, 0);
      return share > 0.06 ? `${Math.round(100 * share)}%` : "";
    }),
    textposition: "inside", insidetextanchor: "middle", insidetextfont: { color: colour("ground") },
    hovertemplate: `%{x:.3g} ${word} of ${phase}<extra></extra>`,
    marker: { color: colour(`phase${PHASE_COLOURS[phase]}`) },
  }));
  plot.style.height = `${150 + 34 * shown.length}px`;
  // Margins of our own: those of plotly follow the legend, which follows them, and in a low chart never come to rest.
  const left = Math.min(220, 24 + 7.5 * Math.max(0, ...shown.map(([run]) => run.name.length)));
  draw(plot, traces, { barmode: "stack", showlegend: true, margin: { l: left, r: 12, t: 26, b: 84, autoexpand: false },
    legend: { orientation: "h", traceorder: "normal", x: 0, y: 0, yref: "container", yanchor: "bottom" },
    xaxis: { title: { text: word, standoff: 4 } }, yaxis: { type: "category" }, bargap: 0.3 });
}

function drawTimeline(plot) {
  const [unit, word] = clock();
  const shown = runs.map((run, index) => [run, index]).filter(([, index]) => !hidden.has(index)).reverse();
  const look = { checkpoint: "diamond", restart: "triangle-right", warning: "triangle-up", profile: "square", end: "circle" };
  const traces = shown.flatMap(([run, index]) => [
    { type: "scatter", mode: "lines", line: { color: ofRun(index), width: 5 }, opacity: 0.4, hoverinfo: "skip",
      x: run.lives.flatMap(([from, to]) => [from / unit, to / unit, null]), y: run.lives.flatMap(() => [run.name, run.name, null]) },
    { type: "scatter", mode: "markers", x: run.marks.map((mark) => mark.t / unit), y: run.marks.map(() => run.name),
      text: run.marks.map((mark) => mark.text), hovertemplate: `%{text}<br>%{x:.4g} ${word}<extra></extra>`,
      marker: { size: 11, color: ofRun(index), line: { color: colour("card"), width: 1 }, symbol: run.marks.map((mark) => look[mark.kind] || "x") } },
  ]);
  plot.style.height = `${100 + 40 * shown.length}px`;
  draw(plot, traces, { xaxis: { title: { text: word, standoff: 4 } }, yaxis: { type: "category", range: [-0.6, shown.length - 0.4] } });
}

function drawAll() {
  const kinds = { curves: drawCurves, memory: drawCurves, phases: drawPhases, timeline: drawTimeline };
  for (const plot of document.querySelectorAll(".plot")) kinds[plot.dataset.group](plot);
}

runs.forEach((run, index) => {
  const button = document.createElement("button"), key = document.createElement("i");
  button.type = "button";
  key.style.background = `var(--run${index % 6})`;
  button.append(key, run.name);
  button.setAttribute("aria-pressed", "true");
  button.addEventListener("click", () => {
    if (!hidden.delete(index)) hidden.add(index);
    button.setAttribute("aria-pressed", String(!hidden.has(index)));
    drawAll();
  });
  control("legend").append(button);
});
if (!isDrawn("checkpoint")) control("marks").nextSibling.textContent = " restarts (checkpoints: below)";
control("controls").addEventListener("input", () => {
  document.querySelector("#controls output").value = control("smoothing").value;
  drawAll();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
drawAll();
