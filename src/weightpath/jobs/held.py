"""From an opened checkpoint to the plain record that the acceptance table is worked out from."""

from __future__ import annotations

from collections.abc import Mapping

from weightpath.checkpoints.bitpack import words
from weightpath.checkpoints.low_bit import LowBitCheckpoint
from weightpath.checkpoints.opened import Outline
from weightpath.checkpoints.store import architecture
from weightpath.engine.load import model_dtype
from weightpath.paths.held import Held, HeldLinear

_CONTRADICTION = "contradiction: "


def held_of(
    low: LowBitCheckpoint,
    outlines: Mapping[str, Outline],
    head: str,
    no_model: str = "",
    no_place: tuple[str, ...] = (),
) -> Held:
    """What `low` holds. outlines: of the linears that can be read. head: the output head's module.
    no_model: why transformers makes no model of config.json, or ""; no_place: what it has no place
    for."""
    linears = tuple(
        HeldLinear(
            name,
            outline.scheme,
            outline.shape,
            "head" if name == head else "linear",
            outline.ordered,
            outline.minimums,
            outline.scaled,
            str(outline.scales).removeprefix("torch."),
        )
        for name, outline in outlines.items()
    )
    return Held(
        format=low.format,
        linears=linears,
        settings={} if low.config_missing else low.settings,
        dtype=str(model_dtype(low.config)).removeprefix("torch."),
        architecture=architecture(low.config),
        contradictions=tuple(
            note.removeprefix(_CONTRADICTION)
            for note in low.notes
            if note.startswith(_CONTRADICTION)
        ),
        padded_words=any(_padded(low, name, outline) for name, outline in outlines.items()),
        config_missing=low.config_missing,
        nested=low.nested,
        no_model=no_model,
        no_place=no_place,
        no_zeros=tuple(
            name
            for name in outlines
            if low.format.startswith("AWQ")
            and low.parts[name].keys().isdisjoint(("qzeros", "scaled_zeros"))
        ),
    )


def _padded(low: LowBitCheckpoint, name: str, outline: Outline) -> bool:
    """Whether packed words hold whole codes only: 3, 5, 6 and 7 bits of older packages."""
    stored = low.parts[name].get("weight_packed")
    if stored is None or outline.scheme is None:
        return False
    n, k = outline.shape
    return low.source.tensors[stored].shape != (n, words(k, outline.scheme.bits))
