"""Results of runs are kept: what is done is not done again, unless something else is asked."""

from pathlib import Path

from tools.scores.kept import file_named, kept, spread


def test_a_result_is_kept_for_the_same_settings(tmp_path: Path) -> None:
    file, runs = tmp_path / "kept" / "one.json", []

    def run() -> dict[str, float]:
        runs.append(len(runs))
        return {"test": 80.0 + len(runs)}

    asked = {"sizes": (1, 2), "seed": 0}
    assert [kept(file, asked, run) for _ in range(2)] == [{"test": 81.0}] * 2
    assert kept(file, {**asked, "seed": 1}, run) == {"test": 82.0}
    assert runs == [0, 1]
    assert file_named(file) == ["one.json", file.stat().st_size]


def test_what_is_said_of_scores() -> None:
    assert spread([80.0, 82.0]) == {"mean": 81.0, "deviation": 1.41, "scores": [80.0, 82.0]}
    assert spread([80.123]) == {"mean": 80.12, "deviation": None, "scores": [80.12]}
