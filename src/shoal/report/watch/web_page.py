"""The markup of the live page; ``assets/watch.js`` fills it with the server's data."""

from __future__ import annotations

from html import escape

from shoal.report.markup import Markup, chart, figure, grid, section
from shoal.report.page import CHARTS, page
from shoal.report.run.report_page import CONTROLS

WORDS = {
    "loss": ("Loss", "metrics.jsonl: loss, heldout_loss, validation"),
    "tokens_per_s": ("Tokens per second", "metrics.jsonl: tokens_per_s, predicted_step_s"),
    "grad_norm": ("Gradient norm", "metrics.jsonl: grad_norm"),
    "lr": ("Learning rate", "metrics.jsonl: lr"),
    "mfu": ("Model FLOPs utilisation (MFU)", "metrics.jsonl: mfu"),
}


def web_page(name: str) -> str:
    head = (
        '<header class="top"><p class="kicker">Shoal · live</p>'
        f'<h1><span id="name">{escape(name)}</span> <span class="chip" id="state">…</span></h1>'
        '<p class="lead" id="lead"></p><div id="notes"></div><dl class="tiles" id="numbers"></dl></header>'
    )
    curves = grid(
        *(
            figure(chart(place, title), title, [source], wide=place == "loss")
            for place, (title, source) in WORDS.items()
        )
    )
    ranks = figure(
        Markup('<div id="rank-rows" class="scroll"></div><ul class="plain" id="stragglers"></ul>'),
        "What each rank does",
        ["the ranks' flight records", "observed/rank-*.json: peak", "faults.jsonl: kind, action"],
        "Resident: the process's memory on its host. Behind: collectives that a peer has entered and it has not. "
        "Silent: no heartbeat for two seconds.",
    )
    happened = figure(
        Markup('<div id="event-rows" class="scroll"></div>'),
        "Newest first",
        ["faults.jsonl", "metrics.jsonl"],
    )
    log = figure(
        Markup(
            '<div class="controls"><label>rank <select id="rank" aria-label="rank"><option>0</option></select></label>'
            "</div>"
            '<div class="code"><pre id="log-text" tabindex="0"></pre></div>'
        ),
        "End of a log",
        ["logs/rank-*.log"],
    )
    body = (
        f"{head}<main>{section('Curves', CONTROLS, curves)}{section('Ranks', ranks)}"
        f"{section('Events', happened)}{section('Log', log)}</main>"
        '<footer id="foot">Updates every two seconds.</footer>'
    )
    return page(f"{name} · live · Shoal", body, {"charts": {}}, (*CHARTS, "watch.js"), connects=True)
