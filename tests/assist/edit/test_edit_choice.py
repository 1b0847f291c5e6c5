"""Which lines an instruction is about, and what it mentions: decided without a model."""

from __future__ import annotations

import pytest

from keystroke.assist.edit.choice import RegionChoice, choose_regions, enclosing_region
from keystroke.assist.edit.mentions import asks_for_definition, line_spans, read_mentions
from keystroke.assist.edit.rewrite import Region

CODE = """import math

LIMIT = 10


def parse(line):
    return line.split()


class Cart:
    def __init__(self):
        self.items = []

    def total(self):
        return sum(self.items)

    def receipt(self):
        return str(self.total())

    def clear(self):
        self.items = []


def area(r):
    return math.pi * r * r
"""


def chosen(instruction: str, near: int | None = None) -> list[str]:
    """The first lines of the regions that an instruction means."""
    choice = choose_regions({"a.py": CODE}, instruction, near=None if near is None else ("a.py", near))
    return [region.parts(CODE)[1].split("\n")[0].strip() for region in choice.regions]


@pytest.mark.parametrize(
    ("instruction", "heads"),
    [
        ("area should round its result", ["def area(r):"]),
        ("Fix `Cart.total`: an empty cart must give 0.0", ["def total(self):"]),
        ("the constant LIMIT should be 20", ["LIMIT = 10"]),
        ("Give parse an optional parameter separator=None", ["def parse(line):"]),
        ("line 24 is wrong for negative numbers", ["def area(r):"]),
        ("Let Cart.__init__ take tax=0.19 and use it in total and receipt", ["class Cart:"]),
        ("Add a method count() to Cart", ["class Cart:"]),
        ("Add a function volume(r)", ["def area(r):"]),
    ],
)
def test_names_lines_and_things_to_add_choose_the_region(instruction: str, heads: list[str]) -> None:
    assert chosen(instruction) == heads
    assert choose_regions({"a.py": CODE}, instruction).certain


def test_what_nothing_answers_to_is_not_sure_and_is_meant_at_the_cursor() -> None:
    assert choose_regions({"a.py": CODE}, "make it faster") == RegionChoice((), False)
    assert chosen("make it faster", near=23) == ["def area(r):"]


def test_the_next_larger_region_is_the_class_and_then_the_file() -> None:
    total = Region("a.py", 12, 14)
    around = enclosing_region(total, CODE)
    assert around.parts(CODE)[1].startswith("class Cart:")
    assert enclosing_region(around, CODE) == Region("a.py")


def test_a_verb_is_no_name_unless_something_is_given_to_it() -> None:
    assert "add" not in {m.text.lower() for m in read_mentions("Add a method that sorts")}
    assert "parse" in {m.text for m in read_mentions("Give parse an optional limit")}
    assert [m.text for m in read_mentions("call `add()` twice") if m.code] == ["add"]


def test_what_is_only_raised_names_no_place() -> None:
    mentions = {m.text: m for m in read_mentions("leave should raise LibraryError for a reader with books")}
    assert not mentions["LibraryError"].is_location
    assert mentions["leave"].is_location


def test_a_definition_that_is_there_is_not_added() -> None:
    instruction = "Add a docstring to the method total"
    assert not asks_for_definition(instruction, read_mentions(instruction), {"total"})
    instruction = "Add a method count() to Cart"
    assert asks_for_definition(instruction, read_mentions(instruction), {"Cart", "total"})


def test_line_numbers_of_another_file_do_not_count() -> None:
    assert line_spans("see lines 3 to 5", "a.py") == [(2, 5)]
    assert line_spans('File "b.py", line 7', "a.py") == []
    assert line_spans('File "src/a.py", line 7', "a.py") == [(6, 7)]


STORE = """package store

var ErrNone = errors.New("none")

const MOST = 5

type Store struct {
	items []string
}

func (s *Store) Get(at int) string {
	return s.items[at]
}

func (s *Store) Put(item string) {
	if len(s.items) > MOST {
		return
	}
	s.items = append(s.items, item)
}
"""
QUEUE = """export interface Job {
  priority: number;
  run: () => void;
}

export class Queue {
  private jobs: Job[] = [];

  add(job: Job): void {
    this.jobs.push(job);
  }
}

export function shown(ms: number): string {
  return String(ms);
}
"""
SHAPES = (
    "pub enum Shape {\n    Circle(f64),\n}\n\n"
    + "// a line between them\n" * 14
    + "\npub fn area(shape: &Shape) -> f64 {\n    match shape {\n        Shape::Circle(r) => r\n    }\n}\n"
)
GET, PUT = "func (s *Store) Get(at int) string {", "func (s *Store) Put(item string) {"


@pytest.mark.parametrize(
    ("path", "code", "instruction", "heads"),
    [
        # A verb in a list of definitions is one of them.
        ("s.go", STORE, "Get and Put must hold the lock", [GET]),
        # An error that is to be returned is no place.
        ("s.go", STORE, "Get panics when there is nothing; return ErrNone", [GET]),
        # A constant that is spoken of means what uses it, one that is to be another means itself.
        ("s.go", STORE, "there can be six items although MOST is 5", [PUT]),
        ("s.go", STORE, "Raise MOST to ten", ["const MOST = 5"]),
        # Fields have the names of ordinary words.
        ("q.ts", QUEUE, "the ones with a higher priority should run first", []),
        # A method goes into the one class that there is.
        ("q.ts", QUEUE, "Add a clear() method that drops all jobs", ["export class Queue {"]),
        # A type that is named besides a function is meant, too.
        (
            "s.rs",
            SHAPES,
            "add a Square variant to Shape and handle it in area",
            ["pub enum Shape {", "pub fn area(shape: &Shape) -> f64 {"],
        ),
    ],
)
def test_words_that_name_something_else_do_not_choose_the_region(
    path: str, code: str, instruction: str, heads: list[str]
) -> None:
    regions = choose_regions({path: code}, instruction).regions
    assert [region.parts(code)[1].split("\n")[0].strip() for region in regions] == heads
    if instruction.startswith("Get and Put"):
        assert PUT in regions[0].parts(code)[1]
