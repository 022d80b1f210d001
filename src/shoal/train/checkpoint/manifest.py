"""The manifest: every piece of a checkpoint with its hash, and the manifest's own hash. Needs no torch.

The hash detects accidental changes. A deliberate change can bring a new hash, so facts that are written twice (the
model and its tensors, the samples and the recipe) must agree.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from itertools import groupby, zip_longest
from typing import Annotated, Any

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.facts.input.untrusted_files import first_fault
from shoal.facts.model import Model
from shoal.facts.model.parameters import parameters
from shoal.facts.model.tensor_split import cover_alike
from shoal.facts.optimizers import OF_MATRICES
from shoal.facts.recipe import RampStage
from shoal.facts.sample_clock import SampleClock
from shoal.facts.stored_states import Keeps, StoredBox, factored_shape, stored_boxes

# Manifest formats: all pieces listed, or some pieces in separate lists (``parts.py``).
FORMAT, IN_PARTS = 2, 3
NAME = "manifest.json"

# A manifest says how much to read, so it is checked against limits, far beyond any model, before anything is allocated.
LARGEST_MANIFEST = 1 << 30
LARGEST_TENSOR = 1 << 44  # elements
LARGEST_COUNT = 1 << 62  # of anything: bytes, steps, samples
LARGEST_FILE = 1 << 50
MOST_DIMENSIONS = 5  # of a convolution over volumes
LONGEST_NAME = 200  # of a file
LONGEST_MESSAGE = 2000

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}
# Also for a user's own module, whose buffers may be counts and masks.
ITEM_BYTES |= {"float16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1}

# Keys in the identity of a user's own module: which module it is, and which tensors have which states.
MODULE, MODULE_STATES = "library.module", "library.states"


class Damaged(Exception):
    """A checkpoint whose content does not match its manifest. It is never loaded."""

    def __init__(self, what: str) -> None:
        """``what`` may quote anything found in a file, so it is sanitised: it can neither fill a log nor move a
        terminal's cursor.
        """
        super().__init__((what if what.isprintable() else ascii(what)[1:-1])[:LONGEST_MESSAGE])


Count = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]


class StoredPiece(BaseModel):
    """A box of one tensor, and where its bytes are. Tensor names and shapes are Hugging Face's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tensor: str
    state: str  # "weight", or the optimizer's name for the state: "exp_avg", …
    dtype: str
    offset: tuple[Count, ...]  # of the box, in the tensor
    size: tuple[Count, ...]  # of the box
    file: str
    position: Count  # of its bytes in the file
    bytes: Count
    hash: str

    def __str__(self) -> str:
        where = f"bytes {self.position} to {self.position + self.bytes}"
        return (
            f"{self.file}: {self.state} of {self.tensor}, {list(self.size)} at {list(self.offset)} ({where})"
        )


class ListedPart(BaseModel):
    """The pieces of one rank's file, listed in a file beside it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str  # name of the list
    bytes: Count  # of the list
    hash: str
    of: str  # the file whose pieces are listed
    size: Count  # of that file
    pieces: Count  # how many


# Evenly spaced parts whose boxes of a tensor are evenly spaced too: first part, step between parts, number of parts;
# and the boxes' first offset, step and size.
PartRun = tuple[Count, Count, Count, tuple[Count, ...], tuple[Count, ...], tuple[Count, ...]]


class Manifest(BaseModel):
    """A checkpoint: the state after ``step``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
    step: Count
    samples: Count  # used so far: with the recipe's seed, this is the position in the data
    model: dict[str, Any]
    identity: dict[str, Any]  # what a resume must have in common: recipe and data
    recipe: str  # the hash of ``identity``
    scalars: dict[str, float]  # updates made, loss scale
    heldout_loss: float | None = None
    shapes: dict[str, tuple[Count, ...]]  # of every whole tensor
    pieces: tuple[StoredPiece, ...]
    parts: tuple[ListedPart, ...] = ()
    states: tuple[str, ...] = ()  # states listed in parts
    index: dict[str, dict[str, tuple[PartRun, ...]]] = {}  # which parts have pieces of a tensor

    def to_text(self) -> str:
        content = self.model_dump(mode="json", exclude=None if self.parts else {"parts", "states", "index"})
        return dump({**content, "hash": blake3(dump(content).encode()).hexdigest()}) + "\n"

    @property
    def bytes(self) -> int:
        return sum(piece.bytes for piece in self.pieces) + sum(part.size for part in self.parts)

    @property
    def count(self) -> int:
        """The number of pieces, including those in separate lists."""
        return len(self.pieces) + sum(part.pieces for part in self.parts)

    def shape_of(self, state: str, tensor: str) -> tuple[int, ...] | None:
        """The shape of a whole tensor's state; None if there is no such tensor."""
        if state not in OF_MATRICES:
            return self.shapes.get(tensor)
        return factored_shape(self.parsed_model, state, tensor)

    @cached_property
    def parsed_model(self) -> Model:
        """The model. Raises ``Damaged`` if it is not a valid one."""
        return _model(self, "manifest")

    def file_sizes(self) -> dict[str, int]:
        """The length of each file: pieces fill it without a gap."""
        sizes: Counter[str] = Counter()
        for piece in self.pieces:
            sizes[piece.file] += piece.bytes
        return {**sizes, **{part.of: part.size for part in self.parts}, **self.list_sizes()}

    def list_sizes(self) -> dict[str, int]:
        return {part.file: part.bytes for part in self.parts}


def is_file_name(name: object) -> bool:
    """Whether this can name a checkpoint's file and nothing outside it; the manifest's own name cannot."""
    plain = isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*", name)
    return bool(plain) and name != NAME and len(str(name)) <= LONGEST_NAME


def identity_hash(identity: dict[str, Any]) -> str:
    return blake3(dump(identity, sort_keys=True).encode()).hexdigest()


def parse_manifest(content: bytes, where: str) -> Manifest:
    """Parse and verify a manifest; pieces are verified as they are read.

    ``where``: for messages.
    """
    if len(content) > LARGEST_MANIFEST:
        raise Damaged(f"{where} is too long for a manifest: {len(content)} bytes")
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{where} cannot be read: {error}") from None
    if not isinstance(parsed, dict) or parsed.get("format") not in (FORMAT, IN_PARTS):
        found = parsed.get("format") if isinstance(parsed, dict) else None
        raise Damaged(f"{where} has format {found}; this version of Shoal reads {FORMAT} and {IN_PARTS}")
    parsed.pop("hash", None)
    try:
        manifest = Manifest.model_validate(parsed)
        again = manifest.to_text().encode()
    except ValidationError as error:
        raise Damaged(f"{where} is not a manifest: {first_fault(error)}") from None
    except (ValueError, RecursionError) as error:
        # Nesting too deep to be written again was not written by us.
        raise Damaged(f"{where} is not a manifest: {error}") from None
    # Written again it must be identical to the byte, hash included: even changed whitespace is a change.
    if again != content:
        raise Damaged(f"{where} was changed after it was written: its hash does not match")
    _check(manifest, where)
    _check_index(manifest, where)
    return manifest


def _check(manifest: Manifest, where: str) -> None:
    """Refuse whatever our writer would never write: the manifest may be malicious."""
    numbers = [*manifest.scalars.values(), manifest.heldout_loss or 0.0]
    if not all(map(math.isfinite, numbers)):
        raise Damaged(f"{where} holds a number that is not finite")
    for name, shape in manifest.shapes.items():
        if len(shape) > MOST_DIMENSIONS or math.prod(shape) > LARGEST_TENSOR:
            raise Damaged(f"{where}: {name} cannot have the shape {shape}")
    if bool(manifest.parts) != (manifest.format == IN_PARTS):
        raise Damaged(f"{where} has format {manifest.format} and {len(manifest.parts)} parts")
    files = [name for part in manifest.parts for name in (part.file, part.of)]
    for name in files:
        if not is_file_name(name):
            raise Damaged(f"{where} names a file outside the checkpoint: {name!r}")
    if len({*files, *(piece.file for piece in manifest.pieces)}) < len(files) + len(
        {piece.file for piece in manifest.pieces}
    ):
        raise Damaged(f"{where} names a file twice")
    if not manifest.parts:
        check_complete(manifest, where)
    for piece in manifest.pieces if manifest.parts else ():
        check_piece(piece, manifest.shape_of(piece.state, piece.tensor), where)


def _check_index(manifest: Manifest, where: str) -> None:
    """Refuse an index with invalid entries."""
    for kind, tensors in manifest.index.items():
        for tensor, runs in tensors.items():
            shape = manifest.shape_of(kind or "weight", tensor)
            for first, step, count, offset, apart, size in runs:
                same = shape is not None and len(offset) == len(apart) == len(size) == len(shape)
                if not same or count < 1 or first + step * (count - 1) >= len(manifest.parts):
                    raise Damaged(f"{where}: its index of {tensor} names parts that do not exist")
    for part in manifest.parts:
        if part.bytes > LARGEST_MANIFEST:
            raise Damaged(f"{where}: {part.file} is too long for a list: {part.bytes} bytes")


def check_complete(manifest: Manifest, where: str) -> None:
    """Check a manifest that lists all pieces: they must fill their files and cover their tensors."""
    for piece in manifest.pieces:
        check_piece(piece, manifest.shape_of(piece.state, piece.tensor), where)
    in_order = sorted(manifest.pieces, key=lambda piece: (piece.file, piece.position))
    for file, pieces in groupby(in_order, key=lambda piece: piece.file):
        end = 0
        for piece in pieces:
            if piece.position != end:
                raise Damaged(f"{where}: the pieces of {file} overlap or leave a gap at byte {end}")
            end += piece.bytes
    _check_tensors(manifest, where)


def check_piece(piece: StoredPiece, shape: tuple[int, ...] | None, where: str) -> None:
    if not is_file_name(piece.file):
        raise Damaged(f"{where} names a file outside the checkpoint: {piece.file!r}")
    item = ITEM_BYTES.get(piece.dtype)
    if item is None or piece.bytes != math.prod(piece.size) * item:
        raise Damaged(f"{where}: {piece}: {piece.bytes} bytes of {piece.dtype} cannot be {piece.size}")
    if (
        shape is None
        or not len(shape) == len(piece.offset) == len(piece.size)
        or 0 in piece.size
        or any(
            start + size > whole for start, size, whole in zip(piece.offset, piece.size, shape, strict=True)
        )
    ):
        raise Damaged(f"{where}: {piece} is no box of a tensor of shape {shape}")


def _check_tensors(manifest: Manifest, where: str) -> None:
    """Check that every element of a tensor is covered once, and that a state of one tensor exists for all tensors
    the optimizer keeps it for; otherwise a restore would leave some unset.
    """
    by_state: dict[str, dict[str, list[StoredPiece]]] = {"weight": {}}
    for piece in manifest.pieces:
        by_state.setdefault(piece.state, {}).setdefault(piece.tensor, []).append(piece)
    try:
        keeps = Keeps.from_identity(manifest.identity)
    except ValueError as error:
        raise Damaged(f"{where}: {error}") from None
    for state, by_tensor in by_state.items():
        expected: Mapping[str, list[StoredBox]]
        if state != "weight" and MODULE in manifest.identity:
            expected = _of_module(manifest, state, where)
        elif state == "weight" or keeps.alike:
            expected = {name: [((0,) * len(shape), shape)] for name, shape in manifest.shapes.items()}
        else:
            expected = stored_boxes(manifest.parsed_model, keeps, state)
        missing = [name for name in expected if name not in by_tensor]
        if missing or not by_tensor:
            raise Damaged(f"{where} lists no {state} of {next(iter(missing), 'any tensor')}")
        for name, pieces in by_tensor.items():
            boxes = ((piece.offset, piece.size) for piece in pieces)
            whole = name in expected and cover_alike(expected[name], boxes)
            # Parts of a fused tensor may be frozen and stored in their compute dtype.
            alike = len({piece.dtype for piece in pieces}) == 1 or (keeps.groups and state == "weight")
            if not alike or not whole:
                raise Damaged(f"{where}: the pieces of {state} {name} do not make up the tensor")


def _of_module(manifest: Manifest, state: str, where: str) -> dict[str, list[StoredBox]]:
    listed = manifest.identity.get(MODULE_STATES)
    names = listed.get(state) if isinstance(listed, dict) else None
    if not isinstance(names, list) or not all(name in manifest.shapes for name in map(str, names)):
        raise Damaged(f"{where} does not say of which tensors it has {state}")
    shapes = ((str(name), manifest.shapes[str(name)]) for name in names)
    return {name: [((0,) * len(shape), shape)] for name, shape in shapes}


def dump(content: Any, sort_keys: bool = False) -> str:
    return json.dumps(content, separators=(",", ":"), sort_keys=sort_keys)


SCALARS = {"updates", "loss_scale", "quiet_steps"}
BATCH, RAMP = "recipe.batch", "recipe.batch_ramp"


def check_agrees(manifest: Manifest, where: str, of_run: Model | None = None) -> None:
    """Refuse a manifest whose parts contradict each other. ``where``: for messages.

    ``of_run``: the model of the run that it is in, if known.
    """
    if MODULE not in manifest.identity:
        _check_model(manifest, where, of_run)
    elif of_run is not None:
        raise Damaged(f"{where} is of a module of the user's own, and its run trains {of_run.name}")
    if identity_hash(manifest.identity) != manifest.recipe:
        raise Damaged(f"{where}: the recipe was changed: its hash does not match")
    batch = manifest.identity.get(BATCH)
    if isinstance(batch, int) and batch > 0:
        used = _clock(manifest, batch, where).before(manifest.step + 1)
        if manifest.samples != used:
            raise Damaged(
                f"{where} says {manifest.samples} samples were used; {manifest.step} steps of {batch} are {used}"
            )
    scalars = manifest.scalars
    if missing := SCALARS - scalars.keys():
        raise Damaged(f"{where} lacks {', '.join(sorted(missing))}")
    counted = scalars["updates"], scalars["quiet_steps"]
    if any(count < 0 or not count.is_integer() for count in counted) or scalars["loss_scale"] <= 0:
        raise Damaged(f"{where} holds numbers that no run has: {scalars}")


def _check_model(manifest: Manifest, where: str, of_run: Model | None) -> None:
    model = _model(manifest, where)
    _check_shapes(model, manifest, where)
    if of_run is not None and model != of_run.model_copy(update={"name": model.name}):
        different = (
            name
            for name in Model.model_fields
            if name != "name" and getattr(model, name) != getattr(of_run, name)
        )
        changed = "; ".join(
            f"{name} is {getattr(model, name)!r}, there {getattr(of_run, name)!r}" for name in different
        )
        raise Damaged(f"{where}: its model is not that of its run: {changed}")


def _clock(manifest: Manifest, batch: int, where: str) -> SampleClock:
    try:
        stages = [RampStage.model_validate(stage) for stage in manifest.identity.get(RAMP, ())]
    except (TypeError, ValidationError):
        raise Damaged(f"{where}: its {RAMP} is none") from None
    return SampleClock(batch, tuple((stage.batch, stage.samples) for stage in stages))


def _model(manifest: Manifest, where: str) -> Model:
    try:
        return Model.model_validate_json(json.dumps(manifest.model), strict=True)
    except ValidationError as error:
        raise Damaged(f"{where}: its model is none: {first_fault(error)}") from None


def _check_shapes(model: Model, manifest: Manifest, where: str) -> None:
    # Side by side, stopping at the first difference: a malicious model may claim millions of tensors.
    for parameter, found in zip_longest(parameters(model), manifest.shapes.items()):
        ours = (parameter.name, parameter.shape) if parameter is not None else None
        if ours != found:
            raise Damaged(
                f"{where}: its model was changed: it has {_words(ours)}, the tensors are {_words(found)}"
            )


def _words(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    return "no more" if tensor is None else f"{tensor[0]} of {list(tensor[1])}"
