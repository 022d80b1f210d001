"use strict";
// Asks the server how the run stands and puts the answer into the page, as text.
(() => {
  const place = (name) => document.getElementById(name);
  const kinds = { running: "live", finished: "good", "ended early": "good", failed: "bad", "launcher lost": "bad" };
  const eventKinds = { fault: "bad", restart: "warn", layout: "layout" };
  let failed = 0, timer;

  function element(tag, text, style) {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (style) made.className = style;
    return made;
  }

  function table(titles, rows, right) {
    const made = element("table"), head = made.createTHead().insertRow();
    titles.forEach((title, column) => head.append(element("th", title, right.includes(column) ? "number" : "")));
    const body = made.createTBody();
    for (const row of rows) {
      const line = body.insertRow();
      row.forEach((cell, column) => {
        const into = line.insertCell();
        if (right.includes(column)) into.className = "number";
        into.append(cell instanceof Node ? cell : String(cell));
      });
    }
    return made;
  }

  function show(state) {
    const chip = place("state");
    chip.textContent = state.state;
    chip.className = "chip " + (kinds[state.state] ?? "");
    document.title = state.name + " · " + state.state + " · Shoal";
    place("lead").textContent = [state.model, state.layout, state.world ? state.world + (state.world === 1 ? " rank" : " ranks") : null].filter(Boolean).join(" · ");
    place("notes").replaceChildren(...state.notes.map((note) => element("p", note, "decision warning")));
    place("numbers").replaceChildren(...state.numbers.map((one) => {
      const tile = element("div", undefined, "tile"), value = element("dd", one.value);
      if (one.note) value.append(element("small", one.note));
      tile.append(element("dt", one.name), value);
      return tile;
    }));
    shoal.update(state.charts);
    showRanks(state);
    const rows = state.events.map((one) => [one.step.toLocaleString("en"), element("span", one.what, "chip " + (eventKinds[one.kind] ?? "")), one.text, one.when]);
    place("event-rows").replaceChildren(rows.length ? table(["step", "what", "message", "time (UTC)"], rows, [0]) : element("p", "No events so far.", "empty"));
  }

  function showRanks(state) {
    const most = Math.max(1, ...state.ranks.map((one) => one.memory ?? 0));
    const rows = state.ranks.filter((one) => one.phase || one.memory).map((one) => {
      const bar = element("span", undefined, "meter"), fill = element("i");
      fill.style.width = 100 * (one.memory ?? 0) / most + "%";
      bar.append(fill);
      const held = element("span", one.memory ? shoal.formats.bytes(one.memory) + " " + one.memory_is + " " : "–");
      held.append(bar);
      return [one.rank, one.phase ? one.phase + (one.alive || state.state !== "running" ? "" : ", silent") : "–", one.phase ? one.step : "–", one.phase ? one.entered.toLocaleString("en") : "–", one.behind ? element("span", one.behind, "chip warn") : "", held];
    });
    const told = state.state === "running" ? "No rank of this run is visible from this machine." : "The run is over; its ranks are gone.";
    place("rank-rows").replaceChildren(rows.length ? table(["rank", "doing", "step", "collectives", "behind", "memory"], rows, [0, 2, 3, 4]) : element("p", told, "empty"));
    place("stragglers").replaceChildren(...state.stragglers.map((text) => element("li", "straggler: " + text)));
    const select = place("rank"), many = Math.max(1, state.world ?? 1);
    while (select.options.length < Math.min(many, 512)) select.add(new Option(String(select.options.length)));
  }

  async function log() {
    const answer = await fetch("/log.json?rank=" + encodeURIComponent(place("rank").value));
    if (!answer.ok) return;
    const told = await answer.json(), box = place("log-text");
    const atEnd = box.scrollTop + box.clientHeight >= box.scrollHeight - 4;
    box.textContent = told.lines.length ? told.lines.join("\n") : "This rank has logged nothing.";
    if (atEnd) box.scrollTop = box.scrollHeight;
  }

  // How the run stands; null where the server does not answer, which is told and asked again.
  async function ask() {
    try {
      const answer = await fetch("/state.json");
      return answer.ok ? await answer.json() : null;
    } catch { return null; }
  }

  async function look() {
    clearTimeout(timer);
    const state = await ask();
    failed = state ? 0 : failed + 1;
    const wait = !state ? Math.min(30000, 2000 * failed) : state.state === "running" ? 2000 : 10000;
    if (!document.hidden) timer = setTimeout(look, wait);
    if (!state) {
      place("foot").textContent = "shoal watch does not answer; trying again in " + wait / 1000 + " s.";
      return;
    }
    show(state);
    await log();
    place("foot").textContent = "Updated at " + new Date().toLocaleTimeString() + ".";
    document.documentElement.dataset.looked = String(1 + Number(document.documentElement.dataset.looked ?? 0));
  }

  place("rank").addEventListener("change", log);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
  look();
})();
