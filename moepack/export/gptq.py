"""`gptq`: GPTQ checkpoints of the form `gptq_v2`, with zero points as they are (the older form stores them less one).

Matrices are transposed: codes in 32-bit words along the columns, [cols * bits / 32, rows], zero points along the rows,
[groups, rows * bits / 32], scales [groups, rows]. Libraries compute in the scales' dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moepack.pack.reader import Bundle
from moepack.pack.spec import Version

from .compressed import Coded, matrices_of
from .files import Entries
from .layout import CheckpointTensor
from .targets import ExportJob
from .values import Values, words

if TYPE_CHECKING:
    from torch import Tensor


FORM = "gptq_v2"


@dataclass(frozen=True)
class Gptq(Coded):
    """See the module."""

    def refusal(self, bundle: Bundle, version: Version, dense: bool = False) -> str | None:
        """See Target: rows and columns fill words."""
        if why := super().refusal(bundle, version, dense):
            return why
        for where, m in matrices_of(bundle, dense):
            if (m.rows | m.cols) % 32 and not version.holds:
                return f"{where} is {m.rows} by {m.cols}, not multiples of 32"
        return None

    def exact(self, job: ExportJob) -> bool:
        """See Target."""
        return False

    def entries(self, job: ExportJob, piece: CheckpointTensor, version: Version) -> Entries:
        """See SafetensorsTarget."""
        if piece.bias or not self.codes(version):
            return super().entries(job, piece, version)
        (rows, cols), bits, module = piece.shape, version.bits, piece.name.removesuffix(".weight")
        groups = cols // version.group_size
        return {
            f"{module}.qweight": ("I32", (cols * bits // 32, rows)),
            f"{module}.qzeros": ("I32", (groups, rows * bits // 32)),
            f"{module}.scales": (version.scale_dtype, (groups, rows)),
            f"{module}.g_idx": ("I32", (cols,)),
        }

    def tensors(self, job: ExportJob, piece: CheckpointTensor, version: Version, values: Values) -> dict[str, Tensor]:
        """See SafetensorsTarget."""
        if piece.bias or not self.codes(version):
            return super().tensors(job, piece, version, values)
        module = piece.name.removesuffix(".weight")
        bits = version.bits
        zeros = values.zero[piece.rows].T
        return {
            f"{module}.qweight": values.turned_words[:, piece.rows],
            f"{module}.qzeros": words(zeros, bits),
            f"{module}.scales": values.scale[piece.rows].T.contiguous(),
            f"{module}.g_idx": torch.arange(piece.shape[1], dtype=torch.int32) // version.group_size,
        }

    def config(self, job: ExportJob) -> dict[str, object]:
        """See SafetensorsTarget."""
        modules = self.by_version(job)
        first = job.used[0]
        dynamic: dict[str, dict[str, object]] = {}
        for version, names in modules.items():
            if version != first:
                own: dict[str, object] = {
                    "bits": version.bits,
                    "group_size": version.group_size,
                    "sym": self.symmetric(job, version),
                }
                dynamic |= {f"+:^{name.removeprefix('re:')}$": own for name in names}
        dynamic |= {f"-:^{name.removeprefix('re:').removesuffix('$')}$": {} for name in sorted(self.ignored(job))}
        return {
            "quantization_config": {
                "quant_method": "gptq",
                "checkpoint_format": FORM,
                "format": FORM,
                "bits": first.bits,
                "group_size": first.group_size,
                "sym": self.symmetric(job, first),
                "desc_act": False,
                "lm_head": False,
                "pack_dtype": "int32",
                "dynamic": dynamic,
            }
        }


TARGET = Gptq("gptq", mixes=False)
