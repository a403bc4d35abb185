"""The episodes of a gate's replay: rounds share no seed, and each task has its trials."""

from traced.pipeline.held_out_replay import HeldOutReplay


def test_rounds_share_no_seed() -> None:
    replay = HeldOutReplay("d", {"a": [1, 2, 3, 4], "b": [5, 6, 7, 8]}, 2)
    first, second = ([(job.task_id, job.trial, job.seed) for job in replay.jobs(number)] for number in (1, 2))
    assert first == [("a", 0, 1), ("a", 1, 2), ("b", 0, 5), ("b", 1, 6)]
    assert second == [("a", 2, 3), ("a", 3, 4), ("b", 2, 7), ("b", 3, 8)]
