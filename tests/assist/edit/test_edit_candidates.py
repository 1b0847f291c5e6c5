"""Several candidates for one change: the damaged are dropped, the most frequent syntax tree is taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from keystroke.assist.edit import EditTask, RewriteQuestion, propose_edit
from keystroke.assist.edit.steps import CHEAP, choose_candidate

CODE = "def area(r):\n    return 3 * r * r\n\n\ndef edge(r):\n    return 6 * r\n"
TASK = EditTask({"a.py": CODE}, "area should cube r")


def fence_text(body: str) -> str:
    return f"```python\n{body}```\n"


def area(expression: str) -> str:
    return fence_text(f"def area(r):\n    return {expression}\n")


def whole(expression: str) -> str:
    return fence_text(CODE.replace("3 * r * r", expression))


class Together:
    """Answers all questions of a batch at once."""

    parallel = 8

    def __init__(self, answers: Sequence[str], candidates: int = 8) -> None:
        self.answers, self.candidates = list(answers), candidates
        self.batches: list[int] = []
        self.sampled = 0

    def write(self, messages: object, prediction: object) -> Iterator[str]:
        self.batches.append(1)
        yield self.answers.pop(0)

    def sample(self, messages: object, temperature: float, seed: int) -> Iterator[str]:
        self.sampled += 1
        yield self.answers.pop(0)

    def write_all(self, questions: Sequence[RewriteQuestion]) -> list[str]:
        self.batches.append(len(questions))
        self.sampled += sum(question.temperature > 0 for question in questions)
        return [self.answers.pop(0) for _ in questions]


class OneByOne:
    """Each answer costs as much as the first."""

    parallel = candidates = 1

    def __init__(self, answers: Sequence[str]) -> None:
        self.answers = list(answers)
        self.sampled = 0

    def write(self, messages: object, prediction: object) -> Iterator[str]:
        yield self.answers.pop(0)

    def sample(self, messages: object, temperature: float, seed: int) -> Iterator[str]:
        self.sampled += 1
        yield self.answers.pop(0)


def test_where_answers_are_cheap_the_most_frequent_tree_wins() -> None:
    answers = [area("r ** 2"), whole("r ** 2"), whole("r**3"), area("r ** 3"), whole("r ** 3  # cubed")]
    answers += [area("(r ** 3)"), fence_text("def area(r:\n"), whole("3 * r * r")]
    writer = Together(answers)
    proposal = propose_edit(TASK, writer)
    assert writer.batches == [8]
    assert writer.sampled == 6
    assert proposal.agreement == (4, 6)  # one is damaged, one changes nothing
    assert proposal.texts["a.py"] == CODE.replace("3 * r * r", "r**3")


def test_where_no_candidate_can_be_used_the_usual_questions_follow() -> None:
    writer = Together([fence_text("def area(r:\n")] * 8 + [area("r ** 3")])
    proposal = propose_edit(TASK, writer)
    assert writer.batches == [8, 1]
    assert proposal.texts["a.py"] == CODE.replace("3 * r * r", "r ** 3")


def test_where_each_answer_costs_as_much_a_sure_one_is_taken_at_once() -> None:
    writer = OneByOne([area("r ** 3")])
    proposal = propose_edit(TASK, writer)
    assert proposal.texts["a.py"] == CODE.replace("3 * r * r", "r ** 3")
    assert proposal.agreement is None
    assert not writer.sampled


def test_an_answer_that_changes_nothing_is_asked_for_differently_before_it_is_given_up() -> None:
    same = whole("3 * r * r")
    part = area("3 * r * r")
    writer = OneByOne([part, part, same, same, whole("r ** 3"), area("r ** 3"), whole("r ** 4")])
    proposal = propose_edit(TASK, writer)
    assert writer.sampled == 3
    assert proposal.agreement == (2, 3)
    assert proposal.texts["a.py"] == CODE.replace("3 * r * r", "r ** 3")


def test_a_doubtful_answer_is_compared_with_others() -> None:
    task = EditTask({"a.py": CODE}, "area should use math.pow")
    doubtful = area("3 * r ** 2")
    right = area("3 * math.pow(r, 2)")
    writer = OneByOne([doubtful, doubtful, right, right, doubtful])
    proposal = propose_edit(task, writer)
    assert writer.sampled == 3
    text = proposal.texts["a.py"]
    assert text is not None
    assert "math.pow" in text
    assert proposal.agreement == (2, 4)


def test_where_more_answers_slow_the_first_only_a_doubt_asks_for_them_and_at_once() -> None:
    task = EditTask({"a.py": CODE}, "area should use math.pow")
    doubtful, right = area("3 * r ** 2"), area("3 * math.pow(r, 2)")
    sure = Together([right], candidates=1)
    propose_edit(task, sure)
    assert sure.batches == [1]
    writer = Together([doubtful, doubtful, right, right, doubtful], candidates=1)
    proposal = propose_edit(task, writer)
    assert writer.batches == [1, 1, 3]
    assert proposal.agreement == (2, 4)


@pytest.mark.parametrize("number", [0, 1, CHEAP - 1])
def test_of_equally_frequent_candidates_one_without_a_doubt_is_taken(number: int) -> None:
    texts = [CODE.replace("3 * r * r", body) for body in ("r ** 3", "math.pow(r, 3)", "r * r * r")]
    found = texts[number % 3 :] + texts[: number % 3]
    chosen, votes = choose_candidate(found, CODE, "a.py", "area should use math.pow")
    assert votes == 1
    assert "math.pow" in chosen


def checks(path: str, old: str, texts: Sequence[str]) -> list[float]:
    return [1.0 if "r ** 3" in text else 0.5 for text in texts]


def test_a_candidate_that_the_checks_find_best_beats_more_frequent_ones() -> None:
    writer = Together([whole("r ** 2")] * 7 + [whole("r ** 3")])
    proposal = propose_edit(TASK, writer, checks=checks)
    assert writer.batches == [8]
    assert proposal.texts["a.py"] == CODE.replace("3 * r * r", "r ** 3")
    assert proposal.agreement == (1, 8)


def test_where_no_candidate_passes_the_checks_others_are_asked_for_once() -> None:
    writer = Together([whole("r ** 2")] * 15 + [whole("r ** 3")])
    proposal = propose_edit(TASK, writer, checks=checks)
    assert writer.batches == [8, 8]
    assert proposal.texts["a.py"] == CODE.replace("3 * r * r", "r ** 3")


def test_checks_that_know_nothing_change_nothing() -> None:
    writer = Together([whole("r ** 2")] * 7 + [whole("r ** 3")])
    proposal = propose_edit(TASK, writer, checks=lambda path, old, texts: [])
    assert writer.batches == [8]
    assert proposal.agreement == (7, 8)
