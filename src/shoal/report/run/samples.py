"""Text that the model generated during training, so that one can watch it learn."""

from __future__ import annotations

from html import escape

from shoal.facts.redact import printable
from shoal.report.columns import is_number
from shoal.report.markup import Markup, figure
from shoal.report.run_files import RunFiles

MOST, LONGEST, LONGEST_PROMPT = 10, 700, 160


def section(run: RunFiles) -> Markup:
    """Samples of the first prompt, evenly spread over the run, always including the first and the last."""
    rows = [row for row in run.samples if is_number(row.get("step")) and isinstance(row.get("text"), str)]
    if not rows:
        return Markup("")
    prompt = rows[0].get("prompt")
    same = [row for row in rows if row.get("prompt") == prompt]
    chosen = {round(place * (len(same) - 1) / max(1, MOST - 1)) for place in range(MOST)}
    parts = []
    for place in sorted(chosen & set(range(len(same)))):
        text = _shown(same[place]["text"], LONGEST)
        parts.append(f"<dt>step {int(same[place]['step'])}</dt><dd>{text}</dd>")
    begin = f'<p class="note prompt">Prompt: <code>{_shown(str(prompt), LONGEST_PROMPT)}</code></p>'
    more = f"{len(parts)} of {len(rows)} samples." if len(parts) < len(rows) else ""
    content = Markup(f'{begin}<dl class="samples">{"".join(parts)}</dl>')
    return figure(content, "Generated text", ["samples.jsonl: step, prompt, text"], more, wide=True)


def _shown(text: str, longest: int) -> str:
    lines = "\n".join(printable(line) for line in text[:longest].split("\n"))
    return escape(lines) + ("…" if len(text) > longest else "")
