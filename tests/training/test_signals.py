"""A launcher that passes on what its processes have been sent already asks once, not twice."""

from __future__ import annotations

import os
import signal
import time

import pytest

from megatron_essh.training.signals import GracefulStop


def asked_twice(echo_seconds: float, pause: float) -> None:
    with GracefulStop(echo_seconds) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested == "SIGTERM"
        time.sleep(pause)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested == "SIGTERM"


@pytest.mark.parametrize(
    ("echo_seconds", "pause", "status"), [(5.0, 0.0, 0), (0.0, 0.0, -signal.SIGTERM), (0.05, 0.2, -signal.SIGTERM)]
)
def test_a_second_signal_aborts_unless_it_is_an_echo(in_child, echo_seconds, pause, status) -> None:
    assert in_child(lambda: asked_twice(echo_seconds, pause))[0] == status
