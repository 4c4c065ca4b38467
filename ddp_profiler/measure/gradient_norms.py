"""Squared norms of gradients before and after DDP reduces them, for the noise scale.

A bucket is read when it is handed over, with this rank's gradient in it, and again when backward
has returned, with the mean over ranks. Both readings are of the same elements. Nothing is written
to them and no random number is drawn, so training stays what it is. They cost two passes over
the gradients and, on a GPU, one wait for the device: only steps that no figure is made of pay it.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterable

import torch
from torch import Tensor

from ddp_profiler.measure.marks import Recorder
from ddp_profiler.schema import SpanKind

_ROW = 1 << 10
"""Elements that are added up in their own type: few enough for rounding not to matter."""
_CHUNK = 1 << 20
"""Elements that are widened at a time, whole rows of them."""


class GradientNorms:
    """Norms of the gradient that one DDP reduces, of one backward after the other.

    Args:
        recorder: Takes the points; its ``phase`` tells whether backward runs.
        index: The number of the DDP, where there are several.

    Attributes:
        wanted: Whether buckets that are handed over in backward are read.
    """

    def __init__(self, recorder: Recorder, index: int = -1) -> None:
        self.wanted = False
        self._recorder = recorder
        self._index = index
        self._buckets: list[Tensor] = []
        self._local: list[Tensor] = []
        self._broken = False

    def hand_over(self, bucket: Tensor, ranks: int) -> None:
        """Reads a bucket that is about to be reduced; never fails.

        Args:
            bucket: This rank's gradient, divided by the number of ranks as DDP does. It is
                reduced in place.
            ranks: That number.
        """
        if self._recorder.phase is not SpanKind.BACKWARD:
            # Under join a rank that has ended hands over zeros in place of a gradient.
            return
        try:
            self._local.append(squared_norm(bucket) * ranks**2)
            self._buckets.append(bucket)
        except (RuntimeError, NotImplementedError, TypeError):
            # Such as a sparse one, whose repeated elements are not summed up yet.
            self._broken = True

    def take(
        self,
        *,
        local_samples: int | None = None,
        reduced_samples: int | None = None,
        divisor: float = 1.0,
        reads_local: bool = True,
    ) -> None:
        """Records both norms when backward has returned, and lets go of the buckets; never fails.

        They are points of the current micro-step.
        Records nothing where nothing was reduced, or where a bucket could not be read.

        Args:
            local_samples: Samples in this rank's gradient, where they are known.
            reduced_samples: Samples in that of all ranks, where they are known.
            divisor: What all gradients are too large by, as with a scaled loss.
            reads_local: Whether the gradient before reduction is recorded.
        """
        buckets, local, broken = self._buckets, self._local, self._broken
        self.forget()
        if not buckets or broken:
            return
        with contextlib.suppress(RuntimeError, NotImplementedError, TypeError):
            both = _told((torch.stack(local), torch.stack([squared_norm(b) for b in buckets])))
            nbytes = sum(bucket.nbytes for bucket in buckets)
            kinds = (
                (SpanKind.LOCAL_GRADIENT_NORM, local_samples),
                (SpanKind.REDUCED_GRADIENT_NORM, reduced_samples),
            )
            for (kind, samples), value in list(zip(kinds, both, strict=True))[not reads_local :]:
                record(self._recorder, kind, value / divisor**2, nbytes, samples, self._index)

    def forget(self) -> None:
        """Lets go of what was read since the last :meth:`take`."""
        self._buckets, self._local, self._broken = [], [], False


def record(
    recorder: Recorder,
    kind: SpanKind,
    value: float,
    nbytes: int,
    samples: int | None,
    index: int = -1,
) -> None:
    """Records a squared norm as a point of the current micro-step: the bits of a float64."""
    mark = recorder.mark()
    bits = struct.unpack("<q", struct.pack("<d", value))[0]
    recorder.span(kind, mark, mark, index=index, nbytes=nbytes, samples=samples, value=bits)


def of_gradients(parameters: Iterable[Tensor]) -> tuple[float, int]:
    """Returns the squared norm of the parameters' gradients together, and their bytes."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return 0.0, 0
    (total,) = _told((torch.stack([squared_norm(g) for g in gradients]),))
    return total, sum(g.nbytes for g in gradients)


def squared_norm(tensor: Tensor) -> Tensor:
    """Returns the sum of |element|^2 as a float64 scalar on the tensor's device.

    Types of 16 bits are added up in 32, and on a CPU no more than 1,024 elements in less than 64: a
    sum of millions in 32 bits is off by 3e-4 there, this one by less than 1e-5. Rows, since a dot
    product of more is the BLAS's, whose order, and so whose error, changes with the processor.

    Raises:
        TypeError: The tensor is not dense.
    """
    if tensor.layout is not torch.strided:
        raise TypeError(f"no norm of a tensor of layout {tensor.layout}")
    with torch.no_grad():
        values = tensor.detach()
        if values.is_complex():
            values = torch.view_as_real(values.resolve_conj())
        flat = values.reshape(-1)
        if not flat.numel():
            return torch.zeros((), dtype=torch.float64, device=flat.device)
        if flat.device.type != "cpu":
            # Added up as a tree there, which is exact enough, and each chunk would be a kernel.
            wide = torch.promote_types(flat.dtype, torch.float32)
            norm: Tensor = torch.linalg.vector_norm(flat, dtype=wide)
            return norm.double().square()
        # One after the other: of 16 bits all of them widened would be twice the gradient.
        return torch.stack([_by_rows(chunk) for chunk in torch.split(flat, _CHUNK)]).sum()


def _by_rows(values: Tensor) -> Tensor:
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    whole = wide.numel() // _ROW * _ROW
    rest = wide[whole:]
    total = torch.dot(rest, rest).double()
    if whole:
        norms = torch.linalg.vector_norm(wide[:whole].view(-1, _ROW), dim=1)
        total += norms.double().square().sum()
    return total


def _told(norms: tuple[Tensor, ...]) -> list[float]:
    """Returns the sum of each; the device is waited for once."""
    return [float(v) for v in torch.stack([values.sum() for values in norms]).tolist()]
