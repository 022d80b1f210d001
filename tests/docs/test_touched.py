"""docs/architecture.md tells which files a strategy touches, and why those beyond the usual ones; the source agrees."""

from __future__ import annotations

import ast
import re

from tests.docs.files import PAGE, SOURCE, existing

BLOCK = re.compile(r"<!-- touched -->\n(.*?)<!-- end touched -->", re.DOTALL)
ROW = re.compile(r"^\| `([\w/]+\.py)` \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
# What of a layout each of them adds: read as an attribute, whatever it is read of.
READ = {"cp": {"cp", "cp_kind"}, "ep": {"ep"}}
# What of the server's is imported, or read of the config.
SERVER = re.compile(
    r"layout\.server_ranges|parallel\.server|train\.server|import refuse_servers|config\.server\b"
)
# Every degree is read there, to search, to bound, to export: see the page.
ALL_DEGREES = ("plan/", "cli/", "report/")


def touched() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path in existing():
        if path.startswith(ALL_DEGREES):
            continue
        text = (SOURCE / path).read_text()
        read = {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
        of = {name for name, attributes in READ.items() if read & attributes}
        of |= {"server"} if SERVER.search(text) else set()
        if of:
            found[path] = of
    return found


def test_the_page_lists_what_each_strategy_touches() -> None:
    block = BLOCK.search(PAGE.read_text())
    assert block
    rows = ROW.findall(block[1])
    listed = {path: set(re.findall(r"`(\w+)`", names)) for path, names, _ in rows}
    assert len(listed) == len(rows)
    assert listed == touched()


def test_the_list_is_not_empty_where_it_has_to_be() -> None:
    """The rule finds what there must be: each strategy's own code, and its price."""
    found = touched()
    for path, name in (
        ("parallel/context.py", "cp"),
        ("predict/traffic/context.py", "cp"),
        ("parallel/experts.py", "ep"),
        ("predict/time/expert.py", "ep"),
        ("train/server/serve.py", "server"),
    ):
        assert name in found[path]
