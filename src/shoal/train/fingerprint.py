"""Fingerprint initial weights without reading them all; a model directory may move between stop and resume."""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3

# Of each file, spread evenly: weights that were trained further differ everywhere.
BLOCKS, BLOCK = 64, 4096


def weights_fingerprint(directory: str | None) -> str | None:
    """Of names, lengths, headers and samples of a model directory's safetensors files; None where there are none."""
    if directory is None:
        return None
    digest = blake3()
    try:
        paths = sorted(Path(directory).expanduser().glob("*.safetensors"))
        for path in paths:
            size = path.stat().st_size
            digest.update(f"{path.name}\0{size}\0".encode())
            with path.open("rb") as file:
                # The first ones are the header: every tensor's name, shape and type.
                for number in range(BLOCKS):
                    file.seek(number * max(BLOCK, size // BLOCKS))
                    digest.update(file.read(BLOCK))
    except (OSError, RuntimeError):
        return None
    return digest.hexdigest()[:32] if paths else None
