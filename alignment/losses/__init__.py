"""Losses, advantages and metrics: pure functions on tensors, one file per idea, no framework.

A loss returns unreduced values, (N, C) per token, (N,) per completion or (B,) per pair, and a dict of detached
statistics of the same shapes. A statistic is a mean over the same mask as the loss; NaN in it means absent. The caller
reduces: sum over the optimizer step / count over the optimizer step (`reduce.py`).
"""
