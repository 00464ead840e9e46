"""Faults of the exam: its task, its export, its verdict."""

from __future__ import annotations

from tools.mutant_table.entry import Mutant, nearest

_MODEL, _ASK = "benchmarks/test_exam_model.py", "benchmarks/test_exam_ask.py"

MUTANTS = (
    Mutant("overlap-reads-the-block-itself", "benchmarks/exam/layers.py",
           nearest(_MODEL, "test_transformers_computes_the_same"),
           "before = F.pad(x[:, :-1, :, : self.width], (0, 0, 0, 0, 1, 0), value=nothing)",
           "before = x[..., : self.width]"),
    Mutant("padded-norm-divides-by-more", "benchmarks/exam/export.py",
           nearest(_MODEL, "test_transformers_computes_the_same"),
           "F.pad(w * (c.dim / wide.dim) ** 0.5, (0, dim))", "F.pad(w, (0, dim))"),
    Mutant("open-block-asked-for-too-early", "benchmarks/exam/task.py",
           nearest(_MODEL, "test_an_open_block_is_asked_for_once_it_is_closed"),
           "limit[:ready] = closed", "limit[:0] = closed"),
    Mutant("indexer-judged-by-short-prompts", "benchmarks/exam/ask.py",
           nearest(_ASK, "test_the_exam_runs_to_its_result_and_its_picture"),
           'ONLY_LONG = ("c4_indexer",)', "ONLY_LONG = ()"),
    Mutant("answers-unlike-the-control-pass", "benchmarks/exam/ask.py",
           nearest(_ASK, "test_answers_that_retracts_change_and_other_probabilities_are_missed"),
           'answered - retracts["answers_unlike_control"]', "answered"),
    Mutant("number-of-any-place-counts", "benchmarks/exam/problems.py",
           nearest(_MODEL, "test_a_problem_reads_the_same_as_text"),
           "place = answer.index(FINAL) + 1 if FINAL in answer else len(answer)", "place = len(answer) - 2"),
)  # fmt: skip
