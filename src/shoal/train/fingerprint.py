"""Fingerprint initial weights without reading them all; a model directory may move between stop and resume."""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3

from shoal.facts.input.untrusted_files import read_json

# Samples per file, spread evenly: weights that were trained further differ everywhere.
BLOCKS, BLOCK = 64, 4096


def weights_fingerprint(directory: str | None) -> str | None:
    """A hash of names, lengths, headers and samples of a model directory's safetensors files; None if there are none.

    For a run, which may have progressed meanwhile, its id; for a checkpoint its manifest, which has every hash.
    """
    if directory is None:
        return None
    digest = blake3()
    try:
        place = Path(directory).expanduser()
        paths = sorted(place.glob("*.safetensors")) or sorted(place.glob("manifest.json"))
        if (place / "checkpoints").is_dir():
            return f"run {read_json(place / 'manifest.json')['id']}"
        for path in paths:
            size = path.stat().st_size
            digest.update(f"{path.name}\0{size}\0".encode())
            with path.open("rb") as file:
                # The first blocks are the header: every tensor's name, shape and dtype.
                for number in range(BLOCKS):
                    file.seek(number * max(BLOCK, size // BLOCKS))
                    digest.update(file.read(BLOCK))
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):
        return None
    return digest.hexdigest()[:32] if paths else None
