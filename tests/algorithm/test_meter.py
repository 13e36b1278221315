import torch

from alignment.algorithm.meter import Meter


def test_a_mean_is_sum_over_sum_not_a_mean_of_means():
    meter = Meter()
    meter.mean("kl", torch.tensor([4.0]))
    meter.mean("kl", torch.tensor([1.0, 1.0, 1.0]))
    assert meter.flush() == {"kl": 7 / 4}  # the mean of means would be 2.5


def test_masked_and_missing_values_leave_numerator_and_denominator():
    meter = Meter()
    meter.mean("x", torch.tensor([[1.0, 99.0], [3.0, float("nan")]]), torch.tensor([[1, 0], [1, 1]]))
    assert meter.flush() == {"x": 2.0}


def test_a_metric_with_nothing_to_count_is_absent():
    meter = Meter()
    meter.add("present", 1.0, 1)
    meter.mean("absent", torch.tensor([float("nan")]))
    assert "absent" not in meter.flush()


def test_totals_add_up_and_flush_forgets():
    meter = Meter()
    meter.total("tokens", 3)
    meter.total("tokens", 4)
    assert meter.flush() == {"tokens": 7.0}
    assert meter.flush() == {}


def test_reduce_sees_sums_and_counts():
    meter = Meter()
    meter.add("loss", 6.0, 3)
    assert meter.flush(lambda table: table + torch.tensor([[2.0, 1.0]])) == {"loss": 2.0}


def test_nothing_with_a_graph_is_kept():
    meter = Meter()
    meter.mean("loss", torch.ones(2, requires_grad=True) * 2)
    assert all(isinstance(value, float) for value in meter._sums.values())
