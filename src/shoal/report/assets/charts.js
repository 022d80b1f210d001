"use strict";
// Draws the page's charts with uPlot from the JSON that the page holds. Texts reach the page as text only, never as markup.
const shoal = (() => {
  const data = JSON.parse(document.querySelector("script[type=\"application/json\"]").textContent);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  const drawn = new Map();
  const state = { x: "step", log: {} };

  const siUnits = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]];
  function three(value) {
    if (value === 0) return "0";
    return Math.abs(value) >= 1e-5 && Math.abs(value) < 1e6 ? String(Number(value.toPrecision(4))) : value.toExponential(2);
  }
  const formats = {
    number: three,
    count: (value) => {
      for (const [unit, name] of siUnits) if (Math.abs(value) >= unit) return Number((value / unit).toPrecision(3)) + name;
      return String(Number(value.toPrecision(3)));
    },
    percent: (value) => Number((100 * value).toPrecision(3)) + " %",
    bytes: (value) => {
      for (const [unit, name] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]])
        if (Math.abs(value) >= unit) return Number((value / unit).toPrecision(3)) + " " + name;
      return value + " B";
    },
    seconds: (value) => value >= 1 ? Number(value.toPrecision(3)) + " s" : Number((1e3 * value).toPrecision(3)) + " ms",
    whole: (value) => value.toLocaleString("en"),
  };
  const byteSteps = [0, 1, 2, 3, 4].flatMap((power) => [1, 2, 5, 10, 20, 50, 100, 200, 500].map((many) => many * 1024 ** power));
  const wholeSteps = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9].flatMap((power) => [1, 2, 5].map((many) => many * 10 ** power));
  const xNames = { step: "step", tokens: "tokens", hours: "hours in steps" };
  const shownX = (value, kind) => (kind === "tokens" ? formats.count(value) : kind === "hours" ? three(value) : value.toLocaleString("en"));

  // The marks of events: a line each, and above it what happened when the pointer is near.
  function marks(chart) {
    const colours = { fault: "--bad", restart: "--warn", layout: "--c1", note: "--faint" };
    let tip;
    return {
      hooks: {
        init: (plot) => {
          tip = document.createElement("div");
          tip.className = "tip";
          tip.hidden = true;
          plot.over.appendChild(tip);
        },
        draw: (plot) => {
          const context = plot.ctx, top = plot.bbox.top, bottom = top + plot.bbox.height;
          context.save();
          for (const mark of chart.marks) {
            const x = plot.valToPos(mark.x[state.x] ?? mark.x.step, "x", true);
            if (x < plot.bbox.left || x > plot.bbox.left + plot.bbox.width) continue;
            context.strokeStyle = context.fillStyle = colour(colours[mark.kind] ?? "--faint");
            context.lineWidth = devicePixelRatio;
            context.setLineDash(mark.kind === "fault" ? [] : [4 * devicePixelRatio, 3 * devicePixelRatio]);
            context.globalAlpha = 0.75;
            context.beginPath(); context.moveTo(x, top); context.lineTo(x, bottom); context.stroke();
            context.globalAlpha = 1;
            const r = 4 * devicePixelRatio;
            context.beginPath();
            if (mark.kind === "fault") { context.moveTo(x - r, top); context.lineTo(x + r, top); context.lineTo(x, top + 1.6 * r); context.closePath(); }
            else context.rect(x - r * 0.7, top, r * 1.4, r * 1.4);
            context.fill();
          }
          context.restore();
        },
        setCursor: (plot) => {
          const left = plot.cursor.left;
          const near = left < 0 ? [] : chart.marks
            .map((mark) => [Math.abs(plot.valToPos(mark.x[state.x] ?? mark.x.step, "x") - left), mark])
            .filter(([far]) => far < 7).sort((one, other) => one[0] - other[0]);
          tip.hidden = near.length === 0;
          if (near.length === 0) return;
          tip.textContent = near.slice(0, 3).map(([, mark]) => mark.text).join(" · ") + (near.length > 3 ? " · and " + (near.length - 3) + " more" : "");
          const width = plot.over.clientWidth;
          tip.style.top = "10px";
          tip.style.left = left < width / 2 ? left + 10 + "px" : "";
          tip.style.right = left < width / 2 ? "" : width - left + 10 + "px";
        },
      },
    };
  }

  // What the marks mean, once a page: beneath the loss.
  function keyOfMarks(box, chart) {
    box.querySelector(".key")?.remove();
    const words = { fault: "fault", restart: "restart", layout: "layout change", note: "note" };
    const used = Object.keys(words).filter((kind) => chart.marks.some((mark) => mark.kind === kind));
    if (chart.name !== "loss" || !used.length) return;
    const key = document.createElement("ul");
    key.className = "key";
    for (const kind of used) {
      const item = document.createElement("li"), sign = document.createElement("span");
      sign.className = "mark " + kind;
      item.append(sign, words[kind]);
      key.append(item);
    }
    box.append(key);
  }

  // What lies behind a line, such as its least and greatest values, is pale.
  const ink_ = (series) => colour("--c" + series.colour) + (series.faint ? "59" : "");

  function options(chart, width) {
    const ink = colour("--soft"), line = colour("--line"), byX = chart.x === undefined;
    const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1, size: 5 }, font: "11.5px system-ui, sans-serif" };
    const format = formats[chart.format ?? "number"];
    const kind = byX ? state.x : chart.x;
    const log = state.log[chart.name] ?? chart.log ?? false;
    return {
      width, height: chart.height ?? 250, padding: [10, 26, 0, 0],
      cursor: { sync: byX ? { key: "steps" } : undefined, points: { size: 6 }, drag: { x: true, y: false } },
      legend: { live: true, markers: { width: 0, fill: (plot, place) => (place ? ink_(chart.series[place - 1]) : "transparent") } },
      scales: { x: { time: false, distr: chart.xlog ? 3 : 1, log: 2 }, y: { distr: log ? 3 : 1, range: chart.zero ? (plot, low, high) => [0, (high || 1) * 1.08] : undefined } },
      axes: [
        { ...axis, label: xNames[kind] ?? chart.xlabel, labelSize: 20, labelFont: axis.font, size: 32, space: 70, incrs: kind === "step" ? wholeSteps : undefined, values: (plot, values) => values.map((value) => (value === null ? "" : (chart.xformat ? formats[chart.xformat](value) : shownX(value, kind)))) },
        { ...axis, size: 62, incrs: chart.format === "bytes" ? byteSteps : undefined, values: (plot, values) => values.map((value) => (value === null ? "" : format(value))) },
      ],
      series: [
        { label: kind === "step" ? "step" : xNames[kind] ?? chart.xlabel, value: (plot, value) => (value === null || value === undefined ? "" : chart.xformat ? formats[chart.xformat](value) : shownX(value, kind)) },
        ...chart.series.map((series) => ({
          label: series.name, stroke: ink_(series), width: series.points ? 1.75 : 1.35,
          dash: series.dash ? [6, 4] : undefined, spanGaps: true, show: !(series.hidden ?? false),
          points: { show: Boolean(series.points), size: 6, fill: colour("--c" + series.colour) },
          value: (plot, value) => (value === null || value === undefined ? "" : format(value)),
        })),
      ],
      plugins: [marks(chart)],
    };
  }

  function joined(chart) {
    const kind = chart.x === undefined ? state.x : chart.x;
    return uPlot.join(chart.series.map((series) => {
      const xs = series.x[kind] ?? series.x.step;
      // A longer way through a step that a fault undid comes back to an earlier x: what is drawn goes forwards.
      const kept = [[], []];
      xs.forEach((x, place) => { if (x !== null && (kept[0].length === 0 || x > kept[0].at(-1))) { kept[0].push(x); kept[1].push(series.y[place]); } });
      return kept;
    }));
  }

  function draw(box) {
    const chart = (data.charts ?? {})[box.dataset.chart];
    if (!chart) return;
    chart.name = box.dataset.chart;
    chart.marks = chart.marks ?? [];
    drawn.get(box)?.destroy();
    box.replaceChildren();
    const width = Math.max(240, box.clientWidth);
    const plot = new uPlot(options(chart, width), joined(chart), box);
    plot.shoalChart = chart;
    keyOfMarks(box, chart);
    drawn.set(box, plot);
  }

  // New rows of the same curves: a pointer that rests on one is not disturbed.
  function update(charts) {
    data.charts = charts;
    boxes().forEach((box) => {
      const plot = drawn.get(box), chart = charts[box.dataset.chart];
      box.closest("figure").hidden = !chart;
      if (!chart) return;
      if (!plot || plot.series.length !== chart.series.length + 1) { draw(box); return; }
      chart.marks = chart.marks ?? [];
      plot.shoalChart.marks = chart.marks;
      plot.shoalChart.series = chart.series;
      plot.setData(joined(chart));
      keyOfMarks(box, { ...chart, name: box.dataset.chart });
    });
  }

  const boxes = () => document.querySelectorAll("[data-chart]");
  function redraw() { boxes().forEach(draw); }

  function choices() {
    document.querySelectorAll("[data-x]").forEach((button) => button.addEventListener("click", () => {
      state.x = button.dataset.x;
      document.querySelectorAll("[data-x]").forEach((one) => one.setAttribute("aria-pressed", String(one === button)));
      redraw();
    }));
    document.querySelectorAll("[data-log]").forEach((button) => button.addEventListener("click", () => {
      const on = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(on));
      for (const name of button.dataset.log.split(" ")) state.log[name] = on;
      redraw();
    }));
  }

  function copies() {
    document.querySelectorAll(".code .copy").forEach((button) => {
      button.hidden = false;
      button.addEventListener("click", async () => {
        const text = button.parentElement.querySelector("pre").textContent;
        try { await navigator.clipboard.writeText(text); }
        catch {
          const range = document.createRange();
          range.selectNodeContents(button.parentElement.querySelector("pre"));
          getSelection().removeAllRanges(); getSelection().addRange(range);
          document.execCommand("copy");
        }
        button.textContent = "copied";
        setTimeout(() => { button.textContent = "copy"; }, 1500);
      });
    });
  }

  let waiting;
  new ResizeObserver(() => { clearTimeout(waiting); waiting = setTimeout(() => drawn.forEach((plot, box) => { if (box.clientWidth && Math.abs(plot.width - box.clientWidth) > 1) plot.setSize({ width: Math.max(240, box.clientWidth), height: plot.height }); }), 60); }).observe(document.body);
  scheme.addEventListener("change", redraw);
  matchMedia("print").addEventListener("change", redraw);
  document.querySelectorAll("details").forEach((details) => details.addEventListener("toggle", () => { if (details.open) details.querySelectorAll("[data-chart]").forEach(draw); }));
  redraw(); choices(); copies();
  document.documentElement.dataset.ready = "yes";
  return { data, formats, colour, draw, redraw, update, drawn, state };
})();
