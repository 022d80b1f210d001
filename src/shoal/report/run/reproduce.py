"""Where and with what a run was made, and how to reproduce it."""

from __future__ import annotations

import shlex

from shoal.facts.redact import redact
from shoal.report.markup import Markup, code, figure, folded, grid, table
from shoal.report.numbers import count, moment
from shoal.report.run_files import RunFiles, lookup


def section(run: RunFiles) -> Markup:
    return grid(_machine(run), _again(run))


def _machine(run: RunFiles) -> Markup:
    found = run.manifest
    if not found:
        return Markup("")
    packages = lookup(found, "packages")
    listed = (
        ", ".join(f"{name} {version}" for name, version in packages.items())
        if isinstance(packages, dict)
        else ""
    )
    device, nodes = lookup(found, "cluster", "device", "name"), lookup(found, "cluster", "nodes")
    each = lookup(found, "cluster", "devices_per_node")
    rows = [
        ("last started", moment(str(found["started"])) if found.get("started") else None),
        ("Shoal", found.get("shoal")),
        ("packages", listed),
        ("Python", found.get("python")),
        ("git", found.get("git")),
        ("host", lookup(found, "host", "name")),
        ("system", lookup(found, "host", "system")),
        ("cores", lookup(found, "host", "cores")),
        ("devices", f"{nodes} × {each} {device}" if device else None),
        ("model", lookup(found, "model", "name")),
        ("parameters", count(found["parameters"]) if isinstance(found.get("parameters"), int) else None),
        ("FLOPs", found.get("flops")),
        ("data", found.get("data")),
        ("run id", found.get("id")),
    ]
    told = [(name, redact(str(value))) for name, value in rows if value not in (None, "")]
    return figure(table(("", ""), told, style="names"), "Versions and machine", ["manifest.json"], wide=False)


def _again(run: RunFiles) -> Markup:
    lines = []
    if isinstance(commit := run.manifest.get("git"), str):
        dirty = "  # it had changes that are not in this commit" if commit.endswith("-dirty") else ""
        lines.append(f"git checkout {shlex.quote(commit.removesuffix('-dirty'))}{dirty}")
    torch, ours = lookup(run.manifest, "packages", "torch"), run.manifest.get("shoal")
    if isinstance(torch, str) and isinstance(ours, str):
        lines.append(f"pip install {shlex.quote(f'shoal=={ours}')} {shlex.quote(f'torch=={torch}')}")
    place, copy = shlex.quote(str(run.path)), shlex.quote(f"{run.path}-again")
    lines += [
        f"shoal train {place}/config.toml --run {copy}",
        f"shoal report {place} {copy}",
    ]
    text = "Sample order, initial weights and dropout depend on the seed alone, not on the layout."
    config = folded("config.toml, complete", code(redact(run.config_text))) if run.config_text else Markup("")
    return figure(
        Markup(code("\n".join(lines), copy=True) + config),
        "Reproduce this run",
        ["manifest.json: git, shoal, packages", "config.toml"],
        text,
    )
