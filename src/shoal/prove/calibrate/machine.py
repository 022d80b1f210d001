"""Calibrate a machine from start to end: measure, fit, compare with the last one, save."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console

from shoal.facts.calibration import Calibration, LinkRates, file
from shoal.facts.calibration.file import FORMAT, Stored
from shoal.facts.calibration.measurements import Copies, HostWork, Measurements
from shoal.facts.cluster import Cluster
from shoal.facts.cluster.devices import Device, Precision
from shoal.facts.cluster.this_machine import look
from shoal.facts.problem import BadInput
from shoal.parallel import device_context
from shoal.prove.calibrate import copies, fit, host, host_update, kernels, links
from shoal.prove.calibrate.circumstances import versions
from shoal.prove.calibrate.drift import Rate, compared, words
from shoal.prove.calibrate.kernels import EFFORT, Effort, KernelMeasurements
from shoal.prove.calibrate.sizes import CalibrationSizes, sizes
from shoal.train.files import replace_text

Part = TypeVar("Part")


def calibrate(
    console: Console,
    visible: str | None,
    folder: Path | None = None,
    effort: Effort | None = None,
    chosen: CalibrationSizes | None = None,
) -> CalibrationReport:
    """Measure this machine, save the result in ``folder`` (by default Shoal's cache), and use it from now on.

    ``visible`` is the value of CUDA_VISIBLE_DEVICES. ``effort`` and ``chosen``: how long to measure, and what.
    """
    folder = file.default_folder() if folder is None else folder
    cluster = look(visible)
    on = _device(cluster)
    before = _before(folder, cluster.device.name)
    start = time.perf_counter()

    def tell(what: str) -> None:
        console.print(f"{time.perf_counter() - start:4.0f} s  {what}", markup=False)

    chosen = chosen or sizes(on, cluster.device.memory_bytes)
    stored = _measured(cluster, on, chosen, effort or EFFORT[on.type], folder, tell)
    folder.mkdir(parents=True, exist_ok=True)
    path = file.file_of(folder, stored.measured.device)
    replace_text(path, stored.model_dump_json(indent=1) + "\n")
    if stored.fast is not None:
        links.keep(folder, stored.measured.device, "fast", stored.fast)
    for warning in file.use(folder):
        console.print(warning, markup=False)
    if before is None:
        return CalibrationReport(path, stored, [], None)
    return CalibrationReport(path, stored, compared(before, stored), before.measured.date)


def _device(cluster: Cluster) -> torch.device:
    """The first device stands for all."""
    if cluster.device.name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise BadInput(
            f"this machine has {cluster.device.name}, and this torch ({torch.__version__}) cannot use it",
            "a torch built for it; shoal doctor says more",
        )
    first = torch.device("cuda", 0)
    device_context.take(first)
    return first


def _before(folder: Path, device: str) -> Stored | None:
    """The calibration about to be replaced, if there is a readable one."""
    try:
        return file.read(file.file_of(folder, device))
    except ValueError:
        return None


def _measured(
    cluster: Cluster,
    on: torch.device,
    chosen: CalibrationSizes,
    effort: Effort,
    folder: Path,
    tell: Callable[[str], None],
) -> Stored:
    """Measure part by part. A failing part costs only itself: predictions from it fall back to built-in rates."""
    start = time.perf_counter()
    seen = kernels.measure(on, chosen, effort, tell)
    if not seen.products.get(seen.precision) or not seen.parts.get(seen.precision):
        raise BadInput(
            f"no kernels could be measured on {cluster.device.name}: {'; '.join(seen.missing[:3])}",
            "shoal doctor says whether torch can use this device",
        )

    def attempt(what: str, part: Callable[[], Part]) -> Part | None:
        tell(what)
        try:
            return part()
        except Exception as error:  # the other parts are still useful
            reason = (str(error).splitlines() or [""])[0][:200] or type(error).__name__
            seen.missing.append(f"{what}: {reason}")
            tell(f"left out: {seen.missing[-1]}")
            return None

    work = attempt("host: starting operators, layers, steps", lambda: host.host_work(on))
    both = attempt("copies to the device and back", lambda: copies.to_and_from(on, chosen.copied))
    updated = attempt(
        "the optimizer on the host's cores", lambda: host_update.bytes_per_second(chosen.updated)
    )
    files = attempt("disk", lambda: copies.disk(folder))
    fast = attempt("links between ranks", lambda: links.links(cluster.devices, on.type == "cpu"))
    tell("done")
    to_device, to_host = both or (None, None)
    write, read, together = files or (None, None, None)
    copied = Copies(
        to_device=to_device, to_host=to_host, disk_write=write, disk_read=read, disk_both=together
    )
    return _stored(cluster.device, on, seen, work, copied, updated, fast, time.perf_counter() - start)


def _stored(
    device: Device,
    on: torch.device,
    seen: KernelMeasurements,
    work: HostWork | None,
    copied: Copies,
    updated: float | None,
    fast: LinkRates | None,
    seconds: float,
) -> Stored:
    # Ignore a datasheet that promises less than was measured, or nothing.
    peaks: dict[Precision, float] = {
        kind: max(device.peak(kind) or 0.0, *(one.flops / one.seconds for one in found))
        for kind, found in seen.products.items()
    }
    curves = [curve for found in seen.parts.values() for curve in found.values()]
    bandwidth = max(device.memory_bandwidth or 0.0, *(curve.rate for curve in curves))
    fastest = max(one.flops / one.seconds for one in seen.products[seen.precision])
    measured = Measurements(
        device=device.name,
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        seconds=seconds,
        versions=versions(on, seen.driver.version),
        power_limit=seen.driver.power_limit,
        clock=seen.driver.clock,
        peaks=peaks,
        bandwidth=bandwidth,
        sustained=seen.sustained or fastest,
        mixed=seen.mixed or fastest,
        busy=seen.busy,
        products=seen.products,
        attention=seen.attention,
        parts=seen.parts,
        host=work,
        copies=copied,
        host_update=updated,
        missing=tuple(seen.missing),
    )
    units = torch.cuda.get_device_properties(on).multi_processor_count if on.type == "cuda" else 1
    slower = [rate for rate in (copied.to_device, copied.to_host) if rate is not None]
    source = f"measured on {measured.date[:10]}"
    return Stored(
        format=FORMAT,
        measured=measured,
        device=fit.fitted(device, measured, seen.precision, units),
        fast=fast,
        host=LinkRates(share=1.0, hop=0.0, start=0.0, bandwidth=min(slower), source=source)
        if slower
        else None,
    )


@dataclass(frozen=True)
class CalibrationReport:
    """A calibration that was just made."""

    path: Path
    stored: Stored
    drift: list[Rate]  # changes from the previous one
    since: str | None  # when the previous one was made

    @property
    def rates(self) -> Calibration:
        return self.stored.calibration(self.path)

    def lines(self) -> list[str]:
        found = self.stored.measured
        return [
            f"{found.device}: measured in {found.seconds:.0f} s, saved to {self.path}",
            *_lines(self.stored),
            *(words(self.drift, self.since) if self.since else []),
        ]


def _lines(stored: Stored) -> Iterator[str]:
    seen = stored.measured
    power = f", {seen.power_limit:.0f} W" if seen.power_limit else ""
    clock = f", {seen.clock:.0f} MHz under load" if seen.clock else ""
    yield f"  {', '.join(f'{name} {version}' for name, version in seen.versions.items())}{power}{clock}"
    for precision, products in seen.products.items():
        rates = sorted(one.flops / one.seconds / 1e12 for one in products)
        yield (
            f"  products {precision}: {rates[0]:.4g} to {rates[-1]:.4g} TFLOP/s, {len(products)} shapes; "
            f"at most {seen.peaks[precision] / 1e12:.4g} promised or seen"
        )
    yield (
        f"  one large product: {seen.mixed / 1e12:.4g} TFLOP/s among the rest, {seen.sustained / 1e12:.4g} alone; "
        f"products and attention had {seen.busy:.0%} of the time"
    )
    for precision, attention in seen.attention.items():
        rates = sorted(3.5 * one.flops / (one.forward + one.backward) / 1e12 for one in attention)
        yield f"  attention {precision}: {rates[0]:.4g} to {rates[-1]:.4g} TFLOP/s, {len(attention)} shapes"
    for precision, curves in seen.parts.items():
        for part, curve in curves.items():
            least = min(curve.seconds) * 1e6
            yield f"  {part} {precision}: {curve.rate / 1e9:.4g} GB/s, at least {least:.3g} µs"
    host, copies = seen.host, seen.copies
    if host is not None and host.forward:
        yield (
            f"  host: {host.forward * 1e6:.3g} µs an operator forward, {host.backward * 1e6:.3g} backward; "
            f"{host.once * 1e3:.3g} ms a step"
        )
    if copies.to_device and copies.to_host:
        yield f"  host to device {copies.to_device / 1e9:.3g} GB/s, back {copies.to_host / 1e9:.3g} GB/s"
    if seen.host_update:
        yield f"  optimizer on the host's cores: {seen.host_update / 1e9:.3g} GB/s of memory"
    if copies.disk_write and copies.disk_read:
        yield f"  disk: {copies.disk_write / 1e9:.3g} GB/s written, {copies.disk_read / 1e9:.3g} GB/s read"
        if copies.disk_both:
            yield f"  disk: {copies.disk_both / 1e9:.3g} GB/s while it is read and written at once"
    if (fast := stored.fast) is not None and fast.bandwidth:
        yield f"  links ({fast.source}): {fast.bandwidth / 1e9:.3g} GB/s, {(fast.start + fast.hop) * 1e6:.3g} µs"
    else:
        yield "  links: not measured, so the built-in rates remain"
    for missing in seen.missing:
        yield f"  not measured: {missing}"
