"""The kernels of recurrent layers in Triton."""
