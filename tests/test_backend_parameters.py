"""Parameters of tests that need a GPU would run, and fail or skip, where there is none."""

from __future__ import annotations

from tests.backends import ALL, ON_CPU, gpu_param, kernels, serving


def marks_of(param):
    return {mark.name for mark in param.marks}


def test_a_kernel_of_the_gpu_carries_the_mark_and_one_of_the_cpu_does_not():
    for param in kernels(*ALL):
        name, device, _ = param.values[0]
        assert ("gpu" in marks_of(param)) == (device == "cuda")
        assert device == "cuda" or name in ON_CPU
    assert marks_of(gpu_param("fa3", "cuda")) == {"gpu", "skipif"}
    assert gpu_param("varlen", 64).values == ("varlen", 64)


def test_a_kernel_that_refuses_the_call_is_not_generated():
    made = [param.values[0][0] for param in serving(kernels(*ALL, gpu=False), return_lse=True)]
    assert "reference" in made
    assert "sdpa" not in made
