"""What is wrong, risky or remarkable in a checkpoint: findings, not refusals.

    audit_files(folder)                    shards beside the model, numbers left out
    audit_names(tensors, parts, wanted)    every tensor, by names and shapes
    audit_fused(quantized, settings)       skip lists, read the way each runtime reads them
    audit_qweight(name, qweight)           one linear's scales and zero points
    audit_scales_when_served(name, qweight, dtype)
    summarise(findings, limit, linears)    lines, alike findings as one

Files that cannot be read safely are refused where they are opened (shards.py, store.py); what the
readers refuse becomes a finding with finding_of; require_sound refuses where one is an error.
"""

from __future__ import annotations

from weightpath.checkpoints.audit_files import audit_files
from weightpath.checkpoints.audit_finding import (
    SEVERITIES,
    Finding,
    finding_of,
    require_sound,
    summarise,
)
from weightpath.checkpoints.audit_names import audit_names
from weightpath.checkpoints.audit_skips import audit_fused, fused_layers
from weightpath.checkpoints.audit_values import audit_qweight, audit_scales_when_served

__all__ = [
    "SEVERITIES", "Finding", "audit_files", "audit_fused", "audit_names", "audit_qweight",
    "audit_scales_when_served", "finding_of", "fused_layers", "require_sound",
    "summarise",
]  # fmt: skip
