"""Runs the interpreted kernel tests in child processes: Triton interprets or compiles per process."""

from __future__ import annotations

from tests.triton_interpreter import run_interpreted


def test_kernels() -> None:
    assert run_interpreted("triton_kernel_cases.py") >= 55


def test_pipeline() -> None:
    assert run_interpreted("triton_pipeline_cases.py") >= 15
