"""Rewards for runs of an untrained model, which never gets a sum right."""

import time


def digits(completions, **columns):
    """Share of the characters that are printable ASCII."""
    return [sum(32 <= ord(c) < 127 for c in text) / max(len(text), 1) for text in completions]


def digits_slowly(completions, **columns):
    """The same, slowly enough for a test to kill the run between two checkpoints."""
    time.sleep(0.3)
    return digits(completions)
