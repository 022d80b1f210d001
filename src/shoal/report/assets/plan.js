"use strict";
// Shows the cell of the grid that the controls choose. Every number was computed by the planner; nothing is planned here.
(() => {
  const { data, formats } = shoal;
  const chosen = { ...data.asked, recompute: "any" };
  const place = (name) => document.getElementById(name);
  const svgName = "http://www.w3.org/2000/svg";
  let axis = null;

  function element(tag, text, style) {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (style) made.className = style;
    return made;
  }
  function shape(tag, attributes, style) {
    const made = document.createElementNS(svgName, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (style) made.setAttribute("class", style);
    return made;
  }
  const seconds = (value) => value === null ? "–" : value >= 100 ? Math.round(value).toLocaleString("en") + " s" : value >= 1 ? Number(value.toPrecision(3)) + " s" : Number((1e3 * value).toPrecision(3)) + " ms";
  const rate = (value) => value >= 100 ? Math.round(value).toLocaleString("en") : Number(value.toPrecision(3)).toString();
  const share = (value) => value === null ? "–" : (100 * value).toFixed(value < 0.0995 ? 1 : 0) + " %";
  const days = (value) => value === null ? "–" : value >= 2 ? Number(value.toPrecision(3)).toLocaleString("en") + " days" : Number((24 * value).toPrecision(3)) + " h";
  const money = (value) => value >= 1e7 ? formats.count(value) : Math.round(value).toLocaleString("en");
  const cell = () => data.cells[[chosen.devices, chosen.batch, chosen.seq].join("|")];
  const best = () => cell()?.best[chosen.recompute] ?? [];

  // A layout breaks between its keys.
  function keys(text, style) {
    const made = element("span", undefined, style);
    text.split(/(?<=,)/).forEach((part, number) => { if (number) made.append(element("wbr")); made.append(part); });
    return made;
  }

  function tiles() {
    const [first] = best();
    const numbers = !first ? [["Best layout", "nothing fits", "among the layouts searched"]] : [
      [first.chosen ? "Chosen layout" : "Fastest layout", first.layout, first.words],
      ["s/step", seconds(first.seconds), "± " + share(first.error_bar)],
      ["Tokens/s/GPU", rate(first.rate), "MFU " + share(first.mfu)],
      ["Memory", formats.bytes(first.needs), "of " + formats.bytes(cell().capacity)],
      ...(first.days === null ? [] : [["Whole run", days(first.days), formats.count(first.gpu_hours) + " GPU-hours"]]),
      ...(first.cost === null ? [] : [["Cost", money(first.cost), "at the price given"]]),
    ];
    place("tiles").replaceChildren(...numbers.map(([name, value, note]) => {
      const tile = element("div", undefined, "tile"), told = element("dd");
      told.append(keys(value));
      if (note) told.append(element("small", note));
      tile.append(element("dt", name), told);
      return tile;
    }));
  }

  // Round numbers for an axis of some five ticks.
  function ticks(most, base) {
    const unit = base ** Math.floor(Math.log(most / 5) / Math.log(base));
    const steps = (base === 2 ? [1, 2, 4] : [1, 2, 5, 10]).map((many) => many * unit);
    const size = steps.find((one) => most / one <= 6) ?? steps.at(-1) * 2;
    return Array.from({ length: Math.floor(most / size) + 1 }, (_, number) => number * size);
  }

  function points() {
    const box = place("points"), now = cell();
    box.replaceChildren();
    if (!now) { box.append(element("p", "The planner was not asked for this one.", "empty")); return; }
    const wide = Math.max(300, box.clientWidth), tall = Math.max(260, Math.min(440, wide * 0.5));
    const left = 64, bottom = 40, top = 14, right = 18;
    const every = now.points.filter((point) => chosen.recompute === "any" || data.recomputes[point[2]] === chosen.recompute);
    const [first] = best();
    const mostY = Math.max(now.capacity * 1.25, Math.min(now.capacity * 2, 1.05 * Math.max(0, ...every.map((point) => point[1]))));
    const shown = every.filter((point) => point[1] <= mostY);
    const mostX = 1.06 * Math.max(1, ...shown.map((point) => point[0]));
    const x = (value) => left + (wide - left - right) * value / mostX, y = (value) => tall - bottom - (tall - bottom - top) * Math.min(value, mostY) / mostY;
    const svg = shape("svg", { viewBox: `0 0 ${wide} ${tall}`, width: wide, height: tall, role: "img", "aria-label": `${shown.length} layouts: memory against tokens per second and GPU` });
    for (const value of ticks(mostX, 10)) {
      svg.append(shape("line", { x1: x(value), x2: x(value), y1: top, y2: tall - bottom }, "rule"));
      const text = shape("text", { x: x(value), y: tall - bottom + 16, "text-anchor": "middle" });
      text.textContent = formats.count(value);
      svg.append(text);
    }
    for (const value of ticks(mostY / 2 ** 30, 2).map((one) => one * 2 ** 30)) {
      svg.append(shape("line", { x1: left, x2: wide - right, y1: y(value), y2: y(value) }, "rule"));
      const text = shape("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" });
      text.textContent = formats.bytes(value).replace("0 B", "0");
      svg.append(text);
    }
    const label = shape("text", { x: (left + wide - right) / 2, y: tall - 6, "text-anchor": "middle" });
    label.textContent = "throughput, tokens/s/GPU";
    const upright = shape("text", { x: 2, y: 11 });
    upright.textContent = "memory of the fullest rank";
    svg.append(label, upright, shape("line", { x1: left, x2: wide - right, y1: y(now.capacity), y2: y(now.capacity) }, "capacity"));
    const limit = shape("text", { x: wide - right, y: y(now.capacity) - 6, "text-anchor": "end" }, "strong");
    limit.textContent = "device memory: " + formats.bytes(now.capacity);
    svg.append(limit);
    for (const point of [...shown].sort((one, other) => Boolean(other[4]) - Boolean(one[4]))) {
      const dot = shape("circle", { cx: x(point[0]), cy: y(point[1]), r: 4.2, tabindex: -1 }, point[4] ? "unfit" : "fit r" + point[2]);
      dot.addEventListener("pointerenter", () => tell(point));
      dot.addEventListener("click", () => tell(point));
      svg.append(dot);
    }
    const line = now.frontier[chosen.recompute];
    if (line.length > 1) {
      let path = "";
      line.forEach(([fast, held], number) => { path += number ? `H${x(fast).toFixed(1)}V${y(held).toFixed(1)}` : `M${x(fast).toFixed(1)} ${y(held).toFixed(1)}`; });
      svg.append(shape("path", { d: path }, "frontier"));
    }
    if (first) {
      const ring = shape("circle", { cx: x(first.rate), cy: y(first.needs), r: 8 }, "ring");
      const text = shape("text", { x: Math.min(x(first.rate), wide - right), y: y(first.needs) + 24, "text-anchor": x(first.rate) > wide * 0.7 ? "end" : "middle" }, "strong name");
      text.textContent = first.layout.length > 44 ? first.layout.slice(0, 43) + "…" : first.layout;
      svg.append(ring, text);
    }
    const key = element("ul", undefined, "key");
    data.recomputes.forEach((name, number) => { const item = element("li", name === "none" ? "no recomputation" : name + " recomputation"); item.prepend(element("span", undefined, "swatch d" + number)); key.append(item); });
    const away = now.far + every.length - shown.length, grey = element("li", shown.filter((point) => point[4]).length + " do not fit" + (away ? ", " + away + " more need over twice the memory" : ""));
    grey.prepend(element("span", undefined, "swatch unfit"));
    if (away || shown.some((point) => point[4])) key.append(grey);
    box.append(svg, key);
  }

  function tell(point) {
    const [fast, held, , layout, reason] = point;
    place("told").textContent = `${layout}: ${rate(fast)} tokens/s/GPU, ${formats.bytes(held)}` + (reason ? `. Does not fit: ${reason}.` : ".");
  }

  function bars(into, kinds, of, said, beside, limit) {
    const plans = best(), box = place(into);
    if (!plans.length) { box.replaceChildren(element("p", "Nothing fits.", "empty")); return; }
    const sums = plans.map((plan) => Object.values(of(plan)).reduce((one, other) => one + other, 0));
    const most = Math.max(...sums, ...plans.map((plan) => beside(plan)), limit ?? 0);
    const made = element("div", undefined, "bars"), used = new Set();
    plans.forEach((plan, number) => {
      const name = keys(plan.layout, "name"), bar = element("span", undefined, "bar"), svg = shape("svg", { role: "img", "aria-label": plan.layout });
      let from = 0;
      for (const [part, [words, colour]] of Object.entries(kinds)) {
        const value = of(plan)[part] ?? 0;
        if (value <= 0) continue;
        used.add(part);
        const rect = shape("rect", { x: 100 * from / most + "%", width: 100 * value / most + "%", height: "100%" }, "f" + colour), title = shape("title", {});
        title.textContent = words + ": " + said(value);
        rect.append(title);
        svg.append(rect);
        from += value;
      }
      if (limit) { const at = Math.min(100 * limit / most, 99.8) + "%"; svg.append(shape("line", { x1: at, x2: at, y1: 0, y2: "100%" }, "limit")); }
      bar.append(svg);
      made.append(name, bar, element("span", said(beside(plan) || sums[number]), "sum"));
    });
    const key = element("ul", undefined, "key");
    for (const [part, [words, colour]] of Object.entries(kinds)) if (used.has(part)) { const item = element("li", words); item.prepend(element("span", undefined, "swatch b" + colour)); key.append(item); }
    box.replaceChildren(made, key);
  }

  function table(titles, rows, right) {
    const made = element("table"), head = made.createTHead().insertRow(), body = made.createTBody();
    titles.forEach((title, column) => head.append(element("th", title, right.includes(column) ? "number" : "")));
    for (const row of rows) { const line = body.insertRow(); row.forEach((value, column) => { const into = line.insertCell(); into.append(value instanceof Node ? value : String(value)); if (right.includes(column)) into.className = "number"; }); }
    return made;
  }

  function numbers() {
    const plans = best(), long = plans.some((plan) => plan.days !== null), priced = plans.some((plan) => plan.cost !== null);
    const titles = ["layout", "strategy", "s/step", "tokens/s/GPU", "MFU", "memory", ...(long ? ["run"] : []), ...(priced ? ["cost"] : []), "bottleneck"];
    const rows = plans.map((plan) => [keys(plan.layout + (plan.chosen ? " (chosen)" : "")), plan.words, seconds(plan.seconds), rate(plan.rate), share(plan.mfu), formats.bytes(plan.needs), ...(long ? [days(plan.days)] : []), ...(priced ? [money(plan.cost)] : []), plan.binds]);
    const right = titles.map((title, column) => column).filter((column) => column > 1 && column < titles.length - 1);
    place("rows").replaceChildren(plans.length ? table(titles, rows, right) : element("p", "Nothing fits.", "empty"));
    place("command").replaceChildren(element("code", plans[0]?.command ?? "nothing fits: see Why, below"));
  }

  // Where a rank stands on each axis: the last axis has neighbouring ranks.
  function coordinates(rank, degrees) {
    const found = {};
    for (const name of [...data.axes].reverse()) { found[name] = rank % degrees[name]; rank = Math.floor(rank / degrees[name]); }
    return found;
  }

  function ranks() {
    const [first] = best(), map = place("map"), now = cell();
    map.replaceChildren(); place("axes").replaceChildren(); place("groups").replaceChildren();
    if (!first) { map.append(element("p", "Nothing fits.", "empty")); return; }
    const used = data.axes.filter((name) => first.degrees[name] > 1);
    if (!used.includes(axis)) axis = used.at(-1) ?? null;
    if (used.length) {
      const choice = element("span", undefined, "choice"), holder = element("span", "axis");
      for (const name of used) {
        const button = element("button", `${name}=${first.degrees[name]}`);
        button.type = "button"; button.dataset.axis = name; button.setAttribute("aria-pressed", String(name === axis));
        button.addEventListener("click", () => { axis = name; ranks(); });
        choice.append(button);
      }
      holder.append(choice);
      place("axes").append(holder);
    }
    const perNode = Math.min(now.per_node, first.world), nodes = Math.ceil(first.world / perNode), shown = Math.min(nodes, 16);
    const here = coordinates(0, first.degrees);
    for (let node = 0; node < shown; node += 1) {
      const box = element("div", undefined, "node");
      box.append(element("div", "node " + node, "node-name"));
      const cells = element("div", undefined, "devices");
      cells.style.setProperty("--across", Math.min(perNode, 8));
      for (let place_ = 0; place_ < perNode && node * perNode + place_ < first.world; place_ += 1) {
        const rank = node * perNode + place_, at = coordinates(rank, first.degrees);
        const device = element("span", rank, "device");
        if (axis) {
          const shade = (at[axis] + 1) / first.degrees[axis];
          device.style.background = `rgba(var(--heat), ${(0.12 + 0.6 * shade).toFixed(2)})`;
          if (data.axes.every((name) => name === axis || at[name] === here[name])) device.classList.add("mine");
        }
        device.title = "rank " + rank + ": " + data.axes.filter((name) => first.degrees[name] > 1).map((name) => name + " " + at[name]).join(", ");
        cells.append(device);
      }
      box.append(cells);
      map.append(box);
    }
    if (nodes > shown) map.append(element("p", `and ${(nodes - shown).toLocaleString("en")} more nodes`, "note"));
    const rows = first.axes.map((one) => [one.group, String(one.ranks), one.link, one.calls.toLocaleString("en"), formats.bytes(one.bytes), one.exposed === null ? "–" : seconds(one.exposed)]);
    place("groups").append(rows.length ? table(["group", "ranks", "link", "calls", "bytes", "exposed"], rows, [1, 3, 4, 5]) : element("p", "A single rank sends nothing.", "empty"));
  }

  function show() {
    tiles(); points(); numbers(); ranks();
    bars("memories", data.held, (plan) => plan.memory, formats.bytes, (plan) => plan.needs, cell()?.capacity);
    bars("times", data.spent, (plan) => plan.step, seconds, (plan) => plan.seconds);
    document.querySelectorAll("[data-set]").forEach((button) => {
      const value = button.dataset.set === "recompute" ? button.dataset.value : Number(button.dataset.value);
      button.setAttribute("aria-pressed", String(chosen[button.dataset.set] === value));
      button.disabled = button.dataset.set !== "recompute" && !data.cells[["devices", "batch", "seq"].map((name) => name === button.dataset.set ? value : chosen[name]).join("|")];
    });
    document.documentElement.dataset.shown = JSON.stringify(chosen);
  }

  document.querySelectorAll("[data-set]").forEach((button) => button.addEventListener("click", () => {
    chosen[button.dataset.set] = button.dataset.set === "recompute" ? button.dataset.value : Number(button.dataset.value);
    show();
  }));
  let waiting, before = 0;
  new ResizeObserver(() => { clearTimeout(waiting); waiting = setTimeout(() => { if (Math.abs(place("points").clientWidth - before) > 2) { before = place("points").clientWidth; points(); } }, 60); }).observe(place("points"));
  matchMedia("print").addEventListener("change", points);
  show();
})();
