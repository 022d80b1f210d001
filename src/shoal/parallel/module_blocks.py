"""Find the blocks of any network: the modules that FSDP gathers as units and recomputation repeats.

Blocks are found where a class repeats among siblings, or are named, cut by size, or listed one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from torch import nn

from shoal.facts.problem import BadInput, did_you_mean

# Where to cut: a class, its name or a module's path; the module itself; several of these; a size in parameters; or a
# function that is called with every module. None: find blocks automatically.
OneBlock = str | type[nn.Module] | nn.Module
Wrap = OneBlock | Sequence[OneBlock] | int | Callable[[nn.Module], bool] | None

CONTAINERS = (nn.ModuleList, nn.ModuleDict)
# Containers whose children run one after another.
ROWS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
BY_HAND = "wrap= takes a class, its name, a module's path, a module, a list of these, a size or a function"


def find_blocks(root: nn.Module, wrap: Wrap = None) -> list[nn.Module]:
    """The blocks of a network, in module order; the network itself is never one."""
    if wrap is None:
        return _without_tied(root, _repeated(root))
    if isinstance(wrap, bool) or (isinstance(wrap, int) and wrap < 1):
        raise BadInput(f"wrap={wrap}: a size is a number of parameters", "wrap=10_000_000, or leave it out")
    if isinstance(wrap, int):
        return _without_tied(root, _by_size(root, wrap))
    if isinstance(wrap, str | nn.Module | type):
        return _check_tied(root, _named(root, [wrap]))
    if isinstance(wrap, Sequence):
        return _check_tied(root, _named(root, wrap))
    if callable(wrap):
        chosen = _checked([module for module in root.modules() if module is not root and wrap(module)])
        return _check_tied(root, chosen)
    raise BadInput(f"wrap={wrap!r} names no modules", BY_HAND)


def innermost(blocks: list[nn.Module]) -> list[nn.Module]:
    """Blocks that contain no other block, so that nothing is recomputed twice."""
    chosen = set(blocks)
    return [
        block for block in blocks if not any(part in chosen for part in block.modules() if part is not block)
    ]


def _without_tied(root: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """Keep parameters that two modules share in one unit: blocks that hold only one of the two are left to the root."""
    return [block for block in blocks if _tied_outside(root, block) is None]


def _check_tied(root: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    for block in blocks:
        if (name := _tied_outside(root, block)) is not None:
            raise BadInput(
                f"wrap: {name} is tied to a parameter outside of its {type(block).__name__}",
                f"leave {type(block).__name__} out: both are gathered with the rest of the model",
            )
    return blocks


def _tied_outside(root: nn.Module, block: nn.Module) -> str | None:
    """A parameter of the block that a module outside also has."""
    inside = set(block.modules())
    outside = {
        parameter
        for module in root.modules()
        if module not in inside
        for parameter in module.parameters(recurse=False)
    }
    return next((name for name, parameter in block.named_parameters() if parameter in outside), None)


def _repeated(root: nn.Module) -> list[nn.Module]:
    """The modules that transformers marks as not to be split; otherwise classes that siblings share."""
    names = set(getattr(root, "_no_split_modules", None) or ())
    found = _outermost(root, lambda module: type(module).__name__ in names)
    return found or _outermost(root, _neighbours(root).__contains__)


def _neighbours(root: nn.Module) -> set[nn.Module]:
    """Modules with children, whose class another sibling shares."""
    found: set[nn.Module] = set()
    for row in root.modules():
        if isinstance(row, ROWS):
            here = [child for child in row.children() if _is_whole(child)]
            often = Counter(map(type, here))
            found.update(child for child in here if often[type(child)] > 1)
    return found


def _is_whole(module: nn.Module) -> bool:
    has_parts = next(module.children(), None) is not None and not isinstance(module, CONTAINERS)
    return has_parts and next(module.parameters(), None) is not None


def _outermost(root: nn.Module, chosen: Callable[[nn.Module], bool]) -> list[nn.Module]:
    def walk(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if chosen(child):
                yield child
            else:
                yield from walk(child)

    return list(dict.fromkeys(walk(root)))


def _by_size(root: nn.Module, least: int) -> list[nn.Module]:
    """Modules with at least ``least`` parameters beyond those of blocks inside them."""
    found: list[nn.Module] = []

    def rest(module: nn.Module) -> int:
        own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        size = own + sum(map(rest, module.children()))
        if size < least or module is root or isinstance(module, CONTAINERS):
            return size
        found.append(module)
        return 0

    rest(root)
    order = {id(module): number for number, module in enumerate(root.modules())}
    return sorted(found, key=lambda module: order[id(module)])


def _named(root: nn.Module, wanted: Sequence[OneBlock]) -> list[nn.Module]:
    paths = dict(root.named_modules())
    known = {id(module) for module in paths.values()}
    found: list[nn.Module] = []
    for one in wanted:
        if isinstance(one, nn.Module):
            if id(one) not in known:
                raise BadInput(
                    f"wrap: {type(one).__name__} is no part of the model", "a module of the model itself"
                )
            found.append(one)
        elif isinstance(one, type):
            found += [module for module in paths.values() if isinstance(module, one) and module is not root]
        elif one in paths and one:
            found.append(paths[one])
        else:
            classes = {type(module).__name__ for module in paths.values()}
            some = [m for m in paths.values() if type(m).__name__ == one and m is not root]
            if not some:
                raise BadInput(
                    f"wrap={one!r}: no such class or path in the model", did_you_mean(one, classes)
                )
            found += some
    order = {id(module): number for number, module in enumerate(paths.values())}
    return _checked(sorted(dict.fromkeys(found), key=lambda module: order[id(module)]))


def _checked(blocks: list[nn.Module]) -> list[nn.Module]:
    """Refuse lists of modules: FSDP gathers a module when it is called, and a list never is."""
    for block in blocks:
        if isinstance(block, CONTAINERS):
            raise BadInput(
                f"wrap: a {type(block).__name__} is never called itself, so nothing would gather it",
                "name what it holds",
            )
    return blocks
