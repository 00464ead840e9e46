"""Faults of the exam: its task, its export, its verdict."""

from tools.mutant_table.entry import seeded

MUTANTS = (
    *seeded("benchmarks/exam/layers.py", "benchmarks/test_exam_model.py::test_transformers_computes_the_same",
        ("overlap-reads-the-block-itself",
         "before = F.pad(x[:, :-1, :, : self.width], (0, 0, 0, 0, 1, 0), value=nothing)",
         "before = x[..., : self.width]")),
    *seeded("benchmarks/exam/export.py", "benchmarks/test_exam_model.py::test_transformers_computes_the_same",
        ("padded-norm-divides-by-more", "F.pad(w * (c.dim / wide.dim) ** 0.5, (0, dim))", "F.pad(w, (0, dim))")),
    *seeded("benchmarks/exam/task.py",
            "benchmarks/test_exam_model.py::test_an_open_block_is_asked_for_once_it_is_closed",
        ("open-block-asked-for-too-early", "limit[:ready] = closed", "limit[:0] = closed")),
    *seeded("benchmarks/exam/ask.py", "benchmarks/test_exam_ask.py::test_the_exam_runs_to_its_result",
        ("indexer-judged-by-short-prompts", "ONLY_LONG = (\"c4_indexer\",)", "ONLY_LONG = ()")),
    *seeded("benchmarks/exam/ask.py",
            "benchmarks/test_exam_ask.py::test_answers_that_retracts_change_and_other_probabilities_are_missed",
        ("answers-unlike-the-control-pass", "answered - retracts[\"answers_unlike_control\"]", "answered")),
    *seeded("benchmarks/exam/problems.py", "benchmarks/test_exam_model.py::test_a_problem_reads_the_same_as_text",
        ("number-of-any-place-counts", "place = answer.index(FINAL) + 1 if FINAL in answer else len(answer)",
         "place = len(answer) - 2")),
)  # fmt: skip
