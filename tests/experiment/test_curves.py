"""The picture of a run: which panels are drawn, with which curves."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from alignment.errors import UserError
from alignment.experiment.curves import draw_curves, moving_mean, read_curves
from alignment.experiment.record import MetricsFile


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved."""
    figures: list[Figure] = []
    save = Figure.savefig

    def remember(self: Figure, *args, **kwargs) -> None:
        figures.append(self)
        save(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", remember)
    return figures


def legends(figure: Figure) -> dict[str, list[str]]:
    return {
        axes.get_title(): [text.get_text() for text in legend.get_texts()]
        for axes in figure.axes
        if (legend := axes.get_legend()) is not None
    }


def test_an_online_run(tmp_path: Path, drawn: list[Figure]) -> None:
    file = MetricsFile(tmp_path)
    file.append(0, "val", {"val/reward": 0.1, "val/accuracy": 0.1, "val/length": 5.0})
    for step in range(1, 100):
        metrics = {"train/loss": 0.1, "train/kl": 0.01, "train/entropy": 1.0, "train/lr": 1e-4}
        file.append(step, "train", metrics | {"rollout/reward": step / 100, "rollout/length": 4.0})
    path = draw_curves(tmp_path)
    assert path == tmp_path / "curves.png"
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert legends(drawn[0]) == {
        "Reward": ["rollout/reward (mean of 5)", "val/reward"],
        "Accuracy": ["val/accuracy"],
        "KL to the reference": ["train/kl (mean of 5)"],
        "Entropy": ["train/entropy (mean of 5)"],
        "Completion length": ["rollout/length (mean of 5)", "val/length"],
        "Loss": ["train/loss (mean of 5)"],
    }
    assert all(axes.get_xlabel() == "optimizer step" and axes.get_ylabel() for axes in drawn[0].axes)


def test_a_preference_run(tmp_path: Path, drawn: list[Figure]) -> None:
    file = MetricsFile(tmp_path)
    for step in range(1, 4):
        file.append(step, "train", {"train/loss": 0.69, "rewards/accuracies": 0.5, "rewards/margins": 0.1 * step})
    file.append(3, "val", {"val/loss": 0.6})
    draw_curves(tmp_path)
    assert legends(drawn[0]) == {
        "Preference accuracy": ["rewards/accuracies"],
        "Implicit rewards": ["rewards/margins"],
        "Loss": ["train/loss", "val/loss"],
    }
    margins = drawn[0].axes[1].lines[0]
    np.testing.assert_array_equal(margins.get_xdata(), [1, 2, 3])
    np.testing.assert_allclose(np.asarray(margins.get_ydata()), [0.1, 0.2, 0.3])


def test_curves_are_in_order_and_without_gaps_of_nan(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    for step, value in ((1, 1.0), (3, float("nan")), (4, 4.0), (2, 2.0)):
        file.append(step, "train", {"train/loss": value})
    steps, values = read_curves(tmp_path)["train/loss"]
    assert (steps.tolist(), values.tolist()) == ([1, 2, 4], [1.0, 2.0, 4.0])


def test_the_moving_mean_by_hand() -> None:
    # ends: (1 + 2) / 2 and (6 + 9) / 2; middle: (1 + 2 + 6) / 3 and (2 + 6 + 9) / 3
    np.testing.assert_allclose(moving_mean(np.array([1.0, 2.0, 6.0, 9.0]), 3), [1.5, 3.0, 17 / 3, 7.5])


@pytest.mark.parametrize("metrics", [{}, {"train/lr": 1.0}])
def test_nothing_to_draw_is_said(tmp_path: Path, metrics: dict[str, float]) -> None:
    if metrics:
        MetricsFile(tmp_path).append(1, "train", metrics)
    with pytest.raises(UserError, match=r"metrics\.csv has nothing to draw: it has (no rows|\['train/lr'\])"):
        draw_curves(tmp_path)
