import os
from pathlib import Path

from traced.inference.engine_process import delete_old_logs


def test_only_the_newest_logs_of_engines_are_kept(tmp_path: Path) -> None:
    for age, name in enumerate(["engine-3.log", "engine-1.log", "engine-1.log.1", "train.log"]):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    delete_old_logs(tmp_path, count=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine-1.log", "engine-3.log", "train.log"]
    delete_old_logs(tmp_path / "nowhere", count=2)
    delete_old_logs(tmp_path, count=3)
    assert len(list(tmp_path.iterdir())) == 3
