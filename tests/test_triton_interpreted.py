"""Runs the interpreted kernel tests in child processes: Triton interprets or compiles per process."""

from __future__ import annotations

from tests.triton_interpreter import run_interpreted


def test_kernels() -> None:
    run_interpreted("triton_kernel_cases.py", at_least=55)


def test_pipeline() -> None:
    run_interpreted("triton_pipeline_cases.py", at_least=15)
