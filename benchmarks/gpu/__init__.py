"""``make gpu``: the device path built, tested and measured on the GPU of this machine, in under ten minutes.

``python -m benchmarks.gpu`` needs nothing but Python to begin with; it finds out what there is, and says what is missing.
Each stage is a process of its own, with a time limit of its own: whatever becomes of it, the others run, and every result
is written. See :mod:`benchmarks.gpu.stages` for what they are.
"""

NAMES = ("gpu-proof", "gpu-copies", "gpu-kernels", "gpu-pipeline", "gpu-load", "gpu-cold", "gpu-sanitizer")
"""Result files, in the order of the stages that write them."""
