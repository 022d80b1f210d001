"""The commands of a shell script with variables expanded; nothing is executed.

Supports what training launch scripts use: quotes, comments, continued lines, variables, arrays, integer arithmetic.
Lines are read in order, including all branches of a condition; what only a run could tell (a command's output, the
environment, an argument) stays as written, as ``Unknown``.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field

from shoal.plan.importers.reading import Unknown

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_WITHOUT_MEANING = (
    "then",
    "else",
    "do",
    "{",
    "!",
    "time",
    "exec",
    "nohup",
    "export",
    "declare",
    "local",
    "readonly",
)
_CONDITIONS = ("if", "elif", "case", "while", "until", "for", "[", "[[", "fi", "done", "esac", "test")
# A few lines can double a variable many times; no real script does.
_LONGEST_WORD, _MOST_WORDS = 1 << 16, 1 << 14
_BATCH = re.compile(r"^#SBATCH\s+(--[\w-]+)(?:[=\s]+(\S+))?", re.MULTILINE)


@dataclass
class ShellScript:
    commands: list[list[str]] = field(default_factory=list)
    conditions: bool = False  # whether parts of it are conditional
    batch: dict[str, str] = field(default_factory=dict)  # what ``#SBATCH`` lines request


def read_shell(text: str) -> ShellScript:
    """Raises ``ValueError`` if a quote or a bracket is left open."""
    reader = _ShellReader(text.replace("\r\n", "\n"))
    reader.read()
    batch = {name.removeprefix("--"): value for name, value in _BATCH.findall(text)}
    return ShellScript(reader.commands, reader.conditions, batch)


class _ShellReader:
    def __init__(self, text: str, known: dict[str, list[str]] | None = None) -> None:
        self.text, self.at = text, 0
        self.known: dict[str, list[str]] = {} if known is None else known
        self.commands: list[list[str]] = []
        self.conditions = False
        self.words: list[str] = []  # of the current command
        self.word: str | None = None  # the current word; None: between words
        self.unknown = False  # whether part of it is unknown
        self.into: list[str] | None = None  # the current array
        self.array = ""

    def read(self) -> None:
        while self.at < len(self.text):
            letter = self.text[self.at]
            if self.text.startswith("\\\n", self.at):
                self.at += 2
            elif letter == "\\":
                self.add(self.text[self.at + 1 : self.at + 2])
                self.at += 2
            elif letter == "'":
                end = self.find("'", self.at + 1)
                self.add(self.text[self.at + 1 : end])
                self.at = end + 1
            elif letter == '"':
                self.quoted()
            elif letter in "$`":
                self.expand(split=not self.assigns())
            elif letter == "#" and self.word is None:
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif (here := _HEREDOC.match(self.text, self.at)) is not None:
                self.skip_document(here)
            elif letter in " \t\n;&|()<>":
                self.punctuation(letter)
            else:
                self.add(letter)
                self.at += 1
        self.end_word()
        if self.into is not None:
            raise ValueError(f"the array {self.array} is left open")
        self.end_command()

    def punctuation(self, letter: str) -> None:
        self.at += 1
        if letter == "(" and self.word is not None and self.assigns() and self.word.endswith("="):
            self.array, self.word, self.into = self.word, None, self.words
            self.words = []
            return
        if letter in "<>":  # redirections are not part of the command
            self.word = None if self.word is not None and self.word.isdigit() else self.word
            self.end_word()
            rest = re.compile(r"[>&]*[ \t]*[^\s;|&]*").match(self.text, self.at)
            self.at = rest.end() if rest else self.at
            return
        self.end_word()
        if letter == ")" and self.into is not None:
            self.set(self.array, self.words)
            self.words, self.into = self.into, None
        elif letter not in " \t" and self.into is None:
            self.end_command()

    def assigns(self) -> bool:
        """Whether the current word assigns a variable: it is not split then."""
        return not self.words_before() and self.word is not None and bool(_ASSIGNMENT.match(self.word))

    def words_before(self) -> list[str]:
        if self.into is not None:
            return self.words or ["("]
        return [word for word in self.words if word not in _WITHOUT_MEANING and not _ASSIGNMENT.match(word)]

    def add(self, text: str, unknown: bool = False) -> None:
        self.word = (self.word or "") + text
        self.unknown |= unknown
        if len(self.word) > _LONGEST_WORD:
            raise ValueError(f"a word is longer than {_LONGEST_WORD:,} letters")

    def end_word(self) -> None:
        if self.word is None:
            return
        word: str = Unknown(self.word) if self.unknown else self.word
        if self.into is None and self.assigns():
            self.set(word, None)
        else:
            self.words.append(word)
        if len(self.words) > _MOST_WORDS:
            raise ValueError(f"a command has more than {_MOST_WORDS:,} words")
        self.word, self.unknown = None, False

    def end_command(self) -> None:
        words = self.words
        while words and words[0] in _WITHOUT_MEANING:
            words = words[1:]
        if words and words[0] in _CONDITIONS:
            self.conditions |= words[0] in ("if", "case")
        elif words:
            self.commands.append(words)
        self.words = []

    def set(self, written: str, items: list[str] | None) -> None:
        match = _ASSIGNMENT.match(written)
        if match is None:
            return
        name, longer = match.groups()
        if items is None:
            rest = written[match.end() :]
            value = Unknown(rest) if isinstance(written, Unknown) else rest
            before = self.known.get(name, [""])[0] if longer else ""
            self.known[name] = [type(value)(before + value)]
        else:
            self.known[name] = [*self.known.get(name, []), *items][-_MOST_WORDS:] if longer else items

    def quoted(self) -> None:
        if self.text.startswith('"$@"', self.at):  # the script's own arguments: there are none here
            self.at += 4
            return
        self.add("")
        self.at += 1
        while self.at < len(self.text) and self.text[self.at] != '"':
            letter = self.text[self.at]
            if self.text.startswith("\\\n", self.at):
                self.at += 2
            elif letter == "\\":
                after = self.text[self.at + 1 : self.at + 2]
                self.add(after if after in '"\\$`' else letter + after)
                self.at += 2
            elif letter in "$`":
                self.expand(split=False)
            else:
                self.add(letter)
                self.at += 1
        if self.at >= len(self.text):
            raise ValueError('a " is left open')
        self.at += 1

    def find(self, mark: str, start: int) -> int:
        end = self.text.find(mark, start)
        if end < 0:
            raise ValueError(f"a {mark} is left open")
        return end

    def skip_document(self, here: re.Match[str]) -> None:
        """Skip a here-document, the lines on a command's standard input."""
        self.end_word()
        line = self.text.find("\n", here.end())
        end = re.compile(rf"^\s*{here[2]}$", re.MULTILINE).search(self.text, max(line, here.end()))
        self.text = (
            self.text[: here.start()]
            + self.text[here.end() : max(line, here.end())]
            + (self.text[end.end() :] if end else "")
        )
        self.at = here.start()

    # Expansions.

    def expand(self, split: bool) -> None:
        """Expand at the current position."""
        start = self.at
        if self.text[start] == "`":
            self.at = self.find("`", start + 1) + 1
            return self.add(self.text[start : self.at], unknown=True)
        if self.text.startswith("$((", start):
            self.at = self.closing("(", ")", start + 1)
            value = self.compute(self.text[start + 3 : self.at - 2])
            return self.add(
                self.text[start : self.at] if value is None else str(value), unknown=value is None
            )
        if self.text.startswith("$(", start):
            self.at = self.closing("(", ")", start + 1)
            return self.add(self.text[start : self.at], unknown=True)
        if self.text.startswith("${", start):
            self.at = self.closing("{", "}", start + 1)
            return self.put(
                self.parameter(self.text[start + 2 : self.at - 1]), self.text[start : self.at], split
            )
        match = _NAME.match(self.text, start + 1)
        if match is None:
            self.at += 1
            return self.add("$")
        self.at = match.end()
        if match[0] in "@*":
            return None
        return self.put(self.known.get(match[0]), self.text[start : self.at], split)

    def put(self, items: list[str] | None, written: str, split: bool) -> None:
        if items is None:
            return self.add(written, unknown=True)
        array = "[@]" in written or "[*]" in written
        if not array:
            items = items[:1]
        parts: list[str] = []
        for item in items:
            parts += item.split() if split and not isinstance(item, Unknown) else [item]
        if split and len(parts) == 1 and items[0][:1].isspace() and self.word is not None:
            self.end_word()
        for number, part in enumerate(parts):
            if number:
                self.end_word()
            self.add(part, unknown=isinstance(part, Unknown))
        return None

    def parameter(self, inside: str) -> list[str] | None:
        """``${…}``: a variable, an array, or a variable with a default."""
        match = re.fullmatch(r"([A-Za-z_]\w*|[0-9@*])(\[[@*]\])?(?::?[-=](.*))?", inside, re.DOTALL)
        if match is None:
            return None
        if match[1] in "@*":
            return []
        known = self.known.get(match[1])
        if known is not None or match[3] is None:
            return known
        default = _ShellReader(f"X={match[3]}", self.known)
        default.known = {**self.known}
        default.read()
        return default.known.get("X")

    def compute(self, expression: str) -> int | None:
        def value(match: re.Match[str]) -> str:
            found = self.known.get(match[1] or match[2], ["?"])[0]
            return found if re.fullmatch(r"[0-9]{1,12}", found) else "?"

        filled = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?|\$([0-9])", value, expression)
        if not re.fullmatch(r"[0-9+*/%() \t-]{1,200}", filled):
            return None
        try:
            return _whole(ast.parse(filled.strip().replace("/", "//"), mode="eval").body)
        except (SyntaxError, ZeroDivisionError, RecursionError):
            return None

    def closing(self, opens: str, closes: str, start: int) -> int:
        depth = 0
        for place in range(start, len(self.text)):
            depth += (self.text[place] == opens) - (self.text[place] == closes)
            if not depth:
                return place + 1
        raise ValueError(f"a {opens} is left open")


def _whole(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp):
        left, right = _whole(node.left), _whole(node.right)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.FloorDiv):
            return left // right
        if isinstance(node.op, ast.Mod):
            return left % right
    raise SyntaxError
