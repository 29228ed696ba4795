"""Machine code from source by NVIDIA's run-time compiler: a library, needs no CUDA toolkit, no driver and no GPU."""

from __future__ import annotations

from typing import Any

from ...errors import DeviceError
from .sources import Sources

# Left out of the options on purpose: anything that brings paths or times into the code. It is the same, byte for byte,
# wherever it is compiled.
OPTIONS = ("--std=c++17",)


class Nvrtc:
    """The compiler, through ``cuda-bindings``.

    Raises:
        DeviceError: The package or the library is not there.
    """

    def __init__(self) -> None:
        try:
            from cuda.bindings import nvrtc
        except ImportError as e:
            raise DeviceError("the package cuda-bindings is not installed", hint="pip install cuda-bindings") from e
        self._api = nvrtc
        try:
            self._version = self._call("nvrtcVersion")
        except DeviceError:
            raise
        except Exception as e:
            # Whatever cuda-bindings raises where libnvrtc is not found; the class changed between releases.
            raise DeviceError(f"no NVRTC: {str(e).splitlines()[0]}", hint="pip install nvidia-cuda-nvrtc") from e

    def _call(self, what: str, *args: Any) -> Any:
        code, *results = getattr(self._api, what)(*args)
        if code != self._api.nvrtcResult.NVRTC_SUCCESS:
            raise DeviceError(f"{what}: {getattr(code, 'name', code)}")
        return results[0] if len(results) == 1 else tuple(results)

    @property
    def version(self) -> str:
        """As ``"12.8"``."""
        return ".".join(map(str, self._version))

    def architectures(self) -> list[int]:
        """What it compiles for: 90 stands for sm_90."""
        return sorted(self._call("nvrtcGetSupportedArchs"))

    def compile(self, sources: Sources, arch: int) -> bytes:
        """A cubin.

        Args:
            sources: All of its source.
            arch: 90 for sm_90.

        Raises:
            DeviceError: It was refused; the message holds the compiler's own.
        """
        names = list(sources.files)
        program = self._call(
            "nvrtcCreateProgram",
            sources.unit.encode(),
            b"secure_loader.cu",
            len(names),
            [sources.files[name].encode() for name in names],
            [name.encode() for name in names],
        )
        try:
            options = [f"--gpu-architecture=sm_{arch}".encode(), *(option.encode() for option in OPTIONS)]
            try:
                self._call("nvrtcCompileProgram", program, len(options), options)
            except DeviceError as e:
                raise DeviceError(f"{e.message} for sm_{arch}\n{self._log(program)}".rstrip()) from None
            return self._bytes(program, "nvrtcGetCUBIN")
        finally:
            self._api.nvrtcDestroyProgram(program)

    def _log(self, program: Any) -> str:
        return self._bytes(program, "nvrtcGetProgramLog").rstrip(b"\0").decode(errors="replace").strip()

    def _bytes(self, program: Any, what: str) -> bytes:
        buffer = bytearray(self._call(f"{what}Size", program))
        self._call(what, program, buffer)
        return bytes(buffer)
